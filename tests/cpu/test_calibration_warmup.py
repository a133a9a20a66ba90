"""The start of an engine on a GPU, tested without one: warm-up steps, one layer of each kind, memory sums."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.configs import changed, config
from tests.cpu import reference_model, zoo
from thalweg import cli
from thalweg.batch.slots import Slots
from thalweg.config.machine import Machine
from thalweg.config.tree import options_of
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE, SamplingNeeds
from thalweg.core.report import AUTO, Decision, Report
from thalweg.engine import caches, calibration_memory
from thalweg.engine.calibration_memory import GraphMemory, MemoryBudget, with_pages
from thalweg.engine.calibration_plans import (
    ALL_NEEDS,
    CHUNK,
    DECODE_QUERY,
    all_steps,
    cached_prompts,
    context_lengths,
    fine_token_counts,
    largest_steps,
    row_counts,
    sampling_steps,
    token_counts,
)
from thalweg.engine.calibration_warmup import warm_up
from thalweg.launch import resources
from thalweg.launch.report import as_json, show
from thalweg.launch.resolve import resolve
from thalweg.launch.resources import can_measure_steps
from thalweg.memory.planes import Planes
from thalweg.models.catalog import read_facts
from thalweg.models.one_of_each import one_layer_of_each_kind
from thalweg.models.token_by_token import TokenByToken
from thalweg.runner.runner import Runner

TINY = Path(__file__).parents[2] / "models" / "tiny"
GB = 10**9


@pytest.mark.parametrize(
    ("slots", "budget", "context"),
    [(1, 1, 1), (1, 8192, 100), (3, 50, 7), (256, 8192, 163840), (4, 5, 64), (300, 70, 4096)],
)
def test_kinds_keep_to_the_limits(slots: int, budget: int, context: int) -> None:
    sampled = list(sampling_steps(min(slots, budget), context))
    plans = [
        *all_steps(slots, budget, context),
        *largest_steps(slots, budget, context),
        *cached_prompts(slots, budget, context),
        *sampled,
    ]
    for plan in plans:
        assert 0 < len(plan.rows) <= slots and plan.tokens <= budget and plan.max_kv_len <= context
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            assert row.n > 0 and row.start >= 0 and row.start + row.n <= plan.max_kv_len
    assert max(plan.tokens for plan in plans) == min(budget, slots * context)
    assert any(len(plan.rows) == min(slots, budget) and plan.is_decode for plan in plans)
    assert max(plan.max_kv_len for plan in plans) == context
    assert len(plans) < 2500


def test_every_kind_is_there() -> None:
    plans = list(all_steps(64, 2048, 4096))
    decodes = {(len(plan.rows), plan.needs) for plan in sampling_steps(64, 4096)}
    for needs in (
        SamplingNeeds(),
        SamplingNeeds(random=True, truncated=True),
        SamplingNeeds(penalised=True),
        SamplingNeeds(biased=True),
        SamplingNeeds(logprobs=20),
    ):
        assert {1, 2, 16, 17, 64} <= {rows for rows, each in decodes if each == needs}
    mixed = [plan for plan in plans if plan.rows[0].n == 1 and plan.rows[-1].n > 4]
    assert {1, 2, 3, 16, 17, 63} <= {len(plan.rows) - 1 for plan in mixed}
    assert any(plan.rows[-1].start and not plan.rows[-1].samples for plan in mixed)
    assert {5, 20, 100, 299} <= {
        row.prompt_logprobs_stop - row.prompt_logprobs_start for plan in plans for row in plan.rows
    }
    assert {1, 2, 3, 4} == {row.n for plan in plans for row in plan.rows if not row.samples and row.n < 5}


def test_ladders_meet_both_divisibilities_everywhere() -> None:
    for rungs, wide in ((token_counts(8192), 512), (fine_token_counts(8192), 128)):
        assert rungs[:80] == list(range(1, 81)) and rungs[-1] == 8192
        for low in range(80, 8192 - wide, wide):
            within = [rung for rung in rungs if low <= rung < low + wide]
            assert any(rung % 16 == 0 for rung in within) and any(rung % 16 for rung in within)
    assert token_counts(1) == [1] and token_counts(100)[-1] == 100 and token_counts(131072)[-1] == 131072
    assert (
        row_counts(1) == [1]
        and row_counts(700)[-1] == 700
        and context_lengths(100) == [64, 100]
        and context_lengths(1) == [1]
    )


SETTINGS_TINY = config(model_path="m", max_running_requests=4, chunked_prefill_size=96)


def test_kinds_of_layers_keep_the_order_of_the_model(tmp_path: Path) -> None:
    """A layer that shares a choice of context comes behind one that makes it, also if the last layer makes its own."""
    shape = {**json.loads((TINY / "config.json").read_text()), "index_topk_pattern": "FSSF", "first_k_dense_replace": 0}
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 4, "quantization_config": None}))
    model = reference_model.build(read_facts(tmp_path), torch.float32)
    assert isinstance(model, torch.nn.Module)
    slim = one_layer_of_each_kind(model)
    assert isinstance(slim, torch.nn.Module)
    assert list(slim.layers) == list(model.layers)[:2]  # type: ignore[arg-type]


def test_one_layer_of_each_kind_runs_every_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reference_model.build(read_facts(TINY), torch.float32)
    assert isinstance(model, torch.nn.Module)
    zoo.fill(model)
    names = [name for name, _ in model.named_parameters()]
    slim = one_layer_of_each_kind(model)
    assert isinstance(slim, torch.nn.Module) and isinstance(slim.layers, torch.nn.ModuleList)
    assert len(slim.layers) == 2 < len(model.layers) and slim.layers[0] is model.layers[0]  # type: ignore[arg-type]
    assert [name for name, _ in model.named_parameters()] == names
    layers_run: list[int] = []
    for number, layer in enumerate(model.layers):  # type: ignore[arg-type]
        layer.register_forward_pre_hook(lambda *_, number=number: layers_run.append(number))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    planes, slots = Planes(model.planes(), 1), Slots(5, 128, torch.device("cpu"))
    runner = Runner(slim, slim, planes, slots)
    for plan in [*list(all_steps(4, 96, 128))[::9], *largest_steps(4, 96, 128)]:
        made = runner.sample(runner.forward(plan))
        assert made is not None or not any(row.samples for row in plan.rows)
    assert not slots.tokens_SL[:, :128].any(), "padding writes no token"
    assert len(set(layers_run)) == 2, "the other layers were left out"
    ways: list[int] = []
    warm_up(Runner(model, model, planes, slots), SETTINGS_TINY, 128, lambda done, total: ways.append(total))
    assert len(ways) == ways[0] > 40
    assert all(torch.isfinite(plane.float()).all() for plane in planes.tensors())


ALONE = KernelConfig(decode="torch", prefill="torch", deterministic=True)


def test_a_model_that_computes_one_token_at_a_time_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no module, and what is run ahead is what it runs: single tokens. What is measured are a few of them."""
    model = reference_model.build(read_facts(TINY), torch.float32)
    assert isinstance(model, torch.nn.Module)
    zoo.fill(model)
    alone = TokenByToken(model)
    runner = Runner(alone, alone, Planes(model.planes(), 1), Slots(5, 512, torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seen: list[torch.Size] = []
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda *given: seen.append(given[1].ids_T.shape) or forward(*given))
    settings = changed(SETTINGS_TINY, kernels=ALONE, max_running_requests=4, chunked_prefill_size=2048)
    warm_up(runner, settings, 512, lambda done, total: None)
    assert set(seen) == {(1,)} and len(seen) < 1500
    measured = list(calibration_memory._largest_steps(settings, runner, 512))
    assert sum(plan.tokens for _, plan in measured) <= settings.max_running_requests + 1
    assert {of.model for of, plan in measured} == {model, alone}
    seen.clear()
    for of, plan in measured:
        assert plan.max_kv_len == 512 and of.sample(of.forward(plan)) is not None
    assert len(seen) == 5
    assert calibration_memory._hidden_bytes(
        settings, alone
    ) == 2 * 2048 * model.facts.hidden * 4 and not calibration_memory._hidden_bytes(settings, model)


def test_plain_attention_is_measured_at_its_longest_context() -> None:
    plain = KernelConfig(decode="torch")
    beside = changed(SETTINGS_TINY, kernels=plain, max_running_requests=8, chunked_prefill_size=1024)
    model = reference_model.build(read_facts(TINY), torch.float32)
    runner = Runner(model, model, Planes(model.planes(), 1), Slots(9, 64, torch.device("cpu")))
    plans = [plan for _, plan in calibration_memory._largest_steps(beside, runner, 100_000)]
    (longest,) = [plan for plan in plans if plan.max_kv_len > calibration_memory.REFERENCE_CONTEXT]
    assert longest.max_kv_len == 100_000 and len(longest.rows) == 8 and 8 < longest.tokens < 100
    assert all(plan.max_kv_len == 50 for _, plan in calibration_memory._largest_steps(beside, runner, 50))


@pytest.mark.parametrize(("slots", "budget", "context"), [(256, 8192, 4096), (64, 8192, 1000), (2, 512, 1 << 17)])
def test_what_gathers_most_context_is_measured(slots: int, budget: int, context: int) -> None:
    whole, chunks = cached_prompts(slots, budget, context)
    for plan in (whole, chunks):
        assert all(row.start >= row.n > DECODE_QUERY for row in plan.rows) and plan.tokens <= budget
    gathered = [sum(row.start + row.n for row in plan.rows) for plan in (whole, chunks)]
    assert CHUNK - context < gathered[0] <= CHUNK < gathered[1]
    triton = KernelConfig(decode="triton")
    settings = changed(SETTINGS_TINY, kernels=triton, max_running_requests=slots, chunked_prefill_size=budget)
    model = reference_model.build(read_facts(TINY), torch.float32)
    runner = Runner(model, model, Planes(model.planes(), 1), Slots(2, 64, torch.device("cpu")))
    assert model.facts.indexer is not None
    short = cached_prompts(slots, budget, min(context, model.facts.indexer.topk))  # expanded, all of it being chosen
    measured = {plan for _, plan in calibration_memory._largest_steps(settings, runner, context)}
    assert {whole, chunks, *short} < measured


def test_chunks_of_cached_context_are_run_within_any_budget() -> None:
    """Where as many prompts of five tokens as fill a chunk do not fit in a step, those of two do, behind a decoding
    row.
    """
    for slots, budget, context in ((256, 100, 512), (256, 8192, 512)):
        cached_of = []
        for plan in all_steps(slots, budget, context):
            decoded = plan.rows[0].n if plan.rows[0].n <= DECODE_QUERY else 0
            cached_of.append(sum(row.start for row in plan.rows if row.n != decoded))
        assert max(cached_of) > CHUNK


def test_the_numbers_of_attention_on_pages_are_its_own() -> None:
    tree = ast.parse((Path(calibration_memory.__file__).parents[1] / "layers" / "paged.py").read_text())
    given = {
        each.targets[0].id: eval(ast.unparse(each.value))
        for each in tree.body
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name)
        if each.targets[0].id in ("CHUNK", "DECODE_QUERY")
    }
    assert given == {"CHUNK": CHUNK, "DECODE_QUERY": DECODE_QUERY}


def test_step_times_are_measured_where_the_user_sets_no_size_or_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine("Test CPU", 8, 100 * GB, 50 * GB, ("NVIDIA H100 80GB HBM3",), 80 * GB)

    def measures(**wishes: Any) -> bool:
        engine = resolve(options_of(model=str(TINY), **wishes), machine, weights=False, progress=False).engine
        assert engine.max_itl_ms == wishes.get("max_itl_ms", 0.0)
        return engine.measures_step_times

    assert measures() and not measures(chunked_prefill_size=512)
    assert measures(chunked_prefill_size=512, max_itl_ms=20.0) and not measures(device="cpu")
    assert measures(device="cpu", max_ttft_ms=500.0)
    assert can_measure_steps(KernelConfig(decode="triton", deterministic=True))
    assert can_measure_steps(KernelConfig(decode="torch")) and not can_measure_steps(ALONE)
    monkeypatch.setattr(resources, "can_measure_steps", lambda kernels: False)
    assert not measures()
    with pytest.raises(UnsupportedConfig, match="max_itl_ms.*one token at a time"):
        measures(max_itl_ms=20.0)


SUMS = MemoryBudget(free=50 * GB, step=3 * GB, graphs=2 * GB, slots=GB // 2, reserve=GB, page=2_000_000)
SETTINGS = config(
    model_path="m",
    device="cuda",
    num_pages=0,
    context_length=1 << 20,
    report=Report((Decision("max_total_tokens", 7 * PAGE, AUTO, "an estimate"),)),
)


def test_pages_are_what_is_left() -> None:
    assert SUMS.pages == (50 * GB - 3 * GB - 2 * GB - GB // 2 - GB) // 2_000_000 - 1 == 21749
    settled = with_pages(SETTINGS, SUMS)
    assert (settled.num_pages, settled.context_length) == (21749, 1 << 20)
    said = settled.report.current()["max_total_tokens"]
    assert (said.value, said.source) == (21749 * PAGE, "start-up")
    assert said.reason == (
        "64 tokens a page: (50.0 GB free beside the weights - 3.0 GB a step - 2.0 GB graphs - 500.0 MB slots - "
        "1.0 GB reserve) / 2.0 MB a page = 21749"
    )


def test_the_context_is_what_the_pages_hold() -> None:
    small = SUMS._replace(free=8 * GB)
    settled = with_pages(SETTINGS, small)
    assert settled.context_length == settled.num_pages * PAGE == small.pages * PAGE < 1 << 20
    assert settled.report.current()["context_length"].value == settled.context_length
    length = settled.context_length
    asked = changed(SETTINGS, min_context_length=length, context_length=length)
    assert with_pages(asked, small).context_length == settled.context_length
    with pytest.raises(UnsupportedConfig, match=rf"context_length: .* use at most {settled.context_length}"):
        with_pages(changed(SETTINGS, min_context_length=length + 1), small)


def test_pages_that_were_asked_for_are_given_or_refused() -> None:
    most = (SUMS.left + SUMS.reserve) // SUMS.page
    asked = changed(SETTINGS, num_pages=most, context_length=4096)
    assert with_pages(asked, SUMS).num_pages == most and with_pages(asked, SUMS).report == asked.report
    with pytest.raises(
        UnsupportedConfig, match=rf"{most + 1} pages do not fit: .*use --max-total-tokens {SUMS.pages * PAGE}"
    ):
        with_pages(changed(asked, num_pages=most + 1), SUMS)
    with pytest.raises(UnsupportedConfig, match="no page is left"):
        with_pages(SETTINGS, SUMS._replace(free=6 * GB))


def test_graphs_are_predicted_from_one_bucket() -> None:
    assert GraphMemory(pool=500, driver=20).predict(36) == 500 + 36 * 20


def test_what_others_take_of_the_gpu_meanwhile_is_not_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free memory is the device's: a bucket that seems to take gigabytes is looked at again."""

    class Runs:
        recorded, forward_model, graphs = 0, None, None

        def disable_graphs(self) -> None:
            pass

    def record(runner: Runs) -> int:
        runner.recorded += 1
        return 10

    def expected(*taken: int) -> tuple[int, int]:
        """(bytes, recordings) where what is free shrinks by these numbers from one recording to the next."""
        left = iter([frees for take in taken for frees in (100 * GB, 100 * GB - take)])
        monkeypatch.setattr(calibration_memory, "free_memory", lambda device: next(left))
        runs = Runs()
        made = calibration_memory._measure_graphs(runs, record, torch.device("cpu"))  # type: ignore[arg-type]
        return made, runs.recorded

    few, much = 3 << 20, 2 * GB
    assert expected(few) == (10 * few, 2)
    assert expected(much, few) == (10 * few, 3)
    assert expected(much, 3 * GB, much) == (10 * much, 4), "more than once is how it is"
    assert expected(much, -GB) == (0, 3), "others gave back more than it took"


def test_compilers_are_told_where_to_keep_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in caches.FOLDERS:
        monkeypatch.setenv(variable, "elsewhere")
    assert caches.use("") == caches.DEFAULT.expanduser()
    import os

    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
    assert caches.use(str(tmp_path)) == tmp_path and os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "x").write_bytes(bytes(10))
    assert caches.size_of(tmp_path) == 10


def test_all_needs_are_all() -> None:
    assert all(ALL_NEEDS[:4]) and ALL_NEEDS.logprobs > 0


def test_a_plan_on_a_gpu_is_an_estimate() -> None:
    machine = Machine("Test CPU", 8, 100 * GB, 50 * GB, ("NVIDIA H100 80GB HBM3",), 80 * GB)
    resolved = resolve(options_of(model=str(TINY)), machine, weights=False, progress=False)
    assert (resolved.engine.num_pages, resolved.engine.context_length, resolved.engine.min_context_length) == (
        0,
        4096,
        0,
    )
    told = as_json(resolved)
    assert told["pages_measured_at_start"] and told["pages"] == resolved.pages > 0 and resolved.context == 4096
    with Console(file=io.StringIO(), width=200) as console:
        show(told, console)
    assert f"about {resolved.pages:,} pages" in console.file.getvalue()  # type: ignore[attr-defined]


def test_warmup_of_a_machine_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warmup", str(TINY), "--device", "cpu", "--port", "0"]) == 0
    assert "nothing to compile" in capsys.readouterr().out
