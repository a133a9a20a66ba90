"""`thalweg ablate`: columns come from the resolver, cells run in processes of their own, partial results are kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from thalweg.bench import ablate, ablation_cell
from thalweg.bench.ablation_cell import CellOrder, CellWorkload, draw
from thalweg.bench.ablation_columns import (
    LADDER,
    MATRIX,
    ONE,
    SHORT,
    AblationColumn,
    ColumnLevel,
    SettingsProbe,
    cells,
    columns,
    features,
)
from thalweg.bench.ablation_engine import InProcess, Served, cell_engine
from thalweg.bench.ablation_tables import differences_from_base, sglang_table
from thalweg.bench.datasets import OrdinaryTokens
from thalweg.bench.evaluation import EvalSettings
from thalweg.bench.floor import ServedModel, share_of_floor
from thalweg.bench.in_process import Generation, exactly, run_all
from thalweg.bench.server_process import engine_processes, usage
from thalweg.config.machine import Machine
from thalweg.config.machines import hardware
from thalweg.config.tree import settings
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.messages import TokenDelta
from thalweg.launch.planning.layouts import ParallelLayout

TINY = Path(__file__).parents[2] / "models" / "tiny"
HERE = Machine("a processor", 2, 8 << 30, 4 << 30)  # no GPU: the same columns on any machine that tests run on
SIZES = {  # decisions that are settings and no features: how much, where, and what a client sees
    "threads", "device", "dtype", "max_running_requests", "max_total_tokens", "mem_fraction_static",
    "context_length", "random_seed", "speculative_num_steps", "cuda_graph_bs", "piecewise_cuda_graph_tokens",
    "chat_template", "reasoning_parser", "tool_call_parser", "quantization",
}  # fmt: skip
SMALL = CellWorkload(input_len=12, output_len=6, concurrency=(2,), waves=1)


@pytest.fixture(scope="module")
def probe() -> SettingsProbe:
    return SettingsProbe({"model": str(TINY), "random_seed": 0}, HERE)


# ---- columns ----


def test_every_decision_is_a_feature_or_a_size(probe: SettingsProbe) -> None:
    base = probe.start()
    decided = {one.name for one in base.decisions if one.name in settings()}
    assert decided <= set(features(base)) | SIZES, "a new setting: give it an off value, or name it as a size here"
    assert not set(features(base)) & SIZES


def test_ablation_columns_come_from_the_resolver(probe: SettingsProbe) -> None:
    found = {column.name: column for column in columns([], probe)}
    assert [level.wish for level in found["radix"].levels] == [False, ...] and found["radix"].base == "on"
    assert [level.wish for level in found["deterministic"].levels] == [..., True] and found[
        "deterministic"
    ].base == "off"
    assert found["kv"].levels[1].wish == "fp8_e4m3" and found["chunk"].levels[0].wish == -1
    assert {"graph", "mla", "overlap", "tp", "ep", "dp-attention", "nextn"} <= set(found)


def test_layouts_of_several_processes_are_what_their_columns_say(probe: SettingsProbe) -> None:
    def engine(*on: str) -> tuple[int, int, bool, int]:
        resolved = probe({k: v for column in columns(on, probe) for k, v in column.wishes(column.levels[1]).items()})
        assert not isinstance(resolved, str), resolved
        made = resolved.engine
        return made.tp_size, made.dp_size, made.enable_dp_attention, made.ep_size

    assert engine("tp") == (2, 1, False, 1)
    assert engine("dp") == (1, 2, False, 1), "copies"
    assert engine("ep") == (2, 1, False, 2) == engine("tp", "ep")
    assert engine("dp-attention") == (2, 2, True, 1)
    assert engine("tp", "dp") == (2, 2, False, 1)
    assert engine("ep", "dp-attention") == (2, 2, True, 2)


def test_layouts_of_a_base_of_several_processes() -> None:
    base = {"model": str(TINY), "random_seed": 0, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
    found = {column.name: column for column in columns(["tp", "dp-attention", "ep"], SettingsProbe(base, HERE))}
    attention = found["dp-attention"]
    assert attention.base == "on" and attention.wishes(attention.levels[0]) == {
        "dp_size": 1,
        "enable_dp_attention": False,
    }
    assert found["ep"].base == "off" and found["ep"].wishes(found["ep"].levels[1]) == {"tp_size": 2, "ep_size": 2}


def test_what_cannot_run_has_the_resolvers_reason(probe: SettingsProbe) -> None:
    reasons = {cell.labels_that_differ: cell.reason for cell in _changed(columns([], probe), probe)}
    assert "a CPU has none" in reasons["graph on"]
    assert "needs a GPU" in reasons["attention on"]
    assert reasons["the base"] == reasons["radix off"] == reasons["kv on"] == reasons["pp on"] == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [(["raddix"], "no such setting; did you mean radix"), (["zzz"], "no such setting; short names are graph, "),
     (["radix", "radix"], "given twice"), (["radix", "radix-cache"], "given twice"), (["foo=1,2"], "no such setting")],
)  # fmt: skip
def test_an_unknown_column_is_an_error_before_measuring(
    words: list[str], said: str, probe: SettingsProbe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(ablate, "run_cell", lambda *_: pytest.fail("a cell was run"))
    with pytest.raises(UnsupportedConfig, match=said):
        columns(words, probe)
    assert ablate.main([str(TINY), "--columns", *words, "--output-file", str(tmp_path / "a.json")]) == 2
    assert said in capsys.readouterr().err


def test_every_short_name_is_a_setting() -> None:
    assert set(SHORT.values()) <= set(settings())


def test_columns_with_values(probe: SettingsProbe) -> None:
    (column,) = columns(["dtype=float32,bfloat16"], probe)
    assert [cell.wishes for cell in cells(ONE, [column], probe)] == [
        {},
        {"dtype": "bfloat16"},
    ]  # float32 is what it has
    for words, what in ((["dtype"], "no feature"), (["kv=bfloat16"], "two values")):
        with pytest.raises(UnsupportedConfig, match=what):
            columns(words, probe)


@dataclass(frozen=True)
class _Named:
    labels_that_differ: str
    reason: str


def _changed(made: list[AblationColumn], probe: SettingsProbe) -> list[_Named]:
    return [
        _Named(differences_from_base([one.as_json() for one in made], cell.labels), cell.reason)
        for cell in cells(ONE, made, probe)
    ]


def test_modes(probe: SettingsProbe) -> None:
    made = columns(["overlap", "graph", "radix"], probe)
    matrix = cells(MATRIX, made, probe)
    assert len(matrix) == 8 and len({cell.key for cell in matrix}) == 8
    assert matrix[0].wishes == {}, "the base comes first, so that an interruption leaves what others are held against"
    assert all(("a CPU has none" in cell.reason) == (cell.labels["graph"] == "on") for cell in matrix)
    ladder = cells(LADDER, made, probe)
    assert [cell.wishes for cell in ladder] == [
        {"radix_cache": False},
        {"radix_cache": False, "overlap_schedule": True},
        # cannot run, and the next does without it
        {"radix_cache": False, "overlap_schedule": True, "cuda_graph_mode": "full_and_piecewise"},
        {"overlap_schedule": True},
    ]
    assert [bool(cell.reason) for cell in ladder] == [False, False, True, False]


def test_triples_change_up_to_three_columns(probe: SettingsProbe) -> None:
    made = columns(["overlap", "nextn", "radix", "mla"], probe)
    found = [len(cell.wishes) for cell in cells("triples", made, probe)]
    assert found == [0] + [1] * 4 + [2] * 6 + [3] * 4
    of_values = columns(["chunked_prefill_size=64,128", "radix"], probe)
    assert len(cells("pairs", of_values, probe)) == 1 + 3 + 2, "two values of one setting are no pair"


# ---- the load ----


@dataclass
class FakeEngine:
    """Each step gives every running request one token."""

    running: dict[int, int] = field(default_factory=dict)
    most: int = 0
    uid: int = -1
    idle: bool = True

    def submit(self, prompt: list[int], params: Any, grammar: Any) -> tuple[int]:
        self.uid += 1
        self.running[self.uid] = params.max_tokens
        self.most = max(self.most, len(self.running))
        return (self.uid,)

    def step(self) -> list[TokenDelta]:
        deltas = []
        for uid in list(self.running):
            self.running[uid] -= 1
            deltas.append(TokenDelta(uid, (7,), "" if self.running[uid] else "length", cached=3))
            if not self.running[uid]:
                del self.running[uid]
        return deltas


def test_a_closed_loop_keeps_so_many_under_way_and_loses_none() -> None:
    engine: Any = FakeEngine()
    seen = [exactly([1], n) for n in (5, 1, 2, 9, 3)]
    run_all(engine, seen, 2)
    assert [len(one.tokens) for one in seen] == [5, 1, 2, 9, 3] and engine.most == 2
    assert all(one.start <= one.first <= one.end and one.cached == 3 for one in seen)


def test_lengths_are_as_asked_and_the_same_in_every_cell() -> None:
    work = CellWorkload(input_len=100, output_len=50, spread=0.2, shared_prefix=30)
    vocabulary = OrdinaryTokens(range(5, 500))
    asks = draw(work, 400, vocabulary, "8 0")
    assert asks == draw(work, 400, vocabulary, "8 0") != draw(work, 400, vocabulary, "8 1")
    assert {tuple(ask.prompt[:30]) for ask in asks} == {tuple(asks[0].prompt[:30])}
    inputs, outputs = [len(ask.prompt) for ask in asks], [ask.params.max_tokens for ask in asks]
    assert min(inputs) >= 80 and max(inputs) <= 120 and abs(sum(inputs) / 400 - 100) < 2
    assert min(outputs) >= 40 and max(outputs) <= 60 and abs(sum(outputs) / 400 - 50) < 1
    with pytest.raises(UnsupportedConfig, match="up to 180 tokens"):
        work.check(179)
    work.check(180)


class TimedEngine:
    """Answers at once: each request takes 2 s, of which the run sees all."""

    model = ServedModel(TINY, ParallelLayout())

    def run(self, requests: Sequence[Generation], concurrency: int = 0) -> None:
        for one in requests:
            one.start = time.perf_counter()
            one.tokens, one.first, one.end = [1] * (one.params.max_tokens or 0), one.start + 0.5, one.start + 2.0

    def flush_cache(self) -> None: ...

    def cpu_seconds(self) -> float:
        return 0.0


def test_a_batch_has_its_share_of_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = TimedEngine()
    work, vocabulary = CellWorkload(input_len=40, output_len=20, spread=0.0, waves=1), OrdinaryTokens(range(5, 500))
    assert ablation_cell.batch(engine, work, vocabulary, 4)["share_of_floor"] is None, "of no GPU"
    h200 = hardware("h200")
    monkeypatch.setattr(ablation_cell, "hardware_of", lambda machine: h200)
    row = ablation_cell.batch(engine, work, vocabulary, 4)
    assert row["share_of_floor"] == pytest.approx(share_of_floor(engine.model, h200, 4, 160, 80, 4.0, 2.0), rel=0.01)


def test_the_share_of_the_floor_is_shown_where_it_was_measured() -> None:
    result = json.loads((TINY.parents[1] / "benchmarks/cpu/ablation_tiny.json").read_text())
    before = sglang_table(result)
    result["cells"][0]["batches"][0]["share_of_floor"] = 0.423
    head, _, *rows = sglang_table(result)[: len(before)]
    assert "Share of floor, %" in head and "Share of floor" not in before[0]
    cells = [row.split("|")[head.split("|").index(" Share of floor, % ")].strip() for row in rows if "|" in row]
    assert cells[0] == "42.3" and set(cells[1:]) == {"–"}


# ---- cells in processes ----


def _order(model: Path) -> CellOrder:
    base = {"model": str(model), "threads": 1, "dtype": "float32", "max_running_requests": 2, "max_total_tokens": 4096}
    return CellOrder(settings=base, work=SMALL, accuracy=EvalSettings())


@pytest.mark.parametrize("client", ["in-process", "http"])
def test_an_ablation_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str], client: str) -> None:
    out = tmp_path / "a.json"
    flags = [
        "--columns",
        "radix",
        "graph",
        "--input-len",
        "12",
        "--output-len",
        "6",
        "--concurrency",
        "2",
        "--waves",
        "2",
    ]
    flags += ["--tasks", "sums", "--items", "2", "--output-file", str(out)]
    flags += ["--query", "Count to 3.", "--expected", "", "--client", client]
    assert ablate.main([str(TINY), "--threads", "1", "--dtype", "float32", *flags]) == 0
    saved = json.loads(out.read_text())
    base, without, refused = saved["cells"]
    graphs = {"cuda_graph_mode": "full_and_piecewise"}
    assert (base["wishes"], without["wishes"], refused["wishes"]) == ({}, {"radix_cache": False}, graphs)
    assert (base["status"], without["status"], refused["status"]) == ("done", "done", "not runnable")
    assert without["decisions"]["radix_cache"] is False and base["decisions"]["radix_cache"] is True
    for cell in (base, without):
        (batch,) = cell["batches"]
        assert batch["requests"] == 4 and batch["cached_tokens"] == 0
        assert batch["throughput"] == pytest.approx((batch["input_tokens"] + batch["output_tokens"]) / batch["seconds"])
        seconds = cell["single"]["decode_seconds"]  # 0.0 where all tokens came at once
        assert cell["single"]["decode_tokens_per_s"] == (pytest.approx(5 / seconds) if seconds else 0.0)
        assert cell["query"]["answer"] and cell["query"]["right"], "every text has the empty one"
        assert cell["ran"]["decisions"]["radix_cache"] == cell["decisions"]["radix_cache"]
        assert cell["accuracy"][0]["total"] == 2 and cell["accuracy"][0]["low_95"] < cell["accuracy"][0]["share"] + 1e-9
    assert (
        saved["workload"]["concurrency"] == [2] and saved["commit"] is not None and saved["configuration"]["decisions"]
    )
    shown = capsys.readouterr().out
    assert "| radix off |" in shown and "- graph on: not runnable: cuda_graph_mode: full" in shown
    assert "**One round: the noise is unknown" in shown and "| ❌ cuda_graph_mode: full" in shown
    assert out.with_suffix(".md").read_text() == shown and out.with_suffix(".svg").read_text().startswith("<?xml")


def test_a_cell_whose_engine_is_another_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.json"
    flags = ["--columns", "radix", "--input-len", "12", "--output-len", "6", "--concurrency", "2", "--tasks", "none"]
    real = ablate.run_cell

    def of_the_base(order: CellOrder, limit: float) -> Any:
        settings = {name: value for name, value in order.settings.items() if name != "radix_cache"}
        return real(msgspec.structs.replace(order, settings=settings), limit)

    monkeypatch.setattr(ablate, "run_cell", of_the_base)
    assert ablate.main([str(TINY), "--threads", "1", "--output-file", str(out), *flags]) == 1
    base, without = json.loads(out.read_text())["cells"]
    assert base["status"] == "done" and without["status"] == "failed"
    assert without["reason"] == "the engine ran radix_cache True, not False"


def test_a_cell_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    result = ablation_cell.run_cell(_order(TINY), 0.5)
    assert time.monotonic() - begin < 10
    assert (
        result["status"] == ablation_cell.TIMED_OUT
        and result["reason"] == "not done within 0.5 s"
        and result["batches"] == []
    )


def test_a_cell_that_cannot_be_served_says_so(tmp_path: Path) -> None:
    result = ablation_cell.run_cell(_order(tmp_path / "nowhere"), 60)
    assert result["status"] == ablation_cell.REFUSED and "nowhere" in result["reason"]


def test_a_cell_that_dies_keeps_its_partial_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is one that writes a part and dies."""
    dying = tmp_path / "dying.sh"
    part = '{"single": {"decode_tokens_per_s": 5.0}, "batches": [{"concurrency": 2}], "accuracy": []}'
    dying.write_text(f"#!/bin/sh\necho '{part}' > $3/result.json\necho 'RuntimeError: out of memory'\nexit 1\n")
    dying.chmod(0o700)
    monkeypatch.setattr(ablation_cell.sys, "executable", str(dying))
    result = ablation_cell.run_cell(_order(TINY), 60)
    assert (result["status"], result["reason"]) == ("failed", "exit status 1: RuntimeError: out of memory")
    assert result["single"] == {"decode_tokens_per_s": 5.0} and result["batches"] == [{"concurrency": 2}]
    (tmp_path / "said").write_text("loading\n\n")
    assert ablation_cell.failure(-9, tmp_path / "said") == "killed by SIGKILL: loading"


# ---- going on ----


def _fake(log: list[dict[str, Any]], stop_at: int = 99) -> Any:
    def run_cell(order: CellOrder, limit: float) -> dict[str, Any]:
        log.append({name: value for name, value in order.settings.items() if name not in ("model", "random_seed")})
        assert not order.accuracy or len(log) < 3, "later rounds need no answers"
        result = {"status": "done", "reason": "", "seconds": 1.0, "batches": [], "accuracy": []}
        result["single"] = {
            "decode_tokens_per_s": 10.0 * len(log), "input_len": 760, "output_len": 460, "cpu_seconds": 2.0
        }  # fmt: skip
        if len(log) == stop_at:
            return {**result, "status": "interrupted"}
        return result

    return run_cell


def test_ctrl_c_keeps_what_was_measured_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, log = tmp_path / "a.json", []
    words = [
        str(TINY),
        "--mode",
        "matrix",
        "--columns",
        "radix",
        "overlap",
        "--tasks",
        "none",
        "--output-file",
        str(out),
    ]
    monkeypatch.setattr(ablate, "run_cell", _fake(log, stop_at=3))
    assert ablate.main(words) == 130
    assert [cell["status"] for cell in json.loads(out.read_text())["cells"]] == ["done", "done", "interrupted"]
    again: list[dict[str, Any]] = []
    monkeypatch.setattr(ablate, "run_cell", _fake(again))
    assert ablate.main(words) == 0
    assert len(again) == 2 and [cell["status"] for cell in json.loads(out.read_text())["cells"]] == ["done"] * 4
    assert json.loads(out.read_text())["cells"][0]["single"]["decode_tokens_per_s"] == 10.0
    for other, why in (
        (["--output-len", "50"], "another workload"),
        (["--threads", "1"], "another base"),
        (["--mode", "one-at-a-time"], "has 1 cells that this ablation does not have"),
    ):
        assert ablate.main([*words, *other]) == 1
        assert why in capsys.readouterr().err
    assert len(json.loads(out.read_text())["cells"]) == 4, "results must not be lost"
    assert ablate.main([*words, "--output-len", "50", "--anew"]) == 0 and len(again) == 6


def test_a_load_that_cannot_be_and_a_table_without_numbers_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(TINY), "--columns", "radix", "--tasks", "none", "--output-file", str(tmp_path / "a.json")]
    log: list[dict[str, Any]] = []
    monkeypatch.setattr(ablate, "run_cell", _fake(log))
    assert ablate.main([*words, "--input-len", "4000", "--output-len", "1000"]) == 2 and log == []
    assert "up to 7500 tokens" in capsys.readouterr().err and not (tmp_path / "a.json").exists()
    assert ablate.main([*words, "--gsm8k", str(tmp_path / "none")]) == 1 and log == []
    assert "cannot read" in capsys.readouterr().err
    refused = {"status": ablation_cell.REFUSED, "reason": "no room", "seconds": 1.0, "batches": [], "accuracy": []}
    monkeypatch.setattr(ablate, "run_cell", lambda *_: dict(refused))
    assert ablate.main(words) == 1
    assert "- the base: not runnable: no room" in capsys.readouterr().out


def test_rounds_are_in_turn_and_each_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, log = tmp_path / "a.json", []
    words = [str(TINY), "--columns", "radix", "graph", "--tasks", "sums", "--output-file", str(out), "--rounds"]
    monkeypatch.setattr(ablate, "run_cell", _fake(log, stop_at=3))
    assert ablate.main([*words, "2"]) == 130
    assert ablate.main([*words, "2"]) == 0 and ablate.main([*words, "3"]) == 0
    off = [order.get("radix_cache", True) for order in log]
    assert off == [True, False, True, True, False, True, False], "base, off, base (interrupted), base, off, base, off"
    base, without, refused = json.loads(out.read_text())["cells"]
    assert [run["single"]["decode_tokens_per_s"] for run in base["again"]] == [40.0, 60.0]
    assert len(without["again"]) == 2 and "again" not in refused
    shown = out.with_suffix(".md").read_text()
    assert "Medians of 3 rounds (least – most)." in shown and "the noise is unknown" not in shown
    assert "| the base  | 40.0 (10.0 – 60.0) |" in shown and "| radix off | 50.0 (20.0 – 70.0) |" in shown
    assert [run["round"] for run in base["again"]] == [1, 2]


def test_results_of_another_commit_are_taken_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "a.json"
    words = [str(TINY), "--columns", "radix", "--tasks", "none", "--output-file", str(out), "--hf-token", "hush"]
    monkeypatch.setattr(ablate, "run_cell", _fake([]))
    assert ablate.main(words) == 0
    assert "hush" not in out.read_text()
    old = json.loads(out.read_text())
    for cell in old["cells"]:
        cell["commit"] = "0" * 40
    out.write_text(json.dumps(old))
    log: list[dict[str, Any]] = []
    monkeypatch.setattr(ablate, "run_cell", _fake(log))
    assert ablate.main([*words, "--any-commit"]) == 0 and log == []
    assert ablate.main(words) == 0 and len(log) == 2
    out.write_text("[1]")
    assert ablate.main(words) == 1


def test_sigterm_ends_the_cell_and_keeps_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    words = [
        str(TINY),
        "--columns",
        "radix",
        "--tasks",
        "none",
        "--input-len",
        "12",
        "--output-len",
        "6",
        "--output-file",
        str(out),
    ]
    code = "import sys; from thalweg.bench.ablate import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (children := _children(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command continues" in said
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)
    assert [cell["status"] for cell in json.loads(out.read_text())["cells"]] == ["interrupted"]


def test_ctrl_c_within_the_start_of_a_cell_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            pids.append(self.pid)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ablation_cell.subprocess, "Popen", Interrupted)
    assert ablation_cell.run_cell(_order(TINY), 60)["status"] == ablation_cell.INTERRUPTED
    assert pids and not Path(f"/proc/{pids[0]}").exists()


def _children(pid: int) -> list[int]:
    """Cells that it runs."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            if b"ablation_cell" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def test_levels_without_a_base_among_them() -> None:
    column = AblationColumn("kv", "kv_cache_dtype", (ColumnLevel("a", "a", "a"), ColumnLevel("b", "b", "b")), "float32")
    assert (
        column.wishes(column.levels[0]) == {"kv_cache_dtype": "a"} and column.wishes(ColumnLevel("x", ..., "x")) == {}
    )


@pytest.mark.parametrize("client", ["in-process", "http"])
def test_cpu_time_is_that_of_all_processes(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a key of the user's own does not keep the cell from flushing its server's cache."""
    monkeypatch.setenv("THALWEG_ADMIN_API_KEY", "the user's")
    with cell_engine(client, _order(TINY).settings | {"tp_size": 2, "context_length": 256}) as engine:
        assert isinstance(engine, InProcess | Served)
        parent = engine.server.pid if isinstance(engine, Served) else os.getpid()
        others = [usage(process).cpu for process in engine_processes(parent)]
        assert len(others) == (1 if client == "in-process" else 2) and min(others) > 0.5, "each loads torch"
        assert engine.cpu_seconds() >= usage(parent).cpu + sum(others) - 0.1
        engine.flush_cache()
        if isinstance(engine, InProcess):
            engine.llm.shutdown()
