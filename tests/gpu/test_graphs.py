"""CUDA graphs: every mode equals eager steps, padding affects no request, and what cannot be captured is reported."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.shapes import folder
from tests.gpu.test_engine import agreement, engine, tokens
from thalweg.batch.batch import Batch
from thalweg.batch.inputs import build_inputs
from thalweg.core.agreement import AgreedStep
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.plan import PAGE, Bind, PageAppend, Row, StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.kernels.attend.triton import waves
from thalweg.memory.planes import Planes
from thalweg.runner.captured import CapturedStep
from thalweg.runner.graph_pool import GraphPool, view_of
from thalweg.runner.piecewise import Piecewise, fitting
from thalweg.runner.runner import Runner

GREEDY = SamplingParams(temperature=0.0)
PIECES = (32, 256)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("shape", ["v2-lite", "v3", "qwen3"])
def test_every_mode_gives_the_tokens_of_eager_steps(shape: str, cuda: torch.device, tmp_path: Path) -> None:
    rng, path = random.Random(1), folder(shape, tmp_path)
    prompts = [tuple(rng.randrange(1024) for _ in range(rng.choice((1, 5, 40, 300)))) for _ in range(24)]
    params = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True) for _ in prompts]
    plain = tokens(engine(path, cuda_graph_mode="none"), prompts, params)
    for mode in ("full", "full_decode_only", "full_and_piecewise", "piecewise"):
        got = tokens(engine(path, cuda_graph_mode=mode, cuda_graph_bs=(1, 4, 16)), prompts, params)
        assert all(len(one) == 12 for one in got)
        assert agreement(plain, got, 2) >= 0.7, (mode, agreement(plain, got, 2))


def test_prompts_in_whole_recorded_steps(cuda: torch.device, tmp_path: Path) -> None:
    rng, path = random.Random(2), folder("qwen3", tmp_path)
    prompts = [tuple(rng.randrange(1024) for _ in range(length)) for length in (3, 9, 16, 30, 33)]
    params = [SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True) for _ in prompts]
    wishes = {"chunked_prefill_size": 16, "max_running_requests": 16}
    plain = tokens(engine(path, cuda_graph_mode="none", **wishes), prompts, params)
    whole = engine(path, cuda_graph_mode="full", **wishes)
    asked = list[tuple[int, CapturedStep | None]]()
    ask = whole.runner.graphs.get

    def get(plan: StepPlan, agreed: AgreedStep | None = None) -> CapturedStep | None:
        asked.append((plan.tokens, ask(plan, agreed)))
        return asked[-1][1]

    whole.runner.graphs.get = get  # type: ignore[method-assign]
    assert agreement(plain, tokens(whole, prompts, params), 4) >= 0.8
    assert asked and all(graph is not None for _, graph in asked), "no step ran eagerly"


@pytest.mark.parametrize("shape", ["v2-lite", "v3", "qwen2"])
def test_pieces_compute_what_the_model_computes(shape: str, cuda: torch.device, tmp_path: Path) -> None:
    runner = _runner(folder(shape, tmp_path))
    for parts in ([(0, 32)], [(0, 20)], [(0, 200), (0, 56)], [(70, 1), (64, 1), (0, 100)], [(64, 30), (0, 11)]):
        batch = _bound(runner, parts)
        plain_TH = runner.model.forward(batch, runner.planes)
        kept = [plane.clone() for plane in runner.planes.bytes.values()]
        got_TH = runner.forward_model.forward(batch, runner.planes)
        full = len(batch.ids_T) in PIECES
        _close(got_TH, plain_TH, 0.0 if full else 0.02)  # the same kernels in the same shapes: the same bits
        for now, before in zip(runner.planes.bytes.values(), kept, strict=True):
            assert not full or torch.equal(now[1:], before[1:])


@pytest.mark.parametrize("shape", ["v2-lite", "v3", "qwen2"])
def test_decode_rows_beside_a_prompt_are_recorded_too(shape: str, cuda: torch.device, tmp_path: Path) -> None:
    wishes = {"cuda_graph_bs": (1, 2, 4), "piecewise_cuda_graph_tokens": PIECES, "max_running_requests": 6}
    runner = engine(folder(shape, tmp_path), cuda_graph_mode="full_and_piecewise", **wishes).runner
    assert isinstance(runner.forward_model, Piecewise) and [one.rows for one in runner.forward_model.decoding] == [
        4,
        2,
        1,
    ]
    runner.forward_model.ragged.clear()  # they come first
    for parts in ([(70, 1), (64, 1), (0, 100)], [(30, 1), (0, 20)], [(5, 1), (128, 1), (9, 1), (64, 30), (0, 11)]):
        batch = _bound(runner, parts)
        plain_TH = runner.model.forward(batch, runner.planes)
        used = fitting(runner.forward_model.decoding, batch, 256, runner.forward_model.recorded[-1].attends)
        assert used is not None and used.rows < 3 * batch.groups[0].rows
        for spec in runner.planes.specs:
            runner.planes.tokens(spec.name, spec.layer)[batch.write_T] = (
                0  # what a step does not store it does not find
            )
        _close(runner.forward_model.forward(batch, runner.planes), plain_TH, 0.02)


@pytest.mark.parametrize(
    ("shape", "cache"),
    [
        ("v2-lite", None),
        ("v3", "fp8_e4m3"),
        ("v32", None),
        ("v32", "fp8_ds_mla"),
        ("qwen2", None),
        ("qwen3", "fp8_e4m3"),
    ],
)
@pytest.mark.parametrize("backend", [None, "triton"])
def test_attention_is_captured_with_its_step(
    shape: str, cache: str | None, backend: str | None, cuda: torch.device, tmp_path: Path
) -> None:
    wishes = {"cuda_graph_bs": (1, 2, 4), "piecewise_cuda_graph_tokens": PIECES, "max_running_requests": 24}
    own = "triton_sparse" if shape == "v32" else "triton"
    wishes |= {"kv_cache_dtype": cache, "attention_backend": backend and own}
    runner = engine(folder(shape, tmp_path), cuda_graph_mode="full_and_piecewise", **wishes).runner
    steps = runner.forward_model
    assert isinstance(steps, Piecewise) and [(one.tokens, one.decode) for one in steps.ragged] == [
        (256, 0), (256, 4), (32, 4),
    ]  # fmt: skip
    held = 0
    for parts in (
        [(0, 32)], [(0, 20)], [(0, 200), (0, 56)], [(70, 1), (64, 1), (0, 100)], [(64, 30), (0, 11)],
        [(30, 1), (0, 20)], [(5, 1), (128, 1), (9, 1), (64, 30), (0, 11)], [(0, 3), (300, 1), (0, 1), (2, 5)],
        [(3, 1)], [(0, 9)] * 16,
    ):  # fmt: skip
        batch = _bound(runner, parts)
        graph = next((one for one in steps.ragged if one.tokens >= len(batch.ids_T) and one.fits(batch)), None)
        held += graph is not None
        if graph is None:
            assert any(before for before, now in parts if now > 1) and cache
            continue
        plain_TH = runner.model.forward(batch, runner.planes)
        kept = _vectors(runner.planes, batch.write_T)
        for spec in runner.planes.specs:  # what the step does not store it does not find
            for entries in runner.planes.entries(spec.name, spec.layer):
                entries[batch.write_T // PAGE, batch.write_T % PAGE] = 0
        got_TH = graph.forward(batch)
        # FP8 weights multiply bf16 activations of few tokens, and a graph has as many as its bucket
        share = 0.1 if shape == "v3" else 0.02
        _close(got_TH, plain_TH, share)
        for now, before in zip(_vectors(runner.planes, batch.write_T), kept, strict=True):
            _close(now, before, 2 * share)
        assert torch.equal(got_TH.clone(), graph.forward(batch))
    assert held >= 6
    for parts in ([(0, 9)] * 17, [(70, 1)] * 5 + [(0, 9)]):
        assert not any(one.fits(_bound(runner, parts)) for one in steps.ragged)


def _vectors(planes: Planes, rows_T: Tensor) -> list[Tensor]:
    """What each plane holds in these rows, decoded."""
    found = []
    for spec in planes.specs:
        pages = planes.paged(spec.name, spec.layer)[rows_T // PAGE]
        numbers = planes.read(spec.name, spec.layer, pages, torch.float32)
        found.append(numbers[torch.arange(len(rows_T)), rows_T.cpu() % PAGE])
    return found


@pytest.mark.parametrize("is_whole", [False, True])
def test_padding_writes_into_the_null_page_only(is_whole: bool, cuda: torch.device, tmp_path: Path) -> None:
    runner = _runner(folder("v2-lite", tmp_path), is_whole)
    batch = _bound(runner, [(0, 70)])
    for plane in runner.planes.bytes.values():
        plane.random_(0, 60)  # small finite numbers in every type
    kept = [plane.clone() for plane in runner.planes.bytes.values()]
    runner.forward_model.forward(batch, runner.planes)
    own = {0, *batch.table_RP.flatten().tolist()}
    for now, before in zip(runner.planes.bytes.values(), kept, strict=True):
        pages = (now != before).any(1).nonzero().flatten().tolist()
        assert set(pages) <= own and len(set(pages) - {0}) == 2


@pytest.mark.parametrize("is_whole", [False, True])
def test_what_an_earlier_step_left_does_not_matter(is_whole: bool, cuda: torch.device, tmp_path: Path) -> None:
    runner = _runner(folder("v2-lite", tmp_path), is_whole)
    batch = _bound(runner, [(0, 70)])
    first_TH = runner.forward_model.forward(batch, runner.planes).clone()
    other = _bound(runner, [(0, 250)])
    runner.forward_model.forward(other, runner.planes)
    again = _bound(runner, [(0, 70)])
    assert torch.equal(runner.forward_model.forward(again, runner.planes), first_TH)


def test_steps_beyond_the_largest_bucket_run_eagerly(cuda: torch.device, tmp_path: Path) -> None:
    runner = _runner(folder("qwen3", tmp_path))
    batch = _bound(runner, [(0, 300)])
    assert torch.equal(runner.forward_model.forward(batch, runner.planes), runner.model.forward(batch, runner.planes))


def test_a_graph_for_long_contexts_cuts_short_ones_as_one_for_short_ones_does() -> None:
    for programs in range(1, 1100):
        assert waves(programs, 163840) == waves(programs, 32768)
    assert [waves(programs, 163840) for programs in (32, 64, 128, 256, 1024)] == [4, 2, 1, 1, 1]


def test_graph_pool_memory_is_shared(cuda: torch.device) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool):
        whole = torch.ones(6, 8, device=cuda).to(dtype)
        part = whole[1:, 2:5]
        lent = view_of(part)
        assert (lent.shape, lent.stride(), lent.dtype, lent.data_ptr()) == (
            part.shape,
            part.stride(),
            dtype,
            part.data_ptr(),
        )


def test_a_failed_recording_is_told_and_leaves_a_working_device(cuda: torch.device) -> None:
    pool = GraphPool()
    with pytest.raises(UnsupportedConfig, match="capturing CUDA graphs of 7 rows failed .*--cuda-graph-mode none"):
        with pool.running("7 rows"):
            pool.begin()
            torch.ones(3, device=cuda).sum().item()  # waits for what is only being recorded
    assert torch.ones(3, device=cuda).sum().item() == 3
    with pool.running("1 row"):
        x = torch.zeros(2, device=cuda)
        pool.begin()
        x.add_(1)
        graph = pool.end()
    graph.replay()
    assert x.tolist() == [1, 1]


def _runner(path: Path, is_whole: bool = False) -> Runner:
    """is_whole: attention is in the graphs."""
    runner = engine(
        path, cuda_graph_mode="piecewise", piecewise_cuda_graph_tokens=PIECES, max_running_requests=4
    ).runner
    assert isinstance(runner.forward_model, Piecewise)
    if not is_whole:
        runner.forward_model.ragged.clear()
    return runner


def _bound(runner: Runner, parts: list[tuple[int, int]]) -> Batch:
    """A step of these rows: (tokens computed before, tokens now), each in its own slot and pages."""
    rng, page, binds, appends, rows = random.Random(5), 1, [], [], []
    for slot, (before, now) in enumerate(parts):
        known = tuple(rng.randrange(1024) for _ in range(before + now))
        pages = tuple(range(page, page + -(-len(known) // PAGE)))
        page += len(pages)
        binds.append(Bind(slot, known, len(known), before, 4096, 1, (), GREEDY))
        appends.append(PageAppend(slot, 0, pages))
        rows.append(Row(slot, slot, before, now, 0, True))
    plan = StepPlan(0, 0, tuple(rows), tuple(binds), tuple(appends), max_kv_len=max(a + b for a, b in parts))
    runner.slots.bind(plan.binds)
    runner.slots.append(plan.appends)
    return build_inputs(plan, runner.slots).batch


def _close(got: Tensor, wanted: Tensor, share: float) -> None:
    error = (got.float() - wanted.float()).norm() / wanted.float().norm()
    assert error <= share, f"relative error {error:.4f}, allowed {share}"
