"""Draft trees on kernels: masked decode against a softmax over visible tokens, and models against the reference."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu import growing
from tests.gpu.shapes import SHAPES, Part, batches, branched, pair, planes
from tests.gpu.test_draft_graphs import answers, engine
from tests.gpu.test_engine import agreement
from tests.gpu.test_mla_backends import Routes, choice
from thalweg.batch.inputs import build_inputs
from thalweg.batch.slots import Slots
from thalweg.core.plan import Bind, PageAppend, Row, SamplingNeeds, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import TreeShape
from thalweg.kernels.attend.args import DecodeRows, KvPlanes, LatentPlane
from thalweg.kernels.attend.case import PAGE, quantized
from thalweg.kernels.attend.triton import merge
from thalweg.kernels.build_tree import triton as grow
from thalweg.kernels.case import KernelCase
from thalweg.kernels.compact_kv import ref
from thalweg.kernels.compact_kv import triton as moving
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.mla import flashmla
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.verify import case as verify
from thalweg.runner.accepted_path import compact_accepted_path
from thalweg.runner.graph_pool import NEEDS, GraphPool
from thalweg.runner.graphs import Capture
from thalweg.runner.runner import Runner
from thalweg.sampling.catalog import sampler_on
from thalweg.sampling.sample import accept
from thalweg.sampling.simulated_acceptance import SimulatedAcceptance
from thalweg.spec.autoregressive import HIDDEN
from thalweg.spec.drafter import DraftExtendInput
from thalweg.spec.tree import tree_masks_of

# rows of a step, of which the first so many are trees; pages hold the prompts below
TREES: dict[str, tuple[list[Part], int]] = {
    "one tree": ([(1, 100, 16)], 1),
    "alike": ([(1, 100, 6), (4, 130, 6), (8, 7, 6)], 3),
    "of all sizes, beside prompts": ([(4, 130, 4), (1, 100, 64), (8, 7, 1), (10, 64, 70)], 3),
}
PROMPTS: list[Part] = [(1, 0, 100), (4, 0, 130), (8, 0, 7), (10, 0, 64)]
STEPS = pytest.mark.parametrize("name", TREES)
FLASH, FP8 = "v3 with triton+flashmla", {"v3", "v3 with triton+flashmla"}
ON_MODELS = pytest.mark.parametrize("shape", [*SHAPES, FLASH])


def twins(shape: str, device: torch.device) -> tuple[Any, Any]:
    """As `pair`, with the backend of the shape's name."""
    return pair("v3", device, choice("triton+flashmla")) if shape == FLASH else pair(shape, device)


def scene(name: str, device: torch.device, generator: torch.Generator) -> tuple[Any, list[list[int]], dict[str, Any]]:
    """The trees of a step, what their tokens see, and how a kernel is told of their rows."""
    rows, trees = TREES[name]
    rows = rows[:trees]
    batch, seen = branched(batches(rows, device, generator, 1024)[1], rows, trees)
    assert batch.tree is not None
    told: dict[str, Any] = {"tree_mask_T": batch.tree.tree_mask_T, "query": rows[0][2]}
    if len(batch.groups) > 1:
        of = [row for row, (_, _, n) in enumerate(rows) for _ in range(n)]
        told |= {"query": 1, "rows_T": torch.tensor(of, dtype=torch.int32, device=device)}
    return batch, seen, told


def far(got_THd: Tensor, want_THd: Tensor) -> float:
    return float((got_THd.double() - want_THd).norm() / want_THd.norm())


def row_of(batch: Any, token: int) -> Tensor:
    """Pages of a token's row."""
    for group in batch.groups:
        if token < group.token_slice.stop:
            return batch.table_RP[group.row_start + (token - group.token_start) // group.query].long()
    raise AssertionError(token)


@STEPS
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("heads", "kv_heads", "splits"), [(28, 4, 1), (16, 8, 3)])
def test_grouped_queries(name: str, fp8: bool, heads: int, kv_heads: int, splits: int, cuda: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    batch, seen, told = scene(name, cuda, generator)
    dim, tokens = 128, len(seen)
    query = torch.randn(tokens, heads, dim, generator=generator).to(cuda, torch.bfloat16)
    kept = [torch.randn(32, PAGE, kv_heads, dim, generator=generator).bfloat16() for _ in range(2)]
    if fp8:
        (key, key_scale), (value, value_scale) = ([x.to(cuda) for x in quantized(x.float())] for x in kept)
        kv, exact = (
            KvPlanes(key, value, key_scale, value_scale),
            [key.double() * key_scale, value.double() * value_scale],
        )
    else:
        kv = KvPlanes(*(x.to(cuda) for x in kept))
        exact = [x.double() for x in kv[:2]]
    rows = DecodeRows(batch.table_RP, batch.columns_T, **told)
    got = merge(*gqa.decode(query, kv, rows, scale=dim**-0.5, splits=splits), query.dtype)
    want = torch.empty(tokens, heads, dim, dtype=torch.float64, device=cuda)
    for token, own in enumerate(seen):
        k, v = (x[row_of(batch, token)].flatten(0, 1)[own].repeat_interleave(heads // kv_heads, 1) for x in exact)
        weights = (torch.einsum("hd,shd->hs", query[token].double(), k) * dim**-0.5).softmax(-1)
        want[token] = torch.einsum("hs,shd->hd", weights, v)
    assert far(got, want) < 8e-3


@STEPS
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])
@pytest.mark.parametrize(("heads", "splits"), [(16, 1), (128, 3)])
def test_latents(name: str, fp8: bool, heads: int, splits: int, cuda: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    batch, seen, told = scene(name, cuda, generator)
    query = torch.randn(len(seen), heads, 576, generator=generator).to(cuda, torch.bfloat16)
    latent_plane = LatentPlane(torch.randn(32, PAGE, 576, generator=generator).bfloat16().to(cuda))
    exact = latent_plane.paged_PSD.double()
    if fp8:
        latent_plane = LatentPlane(*(x.to(cuda) for x in quantized(latent_plane.paged_PSD.float().cpu())))
        exact = latent_plane.paged_PSD.double() * latent_plane.scale
    rows = DecodeRows(batch.table_RP, batch.columns_T, **told)
    got = merge(*mla.decode(query, latent_plane, rows, scale=0.05, rank=512, splits=splits), query.dtype)
    want = torch.empty(len(seen), heads, 512, dtype=torch.float64, device=cuda)
    for token, own in enumerate(seen):
        latents = exact[row_of(batch, token)].flatten(0, 1)[own]
        want[token] = (query[token].double() @ latents.T * 0.05).softmax(-1) @ latents[:, :512]
    assert far(got, want) < 8e-3


@STEPS
@ON_MODELS
def test_logits_are_the_references(shape: str, name: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens that go to the same experts: test_mla_backends.py says why, and where the bounds come from."""
    routes = Routes(monkeypatch)
    reference, kernels = twins(shape, cuda)
    there, here = planes(reference, cuda), planes(kernels, cuda)
    generator, bound = torch.Generator().manual_seed(1), 0.1 if shape in FP8 else 0.02
    rows, trees = TREES[name]
    plain, paged = batches(PROMPTS, cuda, generator, 1024)
    with torch.inference_mode():
        reference.forward(plain, there)
        kernels.forward(paged, here)
        routes.alike(0)
        plain, paged = (branched(batch, rows, trees)[0] for batch in batches(rows, cuda, generator, 1024))
        exact = reference.logits(reference.forward(plain, there)).double()
        got = kernels.logits(kernels.forward(paged, here)).double()
    alike = routes.alike(len(got)).to(cuda)
    error = far(got[alike], exact[alike])
    assert error < bound and alike.sum() > 0.5 * len(alike), f"{error:.4f}"


@ON_MODELS
def test_a_recorded_step_is_the_eager_one(shape: str, cuda: torch.device) -> None:
    """Two rows in a recording of four; it splits contexts as those of the longest, so bits of A may differ. Of the same
    logits accept makes the same, in the slots, in the pages, and for a drafter.
    """
    _, kernels = twins(shape, cuda)
    here, tree = planes(kernels, cuda), TreeShape(3, 5, 15)
    for name, layer in here.bytes:
        paged = here.paged(name, layer)
        paged.copy_(torch.randn(paged.shape, device=cuda, generator=torch.Generator(cuda).manual_seed(layer)))
    slots = Slots(5, 512, cuda, tree=tree)
    known = (100, 200)
    binds = [Bind(i, tuple(range(1, 2 + n)), 2, n, 500, 0, (), SamplingParams()) for i, n in enumerate(known)]
    rng = random.Random(2)
    with torch.inference_mode():
        slots.bind(binds)
        slots.append([PageAppend(0, 0, (3, 9, 5)), PageAppend(1, 0, (2, 7, 4, 11))])
        for i, n in enumerate(known):
            parents = [rng.randrange(max(node - 4, 0), node) for node in range(1, 16)]
            depths = [0]
            for parent in parents:
                depths.append(depths[parent] + 1)
            form = torch.tensor([parents]), torch.tensor([depths[1:]])
            slots.nodes_SN3[i, 1:] = torch.stack((*(x[0] for x in form), tree_masks_of(*form, 15)[0, 1:]), 1).to(cuda)
            slots.tokens_SL[i, n + 1 : n + 16] = torch.randint(1, 1000, (15,)).to(cuda, torch.int32)
            slots.num_drafts[i] = 15 - i
        plan = StepPlan(0, 0, tuple(Row(i, i, n, 16, 15, True) for i, n in enumerate(known)), max_kv_len=217)
        eager = kernels.forward(build_inputs(plan, slots).batch, here)
        runner = Runner(kernels, kernels, here, slots)
        runner.sampler, move = SimulatedAcceptance(sampler_on(cuda), 3.0), runner.compact_kv
        capture = Capture(runner, 512, 4, GraphPool(), True)
        capture.trees(4, 16)
        (grove,) = capture.steps
        torch.cuda.synchronize()
        logits, slot_E, ints_EI, seen = grove.forward(plan)
        given = logits, slot_E, ints_EI
        assert all(same_accept(grove, needs, given, seen, (slots, here, runner.sampler, move)) for needs in NEEDS)
    assert slot_E.tolist() == [0, 1] and len(logits) == 32
    real = seen.batch.real_T[:32]
    assert real.tolist() == [True] * 31 + [False]
    got, exact = seen.hidden_TH[:32][real].double(), eager[real].double()
    apart = (got - exact).norm(dim=1) / exact.norm(dim=1)
    assert apart.median() < 0.1 if shape in FP8 else far(got, exact) < 0.03  # rounding may choose another expert


def same_accept(
    grove: Any, needs: SamplingNeeds, given: tuple[Tensor, Tensor, Tensor], seen: DraftExtendInput, of: tuple[Any, ...]
) -> bool:
    """Whether the recording leaves what accepting eagerly does: of the rows that are real, and of all pages but the
    null page.
    """
    slots, planes, sampling, move = of
    rows, held = len(given[1]), [slots.ints_SI, slots.tokens_SL, *planes.bytes.values()]
    found = [one.clone() for one in held]
    made = grove.sample(rows, needs, sampling)
    got = [one.clone() for one in held]
    for one, before in zip(held, found, strict=True):
        one.copy_(before)
    wanted = accept(given[0].clone(), slots, *given[1:], needs, 217, sampler=sampling)
    assert made is not None and made.nodes_EQ is not None and wanted.nodes_EQ is not None
    exact = compact_accepted_path(seen, *given[1:], wanted.nodes_EQ, wanted.count_E, slots, move)
    compacted = seen.compacted
    assert made.kv_is_compacted and compacted is not None and max(made.count_E.tolist()) > 1
    pairs = [(made.count_E, wanted.count_E), (made.done_E, wanted.done_E), (got[0], held[0])]
    for e, (slot, count) in enumerate(zip(given[1].tolist(), wanted.count_E.tolist(), strict=True)):
        known = int(slots.length[slot])
        pairs += [
            (got[1][slot, :known], held[1][slot, :known]),
            (made.tokens_EQ[e, :count], wanted.tokens_EQ[e, :count]),
        ]
        pairs.append((made.nodes_EQ[e, :count], wanted.nodes_EQ[e, :count]))
    pairs += [(x[1:], y[1:]) for x, y in zip(got[2:], held[2:], strict=True)]
    pairs += [
        (getattr(compacted.batch, x), getattr(exact.batch, x)) for x in ("ids_T", "positions_T", "write_T", "real_T")
    ]
    pairs.append((compacted.hidden_TH, exact.hidden_TH))
    same = all(torch.equal(x[: len(y)], y) for x, y in pairs)
    for one, before in zip(held, found, strict=True):
        one.copy_(before)
    return same


@pytest.mark.parametrize("shape", ["v3-dense", "v32"])
def test_what_is_learned_of_recorded_paths_is_the_drafters_own(shape: str, tmp_path: Path, cuda: torch.device) -> None:
    """The same entries and states; and answers as without graphs."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 4},
        {"temperature": 0.0, "logprobs": 1},
    ]
    fields: dict[str, Any] = {"tree": TreeShape(3, 3, 9), "num_drafts": 9}
    plain = answers(engine("NEXTN", tmp_path / "none", (), shape, cuda_graph_bs=(), **fields), kinds)
    made = engine("NEXTN", tmp_path / "whole", (), shape, speculative_simulate_accept_length=2.5, **fields)
    runner, learned, real = made.runner, list[bool](), made.runner.graphs.drafts.extend
    drafter: Any = runner.drafting.drafter
    rng = random.Random(7)
    policy: Any = made.loop.scheduler.draft_length
    policy.choose = lambda sampling, most: rng.choice((3, 7, 9, 9))

    def extend(seen: DraftExtendInput) -> bool:
        before = runner.slots.extra[HIDDEN].clone()
        if not real(seen):
            return False
        rows, places = [row.slot for row in seen.plan.rows], seen.batch.write_T[seen.batch.real_T]
        found = []
        for again in (False, True):
            if again:
                runner.slots.extra[HIDDEN].copy_(before)
                drafter.extend(seen, runner.slots, runner.planes)
            entries = [runner.planes.tokens(spec.name, spec.layer)[places] for spec in drafter.head.planes()]
            found.append([runner.slots.extra[HIDDEN][rows], *entries])
        learned.append(all(torch.equal(x, y) for x, y in zip(*found, strict=True)))
        return True

    runner.graphs.drafts.extend = extend  # type: ignore[method-assign]
    answers(made, kinds)
    assert len(learned) > 20 and all(learned) and made.loop.stats().accepted_tokens > 40
    made = engine("NEXTN", tmp_path / "again", (), shape, **fields)
    assert agreement(plain, answers(made, kinds), 10) >= 0.7 and not made.loop.stats().drafter_failures


@pytest.mark.parametrize("shape", ["v3-dense", "v32"])
def test_drafts_of_any_number_are_recorded(shape: str, tmp_path: Path, cuda: torch.device) -> None:
    """Of one, which is a chain, of some, and of all that there may be: nothing is proposed by the drafter itself, and
    little learned.
    """
    fields: dict[str, Any] = {"tree": TreeShape(3, 3, 9), "num_drafts": 9, "speculative_simulate_accept_length": 2.5}
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9, "seed": 4}]
    found, called = list[list[list[int]]](), list[dict[str, int]]()
    for graphs in ((), (1, 2, 4, 8)):
        made = engine("NEXTN", tmp_path / str(len(graphs)), (), shape, cuda_graph_bs=graphs, **fields)
        rng = random.Random(11)
        called.append(_calls(made.runner.drafting.drafter))

        def drawn(sampling: Any, most: int, rng: random.Random = rng) -> int:
            return rng.choice([width for width in (1, 3, 7, 9) if width <= most] or [0])

        made.loop.scheduler.draft_length.choose = drawn  # type: ignore[method-assign]
        found.append(answers(made, kinds))
        stats = made.loop.stats()
        assert stats.accepted_tokens > 40 and not stats.drafter_failures
    eager, recorded = called
    assert eager["propose"] > 20 and not recorded["propose"], called
    assert recorded["extend"] < 0.5 * eager["extend"], called  # prompts, and rows with less room than others
    # with imposed acceptance drafts become tokens: wrong ones would change all sequences, rounding a token in 25
    assert agreement(*found, 4) >= 0.6


def _calls(drafter: Any) -> dict[str, int]:
    """How often each of these is called from now on."""
    called = dict.fromkeys(("propose", "extend"), 0)

    def counted(name: str) -> Any:
        real = getattr(drafter, name)

        def call(*args: Any) -> Any:
            called[name] += 1
            return real(*args)

        return call

    for name in called:
        setattr(drafter, name, counted(name))
    return called


@pytest.mark.parametrize("graphs", [(), (1, 2, 4, 8)], ids=["eagerly", "recorded"])
def test_flashmla_is_used_for_rows_without_trees(
    graphs: tuple[int, ...], tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees come and go: they are attended to by own kernels, plain steps of eight rows by the library, and tokens are
    those of either.
    """
    fields: dict[str, Any] = {"max_running_requests": 8, "tree": TreeShape(3, 3, 9), "num_drafts": 9}
    greedy, called = [{"temperature": 0.0}], dict.fromkeys(("own", "library"), 0)
    plain = answers(
        engine("NONE", tmp_path / "plain", (), cuda_graph_bs=graphs, max_running_requests=8, num_drafts=0), greedy
    )
    own, library = mla.decode, flashmla.FlashMlaDecode.attend_with_lse

    def by_own(*args: Any, **kwargs: Any) -> Any:
        called["own"] += args[2].tree_mask_T is not None
        return own(*args, **kwargs)

    def by_library(*args: Any, **kwargs: Any) -> Any:
        called["library"] += 1
        return library(*args, **kwargs)

    monkeypatch.setattr(mla, "decode", by_own)
    monkeypatch.setattr(flashmla.FlashMlaDecode, "attend_with_lse", by_library)
    made = engine("NEXTN", tmp_path / "made", (), cuda_graph_bs=graphs, kernels=choice("triton+flashmla"), **fields)
    rng = random.Random(3)
    made.loop.scheduler.draft_length.choose = lambda sampling, most: rng.choice((0, 9))  # type: ignore[method-assign]
    assert agreement(plain, answers(made, greedy), 10) >= 0.7
    stats = made.loop.stats()
    assert all(called.values()) and stats.drafted_tokens and not stats.drafter_failures, (called, stats)


@pytest.mark.parametrize("case", list(verify.cases(torch.Generator().manual_seed(5))), ids=lambda case: case.name)
def test_tree_verification_equals_the_reference(case: KernelCase, cuda: torch.device) -> None:
    assert max(case.errors(verify.BACKENDS["triton"](**case.fresh_inputs()))) == 0


@pytest.mark.parametrize(
    ("many", "branches", "deepest", "width"),
    [(1, 4, 4, 15), (16, 4, 4, 15), (3, 2, 3, 7), (2, 10, 7, 63), (5, 3, 1, 3)],
)
def test_tree_building_equals_the_reference(
    many: int, branches: int, deepest: int, width: int, cuda: torch.device
) -> None:
    generator = torch.Generator().manual_seed(many)
    made = growing.scene(many, branches, deepest, 32003, cuda, generator)
    for ids_D in (None, torch.randperm(64000, generator=generator)[:32003].to(cuda)):
        assert not growing.differences(grow, made, width, branches, ids_D)
    assert growing.impossible(grow, cuda)
    assert growing.sound(grow, cuda) == [True, False, False, True]


def test_rows_move_in_all_planes(cuda: torch.device) -> None:
    generator = torch.Generator(cuda).manual_seed(1)
    planes = [
        torch.randint(0, 255, (15, 64, size), dtype=torch.uint8, device=cuda, generator=generator)
        for size in (1152, 656, 128)
    ]
    page = torch.randint(0, 255, (15, 64 * 132), dtype=torch.uint8, device=cuda, generator=generator)
    planes += [page[:, : 64 * 128].unflatten(1, (64, -1)), page[:, 64 * 128 :].unflatten(1, (64, 4))]
    want = [plane.clone() for plane in planes]
    ahead = torch.arange(5, device=cuda)
    columns = 300 * torch.arange(3, device=cuda).unsqueeze(1)
    froms = columns + torch.stack([ahead, ahead * 2, ahead.clamp(max=2) + (ahead > 0) * 7])
    tos = columns + ahead
    tos[2, 3:] = froms[2, 3:] = 0
    ref.move(want, froms.flatten(), tos.flatten())
    moving.move(moving.table(planes), froms, tos)
    assert all(torch.equal(got, exact) for got, exact in zip(planes, want, strict=True))
