"""Sampling kernels against the reference: the same token for the same seed, the right distribution, independent of the
batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.seed import SEED
from thalweg.batch.slots import Slots
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import Bind, SamplingNeeds
from thalweg.core.sampling import SamplingParams
from thalweg.sampling.kernel_sampling import KernelSampler, sample_into
from thalweg.sampling.random import exponential
from thalweg.sampling.sample import REFERENCE, accept

VOCAB = 129280
CONTEXT = 300
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"top_k": 2},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.6, "top_k": 50, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    {"top_k": 700, "top_p": 0.99},
    {"top_k": 5000},
    {"top_k": 5000, "top_p": 0.5},
    {"top_k": VOCAB - 1},
    {"temperature": 1.3, "top_p": 0.9},
    {"top_p": 0.2},
    {"top_p": 1e-6},
    {"temperature": 0.02, "top_p": 0.99},
    {"min_p": 0.1},
    {"temperature": 2.0, "top_p": 0.999, "min_p": 1e-3},
    {"min_p": 1.0},
]
DRAWS = SamplingNeeds(random=True, truncated=True)


def some_logits(shape: str, rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(rows, vocab, generator=generator, device="cuda")
    if shape == "peaked":
        return x * 4
    if shape == "narrow":
        return x * 0.05
    if shape == "equal":
        return torch.zeros_like(x) + 1.5
    if shape == "rounded":  # many equal values, at every border
        return x.bfloat16().float()
    if shape == "sorted":  # likely ids are neighbours
        return (x * 3).sort(-1, descending=True).values
    if shape == "masked":  # a grammar leaves few
        return x.masked_fill(torch.rand(x.shape, generator=generator, device="cuda") > 5 / vocab, -torch.inf).scatter_(
            1, torch.full((rows, 1), 11, device="cuda"), 0.0
        )
    return x


def bound(params: list[dict[str, Any]], seeds: list[int], device: str = "cuda", context: int = CONTEXT) -> Slots:
    """Slots of which number i + 1 holds row i."""
    made = Slots(len(params) + 2, context, torch.device(device))
    made.bind(
        [
            Bind(i + 1, tuple(range(5, 9 + i)), 4, 3 + i, context - 1, seed, (7, 3), SamplingParams(**one))
            for i, (one, seed) in enumerate(zip(params, seeds, strict=True))
        ]
    )
    return made


def index(rows: int) -> Tensor:
    return torch.arange(1, rows + 1, device="cuda")


def drawn(logits: Tensor, slots: Slots, slot_E: Tensor, needs: SamplingNeeds = DRAWS) -> Tensor:
    return KernelSampler().sample_into_slots(logits, slots, slot_E, slots.ints_SI[slot_E], needs).tokens_EQ[:, 0]


def exact(logits_V: Tensor, params: SamplingParams, seed: int, length: int) -> tuple[int, float, float]:
    """In float64: the token, by how much it won, and how near (relative to all mass) an id of the front lies to top-p's
    border: where either is within rounding, another token is as right.
    """
    if params.is_greedy:
        return int(logits_V.argmax()), 1.0, 1.0
    y = logits_V.double() / torch.tensor(params.temperature, dtype=torch.float32).double().item()
    value, order = torch.sort(y.float().double(), descending=True, stable=True)
    rank = torch.arange(len(value), device=value.device)
    k = params.top_k or len(value)
    mass = (value - value[0]).exp().masked_fill(rank >= k, 0.0)
    before = (mass.cumsum(0) - mass) / mass.sum()
    keep = (rank < k) & ((before < params.top_p) | (params.top_p == 1)) & (mass >= params.min_p)
    keep[0] = True
    coins = exponential(torch.tensor([seed]).cuda(), torch.tensor([length]).cuda(), len(value))[0].double().log()
    score = value - coins[order]
    best = score.masked_fill(~keep, -torch.inf).topk(2)
    near = (score >= best.values[0]) & (rank < k)
    slack = torch.minimum(
        (before - params.top_p).abs(), (mass - params.min_p).abs() if params.min_p else mass * 0 + 1.0
    )
    return int(order[best.indices[0]]), float(best.values[0] - best.values[1]), float(slack[near].min())


@pytest.mark.parametrize("shape", ["flat", "peaked", "narrow", "equal", "rounded", "sorted", "masked"])
def test_the_same_token_as_by_the_definition(shape: str) -> None:
    """In float64, but for rows whose threshold is within 1e-5 of the mass."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    seeds = torch.randint(0, 1 << 62, (len(KINDS),), generator=generator, device="cuda").tolist()
    for vocab in (VOCAB, 4100, 300):
        logits = some_logits(shape, len(KINDS), vocab, generator)
        slots = bound(KINDS, seeds)
        got = drawn(logits.clone(), slots, index(len(KINDS))).tolist()
        for row, kind in enumerate(KINDS):
            token, margin, slack = exact(logits[row], SamplingParams(**kind), seeds[row], 4 + row)
            close = margin < 1e-5 or slack < 1e-5
            assert got[row] == token or close, (SEED, vocab, kind, got[row], token, margin, slack)


def test_sampling_state_equals_the_reference() -> None:
    generator = torch.Generator("cuda").manual_seed(SEED)
    logits = some_logits("peaked", len(KINDS), 500, generator)
    ours, theirs = bound(KINDS, list(range(len(KINDS)))), bound(KINDS, list(range(len(KINDS))))
    for slots in (ours, theirs):
        slots.end[3] = 0
        slots.end[5] = slots.length[5] + 1
        slots.stop_SK[1, 0] = int(logits[0].argmax())
    slot_E = index(len(KINDS))
    ints_EI = ours.ints_SI[slot_E]
    got = KernelSampler().sample_into_slots(logits, ours, slot_E, ints_EI, DRAWS)
    want = REFERENCE.sample_into_slots(logits, theirs, slot_E, ints_EI, DRAWS)
    assert torch.equal(got.done_E, want.done_E) and torch.equal(got.count_E, want.count_E), SEED
    assert torch.equal(got.tokens_EQ, want.tokens_EQ), SEED
    assert torch.equal(ours.tokens_SL, theirs.tokens_SL) and torch.equal(ours.ints_SI, theirs.ints_SI)


@pytest.mark.parametrize("vocab", [64, 3000])
@pytest.mark.parametrize(
    "kind", [{"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.02}, {"top_k": 30, "top_p": 0.8, "min_p": 0.05}, {"top_k": 2900}]
)
def test_draws_follow_the_distribution(kind: dict[str, Any], vocab: int) -> None:
    """Total variation of 2e5 draws, one a position, under three times multinomial noise. Rows that list few ids, and
    rows of many.
    """
    rows, rounds = 2000, 100
    generator = torch.Generator("cuda").manual_seed(SEED)
    logits_V = torch.randn(vocab, generator=generator, device="cuda") * 1.5
    slots = bound([{"temperature": 0.8, **kind}], [7], context=16)
    many = Slots(rows, 16, torch.device("cuda"))
    for name in ("ints_SI", "floats_SF", "stop_SK"):
        getattr(many, name).copy_(getattr(slots, name)[1].expand_as(getattr(many, name)))
    slot_E = torch.arange(rows, device="cuda")
    counts = torch.zeros(vocab, dtype=torch.float64, device="cuda")
    for start in range(rounds):
        ints_EI = many.ints_SI.clone()
        ints_EI[:, 0] = (
            slot_E + start * rows + 1
        )  # the position of each draw; what is appended goes to the column of ended slots
        ints_EI[:, 2] = 0
        got = KernelSampler().sample_into_slots(logits_V.expand(rows, -1).contiguous(), many, slot_E, ints_EI, DRAWS)
        counts += torch.bincount(got.tokens_EQ[:, 0], minlength=vocab)
    value, order = torch.sort(logits_V.double() / 0.8, descending=True)
    mass = (value - value[0]).exp() * (torch.arange(vocab, device="cuda") < kind.get("top_k", vocab))
    mass = mass / mass.sum()
    kept = (mass.cumsum(0) - mass < kind.get("top_p", 2.0)) & (mass >= kind.get("min_p", 0.0) * mass[0])
    want = torch.zeros_like(mass).scatter_(0, order, mass * kept / (mass * kept).sum())
    draws = rows * rounds
    noise = 0.5 * (2 * want * (1 - want) / (torch.pi * draws)).sqrt().sum()
    distance = 0.5 * (counts / draws - want).abs().sum()
    assert distance <= 3 * noise, (SEED, float(distance), float(noise))


def test_a_rows_token_does_not_depend_on_the_others() -> None:
    generator = torch.Generator("cuda").manual_seed(SEED)
    rows = 3 * len(KINDS)
    logits = some_logits("flat", rows, VOCAB, generator)
    logits[::3] *= 4
    kinds, seeds = [KINDS[row % len(KINDS)] for row in range(rows)], list(range(rows))
    together = drawn(logits, bound(kinds, seeds), index(rows))
    for row in range(rows):
        alone = drawn(logits[row : row + 1].clone(), bound(kinds, seeds), index(rows)[row : row + 1])
        assert alone == together[row], (SEED, kinds[row])
    order = torch.randperm(rows, generator=generator, device="cuda")
    assert torch.equal(drawn(logits[order], bound(kinds, seeds), index(rows)[order]), together[order]), SEED


def test_recorded_draws_are_the_eager_ones() -> None:
    generator = torch.Generator("cuda").manual_seed(SEED)
    rows = len(KINDS)
    logits, slot_E = torch.zeros(rows, VOCAB, device="cuda"), index(rows)
    out = (torch.zeros(rows, dtype=torch.int64).cuda(), *torch.zeros(2, rows, dtype=torch.bool).cuda())
    for needs in (SamplingNeeds(), SamplingNeeds(random=True), DRAWS):
        kinds = [kind if needs.truncated else {"temperature": float(needs.random)} for kind in KINDS]
        seeds = list(range(rows))
        slots = bound(kinds, seeds)
        ints_EI = slots.ints_SI[slot_E]
        sample_into(out, logits, slots, slot_E, ints_EI, needs, slots.ints_SI)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sample_into(out, logits, slots, slot_E, ints_EI, needs, slots.ints_SI)
        for shape in ("flat", "peaked"):
            logits.copy_(some_logits(shape, rows, VOCAB, generator))
            fresh = bound(kinds, seeds)
            want = drawn(logits, fresh, slot_E, needs)
            slots.ints_SI.copy_(bound(kinds, seeds).ints_SI)
            out[0].fill_(-1)
            graph.replay()
            assert torch.equal(out[0], want), (SEED, needs, shape)
            assert torch.equal(slots.ints_SI, fresh.ints_SI)


@pytest.mark.parametrize("vocab", [VOCAB, 300])
def test_a_row_with_a_nan_has_no_token(vocab: int) -> None:
    """Whatever it asks for, and whatever else is in the row; others draw as if it were not there."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    for needs in (SamplingNeeds(), SamplingNeeds(random=True), DRAWS):
        kinds = [kind if needs.truncated else {"temperature": float(needs.random)} for kind in KINDS for _ in range(2)]
        rows = len(kinds)
        logits, slot_E, seeds = some_logits("peaked", rows, vocab, generator), index(rows), list(range(rows))
        sane_E = drawn(logits, bound(kinds, seeds), slot_E, needs)
        nan_E = torch.arange(rows, device="cuda") % 2 == 0
        places_E = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
        logits[nan_E, places_E[nan_E]] = torch.nan
        logits[0] = torch.nan
        slots = bound(kinds, seeds)
        known_E = slots.ints_SI[slot_E, 0]
        made = KernelSampler().sample_into_slots(logits, slots, slot_E, slots.ints_SI[slot_E], needs)
        assert torch.equal(made.tokens_EQ[:, 0], sane_E.masked_fill(nan_E, -1)), (SEED, needs)
        assert made.done_E[nan_E].all() and not slots.tokens_SL[slot_E[nan_E], known_E[nan_E]].any()
        scores = KernelSampler.distribution.apply_temperature(
            logits, slots, slot_E, slots.ints_SI[slot_E], needs.truncated
        )
        assert torch.equal(scores.softmax(-1).isnan().all(-1), nan_E), (SEED, needs)


@pytest.mark.parametrize("shape", ["flat", "peaked", "equal", "rounded", "masked"])
@pytest.mark.parametrize("vocab", [VOCAB, 300])
def test_what_is_drawn_from_is_the_references(shape: str, vocab: int) -> None:
    """But for ids at a border, where a sum may round to either side of it; and its race is the one that draws
    tokens.
    """
    generator = torch.Generator("cuda").manual_seed(SEED)
    kinds = KINDS[1:]
    logits, slots, slot_E = (
        some_logits(shape, len(kinds), vocab, generator),
        bound(kinds, list(range(len(kinds)))),
        index(len(kinds)),
    )
    ints_EI = slots.ints_SI[slot_E]
    got, want = (
        one.distribution.apply_temperature(logits, slots, slot_E, ints_EI, True) for one in (KernelSampler, REFERENCE)
    )
    kept, wanted = got > -torch.inf, want > -torch.inf
    other, part = kept != wanted, got.softmax(-1)
    assert bool((((part * other).sum(-1) < 1e-4) | (other.sum(-1) <= 1)).all()), SEED
    torch.testing.assert_close(got[kept & wanted], want[kept & wanted], rtol=1e-6, atol=0)
    add_gumbel_noise = KernelSampler.distribution.add_gumbel_noise(got, ints_EI[:, 3], ints_EI[:, 0])
    drawn_E = KernelSampler().sample_tokens(logits, slots, slot_E, ints_EI, DRAWS)
    assert (add_gumbel_noise.argmax(-1) != drawn_E).sum() <= 1, SEED
    twice = KernelSampler.distribution.add_gumbel_noise(got.repeat_interleave(2, 0), ints_EI[:, 3], ints_EI[:, 0])
    assert torch.equal(twice[1::2], add_gumbel_noise) and torch.equal(twice[::2], add_gumbel_noise)


EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 0.8, "presence_penalty": -0.7, "frequency_penalty": 0.1},
    {"logit_bias": ((3, 5.0), (9, -7.0), (3, 1.5))},
    {"min_tokens": 5},
    {"min_tokens": 290, "repetition_penalty": 1.1, "logit_bias": ((7, 50.0),)},
]


@pytest.mark.parametrize("vocab", [40, 5000])
def test_edits_are_the_references(vocab: int) -> None:
    """Few ids, so that most are repeated, and some that are both prompt and output."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    rows, context = len(EDITS), 5000
    slots = Slots(rows + 1, context, torch.device("cuda"))
    lengths = torch.randint(9, context - 9, (rows,), generator=generator, device="cuda").tolist()
    lengths[5] = 6  # before its minimum
    for row, (length, edit_logits) in enumerate(zip(lengths, EDITS, strict=True)):
        known = torch.randint(0, vocab, (length,), generator=generator, device="cuda").tolist()
        slots.bind(
            [Bind(row + 1, tuple(known), min(4, length), 0, context - 1, row, (7, 3), SamplingParams(**edit_logits))]
        )
    logits = torch.randn(rows, vocab, generator=generator, device="cuda") * 3
    words = torch.randint(-(2**31), 2**31 - 1, (2, -(-vocab // 32)), generator=generator, device="cuda")
    masks = GrammarMasks((1, 4), words.to(torch.int32).cpu().numpy())
    slot_E = index(rows)
    for needs, mask in (
        (SamplingNeeds(penalised=True), None),
        (SamplingNeeds(biased=True), masks),
        (SamplingNeeds(penalised=True, biased=True), masks),
    ):
        got, want = logits.clone(), logits.clone()
        args = slots, slot_E, slots.ints_SI[slot_E], needs, context, mask
        KernelSampler().edit_logits(got, *args)
        REFERENCE.edit_logits(want, *args)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert not torch.equal(got, logits)
        again = logits.clone()
        KernelSampler().edit_logits(again, *args)
        assert torch.equal(got, again), "the order of the additions shows"


@pytest.mark.parametrize("vocab", [40, 5000])
def test_edits_of_nodes_are_the_references(vocab: int) -> None:
    generator = torch.Generator("cuda").manual_seed(SEED)
    rows, context, query, drafts = len(EDITS), 5000, 16, 4
    slots = Slots(rows + 1, context, torch.device("cuda"))
    for row, edit_logits in enumerate(EDITS):
        known = torch.randint(0, vocab, (7 + 700 * row,), generator=generator, device="cuda").tolist()
        slots.bind([Bind(row + 1, tuple(known), 5, 0, context - 1, row, (7, 3), SamplingParams(**edit_logits))])
    behind = torch.randint(-1, vocab, (rows, query, drafts), generator=generator, device="cuda")
    logits = torch.randn(rows * query, vocab, generator=generator, device="cuda") * 3
    slot_N = index(rows).repeat_interleave(query)
    got, want = logits.clone(), logits.clone()
    args = slots, slot_N, slots.ints_SI[slot_N], SamplingNeeds(penalised=True, biased=True), context, None, behind
    KernelSampler().edit_logits(got, *args)
    REFERENCE.edit_logits(want, *args)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert not torch.equal(got, logits)


@pytest.mark.parametrize("shape", ["flat", "peaked", "rounded", "equal", "masked"])
@pytest.mark.parametrize("vocab", [VOCAB, 300])
def test_logprobs_are_log_softmax(shape: str, vocab: int) -> None:
    generator = torch.Generator("cuda").manual_seed(SEED)
    logits = some_logits(shape, 9, vocab, generator)
    tokens = logits.argmax(-1)
    want = logits.double().log_softmax(-1)
    value, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    for top in (0, 1, 5, 20, 64):
        own, ids, values = KernelSampler().logprobs(logits, tokens, top)
        assert own is not None and ids is not None and values is not None
        torch.testing.assert_close(own.double(), want.gather(1, tokens[:, None])[:, 0], rtol=1e-6, atol=3e-6)
        shown = value[:, :top] > -torch.inf
        assert torch.equal(ids[shown], order[:, :top][shown]), (SEED, top)
        torch.testing.assert_close(values.double()[shown], want.gather(1, ids)[shown], rtol=1e-6, atol=3e-6)


def test_logprobs_are_the_models_own_whatever_is_edited() -> None:
    slots = bound([{"temperature": 0.0, "logit_bias": ((11, 100.0),), "logprobs": 3}], [1])
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(SEED)).cuda()
    want = logits.log_softmax(-1)
    slot_E = index(1)
    got = accept(
        logits,
        slots,
        slot_E,
        slots.ints_SI[slot_E],
        SamplingNeeds(biased=True, logprobs=3),
        CONTEXT,
        None,
        KernelSampler(),
    )
    assert got.tokens_EQ == 11 and got.logprob_N is not None and got.top_ids_NK is not None
    torch.testing.assert_close(got.logprob_N, want[:, 11])
    assert torch.equal(got.top_ids_NK, want.topk(3).indices)
