"""benchmarks/gpu/peers.py: two servers of models/tiny as engines, its cells, its turns and its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from thalweg.bench import serve
from thalweg.bench.datasets import LengthRange
from thalweg.bench.errors import BenchError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks/gpu/peers.py"
BASE, SERIAL = "base=X={a} thalweg --threads 1", "serial=thalweg --no-overlap-schedule"
BROKEN = "broken=exit {port}"


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPT.parent))
    import peers

    yield peers
    sys.path.remove(str(SCRIPT.parent))


def command_lines() -> Iterator[str]:
    """Those of all processes."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield file.read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue


def test_engines_are_measured_on_the_same_cells_once(tmp_path: Path) -> None:
    out, page = tmp_path / "peers.jsonl", tmp_path / "peers.md"

    def peers(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, str(SCRIPT), "models/tiny", "--cells", "2:24/8", "2:24/8:staggered"]
        line += ["--machine", "h200", "--out", str(out), "--table", str(page), "--engine", BASE, SERIAL, BROKEN, *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    first = peers()
    assert first.returncode == 1 and "2 of 6 cells are missing" in first.stdout, first.stderr
    assert "broken did not get ready: exit " in first.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["engine"] for line in lines] == ["base", "base", "serial", "serial"]
    results = [line["result"] for line in lines]
    assert all(result["completed"] == 6 and 0 < result["share_of_floor"] < 1 for result in results)
    tokens = [(result["total_input_tokens"], result["total_output_tokens"]) for result in results]
    assert tokens[0] == (6 * 24, 6 * 8) != tokens[1] and tokens[:2] == tokens[2:]
    servers = [line["server"]["command"] for line in lines]
    assert all("--no-radix-cache" in server and "--context-length 64" in server for server in servers)
    assert ["--no-overlap-schedule" in server for server in servers] == [False, False, True, True]
    ports = {line["server"]["url"].rpartition(":")[2] for line in lines}
    assert len(ports) == 2 and not any(port in line for port in ports for line in command_lines()), "servers go on"
    shown = page.read_text()
    assert shown.count("| **") == 2 and shown.count("2 at a time") == 4 and "share of floor" in shown
    again = peers("--engines", "serial", "base")
    assert again.returncode == 0 and "0 of 4 cells are missing" in again.stdout and "ready" not in again.stdout
    assert len(out.read_text().splitlines()) == 4


def test_every_cell_is_a_load_of_bench_serve(peers: ModuleType) -> None:
    names = ("table", "staggered", "long", "grid", "qps", "traces", "outputs32k")
    sets = {name: peers.cells_of([name], ["a.jsonl", "b.tar.gz"]) for name in names}
    assert [len(cells) for cells in sets.values()] == [10, 10, 10, 14, 8, 10, 1]
    for cell in (cell for cells in sets.values() for cell in cells):
        args = serve.parse(cell.flags(10.0))
        assert args.stagger == (cell.arrivals == "staggered") and args.num_prompts >= cell.concurrency
        assert cell.trace or args.random_input_len + args.random_output_len == sum(cell.longest)
    (closed,) = peers.cells_of(["32:1024/256:staggered"], [])
    args = serve.parse(closed.flags(0.0))
    assert (args.max_concurrency, args.num_prompts, args.warmup_requests) == ([32], 96, 32)
    lengths = LengthRange(args.random_input_len, args.random_range_ratio)
    assert (int(lengths.most * lengths.ratio), lengths.most) == (512, 1536), "1,024 +- 50 %"
    rates = [serve.parse(cell.flags(10.0)).request_rate[0] for cell in sets["traces"]]
    assert rates == [float("inf")] * 2 + [5.0, 8.0, 10.0, 12.0] * 2
    assert serve.parse(sets["outputs32k"][0].flags(0.0)).num_prompts == 32
    (short,) = peers.cells_of(["32:1024/256:lockstep:64"], [])
    args = serve.parse(short.flags(0.0))
    assert (args.max_concurrency, args.num_prompts, args.warmup_requests) == ([32], 64, 1)
    shorter = {word: peers.cells_of([word], ["a"]) for word in ("qps:8", "grid:32", "traces:60")}
    assert [cell.requests for cell in shorter["qps:8"]] == [8, 16, 40, 80, 160, 240, 320, 400]
    assert {cell.requests for cell in shorter["grid:32"]} == {32} and len(shorter["grid:32"]) == 14
    assert {(cell.requests, cell.warm) for cell in shorter["traces:60"]} == {(60, 1)}
    assert shorter["qps:8"][3].name[1] == "10 requests/s for 8 s", "another load than the whole one"
    for word in ("8x16", "grid:0", "grid:\n", "8:16/8:lockstep:x"):
        with pytest.raises(BenchError, match="there is table"):
            peers.cells_of([word], [])


@pytest.fixture
def calls(peers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Servers that started and cells that were measured, in this order, without either."""
    made = list[str]()

    @contextmanager
    def launched(name: str, *_: Any) -> Iterator[str]:
        made.append(name)
        yield name

    def until_ready(names: list[str], _: Any) -> Iterator[tuple[str, Any]]:
        return ((name, peers.Server("", "", "", 1.0)) for name in names)

    def measure(server: Any, cell: Any, *_: Any) -> dict[str, Any]:
        made.append(str(cell.concurrency))
        return {"cell": vars(cell), "wall_seconds": 1.0, "result": {}}

    monkeypatch.setattr(peers, "launched", launched)
    monkeypatch.setattr(peers, "until_ready", until_ready)
    monkeypatch.setattr(peers, "measure", measure)
    return made


def arguments(out: Path, **others: Any) -> Namespace:
    common = {"checkpoint": ROOT / "models/tiny", "engines": [], "engine": ["a=x {port}", "b=y {port}"], "trace": []}
    common |= {"cells": ["1:8/8", "2:8/8"], "rounds": 2, "interleave": False, "together": False, "out": out}
    common |= {"keep_cache": False}
    return Namespace(**common | {"deadline": time.monotonic() + 99.0} | others)


def test_rounds_of_an_engine_share_a_server_unless_interleaved(
    peers: ModuleType, calls: list[str], tmp_path: Path
) -> None:
    assert peers.run(arguments(tmp_path / "1.jsonl")) == 0
    assert calls == ["a", "1", "2", "1", "2", "b", "1", "2", "1", "2"]
    calls.clear()
    assert peers.run(arguments(tmp_path / "2.jsonl", interleave=True)) == 0
    assert calls == ["a", "1", "2", "b", "1", "2"] * 2
    calls.clear()
    changed = arguments(tmp_path / "2.jsonl", engine=["a=x {port}", "b=y --more {port}"], rounds=1)
    assert peers.run(changed) == 0 and calls == ["b", "1", "2"], "of another command line"
    calls.clear()
    late = arguments(tmp_path / "2.jsonl", cells=["3:8/8"], deadline=time.monotonic() + 0.5)
    assert peers.run(late) == 4 and not calls, "a start took a second"
    assert peers.run(arguments(tmp_path / "3.jsonl", together=True)) == 0
    assert calls == ["a", "b", *"1111", *"2222"], "both servers start first, and each cell has them in turn"
    calls.clear()
    traced: dict[str, Any] = {"cells": ["1:8/8", "traces:5"], "trace": ["t"], "rounds": 1}
    assert peers.run(arguments(tmp_path / "4.jsonl", together=True, **traced)) == 0
    assert calls == ["a", "b", "1", "1", "a", "b", "256", "256", *"0" * 8], "traces find prefixes"
    calls.clear()
    assert peers.run(arguments(tmp_path / "5.jsonl", together=True, keep_cache=True, **traced)) == 0
    assert calls == ["a", "b", "1", "1", "256", "256", *"0" * 8]
    turns = [(line["round"], line["engine"]) for line in peers.read(tmp_path / "3.jsonl")]
    assert turns == [(0, "a"), (0, "b"), (1, "a"), (1, "b")] * 2


def test_variants_of_an_engine_have_its_command_and_their_own_words(peers: ModuleType) -> None:
    words = ["s=A=1 B=x sglang --draft 3", 'v=vllm --config {"a": 1}', "own=python serve.py {model} {port}"]
    engines = peers.engines_of(Namespace(engine=words, engines=["v", "thalweg", "own", "s"]))
    assert list(engines) == ["v", "thalweg", "own", "s"]
    known = peers.ENGINES
    assert engines["s"].command == f"env A=1 B=x {known['sglang'].command} --draft 3" and engines["s"].is_foreign
    assert engines["v"].command == f'{known["vllm"].command} --config {{"a": 1}}'
    assert engines["own"].command == "python serve.py {model} {port}" and engines["own"].health == "/health"
    with pytest.raises(BenchError, match="--engines w: there is thalweg, vllm, sglang, v, own, s"):
        peers.engines_of(Namespace(engine=[words[1], words[2], words[0]], engines=["w"]))


def test_a_cell_that_needs_more_time_than_is_left_is_left_out(peers: ModuleType, capsys: Any) -> None:
    (cell,) = peers.cells_of(["8:16/8"], [])
    same = [
        {"load": "8 at a time", "wall_seconds": 40.0, "cell": {"concurrency": 8}, "result": {"request_throughput": 1.0}}
    ]
    soon = Namespace(deadline=time.monotonic() + 30, checkpoint=ROOT, machine="")
    assert peers.measure(peers.Server("http://127.0.0.1:9", "", "", 0.0), cell, 0, same, soon) is None
    assert "left out, 30 of 40 s left" in capsys.readouterr().out


def test_rates_of_a_trace_are_shares_of_the_first_engines_capacity(
    peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Namespace]()

    async def run(args: Namespace, words: list[str]) -> dict[str, Any]:
        asked.append(args)
        numbers = {"output_throughput": 1.0, "p99_itl_ms": 1.0, "failures": {}, "ended": "", "samples": {}}
        return numbers | {"failed": 0, "partial": False, "interrupted": False}

    monkeypatch.setattr(peers.serve, "run", run)
    capacity, *shares = peers.cells_of(["traces"], ["a.jsonl"])
    server, late = (
        peers.Server("", "", "", 0.0),
        Namespace(deadline=time.monotonic() + 99, checkpoint=ROOT, machine=""),
    )
    assert peers.measure(server, shares[1], 0, [], late) is None and not asked, "no capacity is known"
    line = peers.measure(server, capacity, 0, [], late) | {"load": capacity.name[1]}
    assert "samples" not in line["result"] and line["cell"]["trace"] == "a.jsonl"
    line["result"]["request_throughput"] = 10.0
    assert peers.measure(server, shares[1], 0, [line], late) and peers.measure(server, shares[1], 1, [line], late)
    assert [args.request_rate for args in asked] == [[float("inf")], [8.0], [8.0]]
    assert len({args.seed for args in asked}) == 3, "a prefix cache has none of the prompts"


def test_the_best_engine_of_a_load_is_bold(peers: ModuleType) -> None:
    def line(engine: str, load: str, **result: float) -> dict[str, Any]:
        return {"engine": engine, "load": load, "result": result}

    lines = [line("a", "8", output_throughput=rate) for rate in (9.0, 1.0, 2.0)]
    lines += [line("b", "8", output_throughput=3.0), line("a", "0.8", output_throughput=5.0, goodput=1.0)]
    lines += [line("b", "0.8", output_throughput=4.0, goodput=2.0)]
    rows = [(row["load"], row["engine"], row["output_throughput"], row["rounds"]) for row in peers.rows_of(lines)]
    assert rows == [("8", "a", 2.0, 3), ("8", "**b**", 3.0, None), ("0.8", "a", 5.0, None), ("0.8", "**b**", 4.0, None)]
