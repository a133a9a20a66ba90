"""Acceptance rules: with any drafter and any lossless rule, sequences have the target's own distribution.

The target is a Markov chain. Results are compared with its distribution over the first two tokens. Every biased rule,
and every mistake planted in a right one, must fail the same comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.seed import SEED
from thalweg.batch.slots import Slots
from thalweg.core.plan import Bind, SamplingNeeds
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.kernels.temperature.ref import apply_temperature
from thalweg.sampling import drafts, rejection, sample
from thalweg.sampling.draft_sampling import COUPLED, PROBABILITIES, DraftSampling, IndependentDraftSampling
from thalweg.sampling.random import exponential, uniform
from thalweg.sampling.rejection import RejectionSampling
from thalweg.sampling.sample import REFERENCE, Sampler, accept

VOCAB, DRAWS, ROWS, FIRST, WIDEST = 8, 200_000, 4000, 3, 3
UNKNOWN = 5  # to the draft model, whose vocabulary is smaller
WHOLE = SamplingParams(temperature=0.6)
CUT = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02)
FEWER = 60_000  # draws that show a mistake
LIMIT = 3.0  # times the noise of so many draws


class World:
    """Logits of target and draft model behind each token, and what the requests ask of sampling."""

    def __init__(self, seed: int, params: SamplingParams) -> None:
        self.params, cut = params, params is CUT
        self.needs = SamplingNeeds(random=True, truncated=cut)
        generator = torch.Generator().manual_seed(seed)
        self.target_VV = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
        self.target_VV[:, UNKNOWN] += 1.0
        self.draft_VV = self.target_VV + torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
        self.draft_VV[:, UNKNOWN] = -torch.inf
        floats_VF, no_V = (
            torch.tensor([[params.temperature, params.top_p, params.min_p]]).expand(VOCAB, -1),
            torch.full((VOCAB,), 1 << 30),
        )
        self.p_VV, self.q_VV = (
            apply_temperature(x, floats_VF, no_V, cut).softmax(-1) for x in (self.target_VV, self.draft_VV)
        )
        self.joint_VV = self.p_VV[FIRST][:, None] * self.p_VV
        self.slots = self.bound(CHAIN)
        self.bound_SI = self.slots.ints_SI.clone()
        self.decoded: dict[tuple[str, int], Found] = {}

    def bound(self, tree: TreeShape) -> Slots:
        slots = Slots(ROWS, 16, torch.device("cpu"), IndependentDraftSampling(WIDEST, VOCAB).fields(), tree)
        slots.bind([Bind(row, (FIRST,), 1, 0, 16, row, (), self.params) for row in range(ROWS)])
        slots.seed += SEED << 32
        return slots

    def far(self, first_N: Tensor, second_N: Tensor) -> float:
        """How many times the sampling noise these pairs lie from the target's distribution, in total variation."""
        got = torch.bincount(first_N * VOCAB + second_N, minlength=VOCAB * VOCAB) / len(first_N)
        want = self.joint_VV.flatten()
        noise = (2 * want * (1 - want) / (math.pi * len(first_N))).sqrt().sum() / 2
        return float((got - want).abs().sum() / 2 / noise)

    @property
    def apart(self) -> float:
        """Total variation distance of target and draft model behind the first token."""
        return float((self.p_VV[FIRST] - self.q_VV[FIRST]).abs().sum() / 2)


@pytest.fixture(scope="module")
def world() -> World:
    print(f"TEST_SEED={SEED}")
    return World(SEED, WHOLE)


@pytest.fixture(scope="module")
def cut() -> World:
    """With top-p and min-p."""
    return World(SEED, CUT)


@pytest.fixture(scope="module")
def known() -> World:
    """One in which every mistake below shows."""
    return World(6, WHOLE)


class Found(NamedTuple):
    """The first two tokens of each sequence, how far they are from the target's, and the share of the first drafts that
    was accepted.
    """

    first_N: Tensor
    second_N: Tensor
    far: float
    share: float


def decode(world: World, draft_sampling: DraftSampling, sampling: Sampler, drafts: int, draws: int = DRAWS) -> Found:
    """So many sequences, two tokens of each, by accept itself: verified in chains of `drafts`."""
    slots, index = world.slots, torch.arange(ROWS)
    pairs: list[Tensor] = []
    accepted = 0
    for turn in range(draws // ROWS):
        slots.ints_SI.copy_(world.bound_SI)
        slots.seed += turn * ROWS
        for step in range(2):
            length_N = slots.length.clone()
            path = [slots.tokens_SL[index, length_N - 1].long()]
            for ahead in range(drafts):
                there_SI = slots.ints_SI.clone()
                there_SI[:, 0] += ahead
                path.append(
                    draft_sampling.sample_drafts(
                        world.draft_VV[path[-1]], slots, index, there_SI, ahead, world.needs.truncated
                    )
                )
                slots.tokens_SL[index, length_N + ahead] = path[-1].int()
            slots.num_drafts.fill_(drafts)
            logits_NV = world.target_VV[torch.stack(path, 1).flatten()]
            found = accept(logits_NV, slots, index, slots.ints_SI.clone(), world.needs, slots.context, sampler=sampling)
            accepted += int((found.count_E > 1).sum()) if step == 0 else 0
        pairs.append(slots.tokens_SL[:, 1:3].long().clone())
    first_N, second_N = torch.cat(pairs).unbind(1)
    return Found(first_N, second_N, world.far(first_N, second_N), accepted / draws)


class Best:
    """Drafts that are no sample."""

    distribution = REFERENCE.distribution

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def fields(self) -> tuple[()]:
        return ()

    def sample_drafts(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        return logits_EV.topk(self.rank, -1).indices[:, -1]


INDEPENDENT, STANDARD = IndependentDraftSampling(WIDEST, VOCAB), RejectionSampling(REFERENCE)
LOSSLESS: dict[str, tuple[DraftSampling, Sampler]] = {
    "race, sampled": (COUPLED, REFERENCE),
    "point mass, most likely": (Best(1), REFERENCE),
    "point mass, third": (Best(3), REFERENCE),
    "point mass, sampled": (INDEPENDENT, REFERENCE),
    "standard": (INDEPENDENT, STANDARD),
}


def judged(world: World, rule: str, drafts: int) -> Found:
    if (rule, drafts) not in world.decoded:
        world.decoded[rule, drafts] = decode(world, *LOSSLESS[rule], drafts)
    return world.decoded[rule, drafts]


@pytest.mark.parametrize(("rule", "drafts"), [*((rule, 1) for rule in LOSSLESS), ("race, sampled", 2), ("standard", 2)])
def test_the_tokens_are_the_targets(world: World, rule: str, drafts: int) -> None:
    assert judged(world, rule, drafts).far < LIMIT, f"TEST_SEED={SEED}"


def test_the_tokens_are_the_targets_where_both_are_truncated(cut: World) -> None:
    assert judged(cut, "standard", 1).far < LIMIT, f"TEST_SEED={SEED}"


def test_each_rule_accepts_as_often_as_it_should(world: World) -> None:
    noise, apart = 4 * (0.25 / DRAWS) ** 0.5, world.apart
    p_V, q_V = world.p_VV[FIRST], world.q_VV[FIRST]
    share = {rule: judged(world, rule, 1).share for rule in LOSSLESS}
    assert abs(share["standard"] - (1 - apart)) < noise, f"TEST_SEED={SEED}"
    assert (1 - apart) / (1 + apart) - noise < share["race, sampled"] < 1 - apart + noise, f"TEST_SEED={SEED}"
    assert abs(share["point mass, most likely"] - float(p_V[q_V.argmax()])) < noise, f"TEST_SEED={SEED}"
    assert abs(share["point mass, sampled"] - float(p_V @ q_V)) < noise, f"TEST_SEED={SEED}"


def test_coupled_sampling_gives_plain_decodings_sequences(world: World) -> None:
    plain = judged(world, "race, sampled", 0)
    for rule in LOSSLESS:
        found = judged(world, rule, 1)
        same = torch.equal(found.first_N, plain.first_N) and torch.equal(found.second_N, plain.second_N)
        assert same == (rule != "standard"), f"{rule}, TEST_SEED={SEED}"


# ---- mistakes that are planted in the rules


class Certain(IndependentDraftSampling):
    """Keeps a distribution, but drafts its most likely token."""

    def sample_drafts(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        super().sample_drafts(logits_EV, slots, slot_E, ints_EI, ahead, truncated)
        return logits_EV.argmax(-1)


class Warmer(IndependentDraftSampling):
    """Keeps the distribution before temperature and truncation."""

    def sample_drafts(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        drafts_E = super().sample_drafts(logits_EV, slots, slot_E, ints_EI, ahead, truncated)
        slots.extra[PROBABILITIES][:, ahead] = logits_EV.softmax(-1)
        return drafts_E


class Shifted(IndependentDraftSampling):
    """Keeps probabilities by ids of another vocabulary."""

    def sample_drafts(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        drafts_E = super().sample_drafts(logits_EV, slots, slot_E, ints_EI, ahead, truncated)
        slots.extra[PROBABILITIES][:, ahead] = slots.extra[PROBABILITIES][:, ahead].roll(1, -1)
        return drafts_E


class Coins(IndependentDraftSampling):
    """Drafts with the target's coins."""

    def sample_drafts(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        super().sample_drafts(logits_EV, slots, slot_E, ints_EI, ahead, truncated)
        return COUPLED.sample_drafts(logits_EV, slots, slot_E, ints_EI, ahead, truncated)


def test_noise_of_another_position_is_noticed(known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position of a path draws with the coins of the first."""

    def one_coin(slots: Slots, slot_E: Tensor, ints_EI: Tensor, query: int) -> drafts.SampledPositions:
        right = drafts.sampled_positions(slots, slot_E, ints_EI, query)
        right.ints_NI[:, 0] = ints_EI[:, 0].repeat_interleave(query)
        return right

    monkeypatch.setattr(sample, "sampled_positions", one_coin)
    assert decode(known, COUPLED, REFERENCE, 1).far > LIMIT, f"TEST_SEED={SEED}"


@pytest.mark.parametrize(("wrong", "draws"), [(Certain, FEWER), (Warmer, FEWER), (Shifted, FEWER), (Coins, DRAWS)])
def test_drafts_that_were_not_drawn_from_what_is_kept_are_noticed(
    known: World, wrong: type[IndependentDraftSampling], draws: int
) -> None:
    assert decode(known, wrong(WIDEST, VOCAB), STANDARD, 1, draws).far > LIMIT, f"TEST_SEED={SEED}"


def test_reusing_sampling_noise_for_acceptance_is_noticed(known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    likely, coins = int(known.p_VV[FIRST].argmax()), exponential
    monkeypatch.setattr(rejection, "seed_for", lambda seed_N, purpose: seed_N)
    monkeypatch.setattr(rejection, "uniform", lambda seed, position: (-coins(seed, position, VOCAB)[:, likely]).exp())
    assert decode(known, INDEPENDENT, STANDARD, 1, FEWER).far > LIMIT, f"TEST_SEED={SEED}"


def test_acceptance_without_noise_is_noticed(known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "uniform", lambda seed_N, position_N: torch.full(seed_N.shape, 0.5))
    assert decode(known, INDEPENDENT, STANDARD, 1, FEWER).far > LIMIT, f"TEST_SEED={SEED}"


def test_a_looser_acceptance_is_noticed(known: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "uniform", lambda seed_N, position_N: 0.7 * uniform(seed_N, position_N))
    assert decode(known, INDEPENDENT, STANDARD, 1, FEWER).far > LIMIT, f"TEST_SEED={SEED}"


# ---- lists: several drafts of one position


def lists(world: World, count: int, add_gumbel_noise: bool) -> Found:
    """DRAWS sequences, two tokens of each, by accept itself: of the first one `count` drafts, the best of the race that
    the drafter's distribution runs with the target's coins, or its most likely ones.
    """
    slots, index = world.bound(TreeShape(branching=count, max_depth=1, num_drafts=count)), torch.arange(ROWS)
    pairs: list[Tensor] = []
    accepted = 0
    for turn in range(DRAWS // ROWS):
        slots.ints_SI.copy_(world.bound_SI)
        slots.seed += turn * ROWS
        scaled_NV = apply_temperature(world.draft_VV[FIRST].expand(ROWS, -1), slots.floats_SF, slots.top_k, False)
        coins_NV = exponential(slots.seed, slots.length, VOCAB).log() * add_gumbel_noise
        drafts_NC = (scaled_NV - coins_NV).topk(count, -1).indices
        slots.tokens_SL[:, 1 : 1 + count] = drafts_NC.int()
        slots.num_drafts.fill_(count)
        path_NQ = torch.cat((torch.full((ROWS, 1), FIRST), drafts_NC), 1)
        ints_SI = slots.ints_SI.clone()
        found = accept(world.target_VV[path_NQ.flatten()], slots, index, ints_SI, world.needs, slots.context)
        accepted += int((found.count_E > 1).sum())
        last_N = slots.tokens_SL[index, slots.length - 1].long()
        accept(world.target_VV[last_N], slots, index, slots.ints_SI.clone(), world.needs, slots.context)
        pairs.append(slots.tokens_SL[:, 1:3].long().clone())
    first_N, second_N = torch.cat(pairs).unbind(1)
    return Found(first_N, second_N, world.far(first_N, second_N), accepted / DRAWS)


def test_coupled_sampling_extends_to_several_drafts(world: World) -> None:
    plain, before = judged(world, "race, sampled", 0), judged(world, "race, sampled", 1).share
    for count in (2, 4):
        found = lists(world, count, add_gumbel_noise=True)
        assert torch.equal(found.first_N, plain.first_N) and torch.equal(found.second_N, plain.second_N)
        assert found.far < LIMIT and found.share > before, f"TEST_SEED={SEED}"
        before = found.share


def test_lists_of_the_most_likely_tokens_are_accepted_by_all_their_probability(world: World) -> None:
    found, p_V = lists(world, 2, add_gumbel_noise=False), world.p_VV[FIRST]
    assert found.far < LIMIT, f"TEST_SEED={SEED}"
    assert abs(found.share - float(p_V[world.q_VV[FIRST].topk(2).indices].sum())) < 4 * (0.25 / DRAWS) ** 0.5


# ---- the rules of other engines, right and wrong, by the same measure: DRAWS tokens, two drafts of each at most


def pick(weight_NV: Tensor) -> Tensor:
    return (weight_NV / torch.empty_like(weight_NV).exponential_()).argmax(-1)


def at(x_NV: Tensor, token_N: Tensor) -> Tensor:
    return x_NV.gather(1, token_N[:, None])[:, 0]


def without(p_NV: Tensor, token_N: Tensor) -> Tensor:
    left_NV = p_NV.scatter(1, token_N[:, None], 0.0)
    return left_NV / left_NV.sum(1, keepdim=True)


def residual(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    left_NV = (p_NV - q_NV).clamp(min=0)
    return left_NV / left_NV.sum(1, keepdim=True).clamp(min=1e-30)


def several(p_NV: Tensor, q_NV: Tensor, *, replaced: bool) -> Tensor:
    """SpecInfer's multi-draft rule (Miao et al. 2024): each draft in turn by the standard rule, from what those before
    it left of p.
    """
    token_N, open_N = torch.full((len(p_NV),), -1), torch.ones(len(p_NV), dtype=torch.bool)
    for _ in range(2):
        draft_N = pick(q_NV)
        right_N = open_N & (torch.rand(len(p_NV)) * at(q_NV, draft_N) < at(p_NV, draft_N))
        token_N, open_N = torch.where(right_N, draft_N, token_N), open_N & ~right_N
        p_NV, q_NV = residual(p_NV, q_NV), q_NV if replaced else without(q_NV, draft_N)
    return torch.where(open_N, pick(p_NV), token_N)


def masses(p_NV: Tensor, q_NV: Tensor, *, threshold: float = 1.0, fresh: bool = True) -> Tensor:
    """One coin for the most likely two drafts together, as SGLang's kernel has it; what remains is drawn with a fresh
    one, or with the same.
    """
    drafts_NC, coin_N = q_NV.topk(2, -1).indices, torch.rand(len(p_NV))
    sums_NC = p_NV.gather(1, drafts_NC).cumsum(1) / threshold
    left_NV = p_NV.scatter(1, drafts_NC, 0.0)
    sorted_NV = (left_NV / left_NV.sum(1, keepdim=True)).cumsum(1)
    other_N = pick(left_NV) if fresh else torch.searchsorted(sorted_NV, coin_N[:, None])[:, 0].clamp(max=VOCAB - 1)
    return torch.where(
        coin_N < sums_NC[:, 0], drafts_NC[:, 0], torch.where(coin_N < sums_NC[:, 1], drafts_NC[:, 1], other_N)
    )


def ratio(p_NV: Tensor, q_NV: Tensor, *, sampled: bool = True, left: bool = True) -> Tensor:
    """The standard rule: of a sampled draft, or wrongly of the most likely token; what remains is drawn from the
    residual, or wrongly from p.
    """
    draft_N = pick(q_NV) if sampled else q_NV.argmax(-1)
    right_N = torch.rand(len(p_NV)) * at(q_NV, draft_N) < at(p_NV, draft_N)
    return torch.where(right_N, draft_N, pick(residual(p_NV, q_NV) if left else p_NV))


def likely(p_NV: Tensor, q_NV: Tensor, *, threshold_V: Tensor) -> Tensor:
    """Whatever is likely enough is accepted, as by SGLang's threshold for single tokens and Medusa's typical
    acceptance.
    """
    draft_N = pick(q_NV)
    return torch.where(at(p_NV, draft_N) > threshold_V, draft_N, pick(p_NV))


RIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "standard": ratio,
    "several, replaced": partial(several, replaced=True),
    "several, not replaced": partial(several, replaced=False),
    "one coin": masses,
}
WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one coin, threshold 0.7": partial(masses, threshold=0.7),
    "one coin, again for what remains": partial(masses, fresh=False),
    "p / q of what is no sample": partial(ratio, sampled=False),
    "no residual": partial(ratio, left=False),
    "threshold of a single token": lambda p, q: likely(p, q, threshold_V=torch.tensor(0.1)),
    "typical acceptance": lambda p, q: likely(p, q, threshold_V=(0.3 * (p * p.log()).sum(1).exp()).clamp(max=0.09)),
}


@pytest.mark.parametrize("name", [*RIGHT, *WRONG])
def test_rules_of_other_engines(known: World, name: str) -> None:
    torch.manual_seed(SEED)
    p_NV, q_NV = (x_VV[FIRST].expand(DRAWS, -1) for x_VV in (known.p_VV, known.q_VV))
    tokens_N = (RIGHT | WRONG)[name](p_NV, q_NV)
    far = known.far(tokens_N, pick(known.p_VV[tokens_N]))
    assert (far < LIMIT) == (name in RIGHT), f"{far} times the noise, TEST_SEED={SEED}"
