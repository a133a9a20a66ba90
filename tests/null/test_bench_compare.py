"""`bench compare`: planted changes are found, noise is not, and different settings are named."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console

from thalweg.bench import compare
from thalweg.bench.result_files import Measurement, ResultFileError, load, points
from thalweg.bench.statistics import paired, share_ratio, student, welch


def test_students_t_quantiles() -> None:
    """Against the usual table."""
    known = {
        (0.95, 1): 12.706,
        (0.99, 1): 63.657,
        (0.95, 4): 2.776,
        (0.99, 9): 3.250,
        (0.95, 30): 2.042,
        (0.95, 10**6): 1.960,
    }
    assert {key: round(student(*key), 3) for key in known} == known


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """B is 10 % more than A; of 300 experiments the 95 % interval misses it in about 15."""
    rng = Random(3)

    def draw(middle: float, count: int) -> list[float]:
        return [middle * (1 + 0.05 * rng.gauss(0, 1)) for _ in range(count)]

    missed = {"welch": 0, "paired": 0}
    for _ in range(300):
        a, b = draw(10.0, 5), draw(11.0, 5)
        for name, found in (("welch", welch(a, b, 0.95)), ("paired", paired(a, b, 0.95))):
            assert found.low is not None and found.high is not None
            missed[name] += not found.low <= 1.1 <= found.high
    assert all(3 <= count <= 30 for count in missed.values()), missed


def test_pairs_take_out_what_differs_between_repeats() -> None:
    a = [10.0, 20.0, 40.0, 15.0]
    b = [value * (1.05 + 0.001 * i) for i, value in enumerate(a)]
    one, other = paired(a, b, 0.99), welch(a, b, 0.99)
    assert one.low is not None and one.high is not None and other.low is not None and other.high is not None
    assert 1.04 < one.low < one.value < one.high < 1.07 and other.low < 0.7 and other.high > 1.5
    assert welch([5.0, 5.0], [5.0, 5.0], 0.99).low == 1.0


def test_shares_have_the_interval_of_their_ratio() -> None:
    worse, same = share_ratio((990, 1000), (960, 1000), 0.99), share_ratio((990, 1000), (988, 1000), 0.99)
    assert worse.high is not None and same.high is not None and worse.high < 1 < same.high


@pytest.mark.parametrize(
    ("low", "high", "higher", "said"),
    [(1.05, 1.2, True, "better"), (1.05, 1.2, False, "worse"), (0.7, 0.9, True, "worse"), (0.995, 1.004, True, "same"),
     (0.9, 1.2, True, "unclear"), (1.001, 1.008, True, "same"), (None, None, True, "unknown")],
)  # fmt: skip
def test_verdicts(low: float | None, high: float | None, higher: bool, said: str) -> None:
    value = 2.0 if low is None or high is None else (low + high) / 2
    assert compare.verdict(compare.Ratio(value, low, high), higher, 0.01) == said


def serving(ttft: float, throughput: float, repeats: int, seed: int, **settings: object) -> dict[str, Any]:
    rng, rows = Random(seed), []
    for repeat in range(repeats):
        noise = [1 + 0.01 * rng.gauss(0, 1) for _ in range(9)]
        row: dict[str, Any] = {"request_rate": "8.0", "max_concurrency": None, "repeat": repeat}
        row |= {
            "output_throughput": throughput * noise[0],
            "tokens_by_second": [throughput * (1 + 0.02 * rng.gauss(0, 1)) for _ in range(20)],
        }
        row |= {
            f"{of}_ttft_ms": ttft * scale * noise[i]
            for i, (of, scale) in enumerate((("mean", 1.1), ("median", 1.0), ("p99", 3.0)))
        }
        row["samples"] = {"ttft_ms": [ttft * rng.lognormvariate(0, 0.3) for _ in range(200)]}
        rows.append(row)
    configuration = {
        "client": {"seed": 1, "output_file": f"{seed}.json"} | settings,
        "server": {"uptime_seconds": seed},
    }
    told = {
        "command": "thalweg bench serve",
        "commit": "abc",
        "device": {"cores": 2},
        "versions": {"torch": "2.13"},
        "partial": False,
    }
    return {"points": rows, "configuration": configuration, **told}


def verdicts(a: dict[str, Any], b: dict[str, Any]) -> dict[str, str]:
    found, _, _ = compare.compare([a], [b], 0.99, 0.01)
    return {one.name: one.verdict for one in found}


def test_repeats_find_a_planted_change_and_nothing_else() -> None:
    same = verdicts(serving(20.0, 1000.0, 6, 1), serving(20.0, 1000.0, 6, 2))
    assert not set(same.values()) & {"better", "worse"}
    changed = verdicts(serving(20.0, 1000.0, 6, 1), serving(24.0, 1100.0, 6, 2))
    assert changed == {"output_throughput": "better", "mean_ttft": "worse", "median_ttft": "worse", "p99_ttft": "worse"}


def test_one_run_each_gives_no_verdict() -> None:
    a, b = serving(20.0, 1000.0, 1, 1), serving(40.0, 1000.0, 1, 2)
    found, differing, warnings = compare.compare([a], [b], 0.99, 0.01)
    assert {one.verdict for one in found} == {"unknown"} and differing == []
    told = compare.words(found, differing, warnings)
    assert told[0].startswith("the noise is unknown") and "--repeat 5" in told[0]


def test_a_single_run_never_fails_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, ttft in zip(paths, (20.0, 60.0), strict=True):
        path.write_text(json.dumps(serving(ttft, 1000.0, 1, 1)))
    assert compare.main([*map(str, paths), "--fail-on-worse"]) == 0
    shown = capsys.readouterr().out
    assert "the noise is unknown" in shown and "worse at" not in shown


def test_files_of_one_side_are_repeats_of_one() -> None:
    one, other, seed = serving(20.0, 1000.0, 1, 1), serving(20.0, 1000.0, 1, 2, chunked="off"), serving(9.0, 9.0, 1, 3)
    seed["configuration"]["client"]["seed"] = 7
    _, _, warnings = compare.compare([one, other], [one], 0.99, 0.01)
    assert warnings == ["the files of A are not repeats of one run: client.chunked is missing and off"]
    assert compare.compare([one, seed], [one], 0.99, 0.01)[2] == []
    row = {"operation": "rope", "case": "small", "backend": "triton", "us": 3.0, "failed": ""}
    kernels = {"command": "thalweg bench kernels", "rows": [row]}
    for sides in (([one, kernels], [one]), ([one, kernels], [one, kernels]), ([one], [one, kernels])):
        with pytest.raises(ResultFileError, match="nothing to compare"):
            compare.compare(*sides, 0.99, 0.01)


@pytest.mark.parametrize(
    ("command", "rest"),
    [("bench offline", {"points": [{"x": 1}]}), ("bench one-batch", {"results": ["a"]}),
     ("bench serve", {"points": ["a"]}), ("bench startup", {"starts": [{}]}),
     ("bench kernels", {"rows": [{"us": 3}]}), ("eval", {"results": [7]}),
     ("bench startup", {"starts": [{"start": "warm", "ready_seconds": "a"}]})],
)  # fmt: skip
def test_json_of_another_shape_is_an_error_that_names_the_file(
    command: str, rest: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"command": f"thalweg {command}", **rest}))
    assert compare.main([str(path), str(path)]) == 1
    said = capsys.readouterr().err
    assert f"odd.json: incomplete result of `{command}`" in said


def test_the_table_keeps_its_lines_in_a_narrow_terminal() -> None:
    a, b = serving(20.0, 1000.0, 5, 1), serving(26.0, 1000.0, 5, 2)
    found, _, _ = compare.compare([a], [b], 0.99, 0.01)
    console = Console(width=100, record=True, file=StringIO())
    console.print(compare.table(found, ("before.json", "after.json")))
    lines = console.export_text().splitlines()
    assert [line for line in lines if "output_throughput" in line and "%" in line and "tok/s" in line]
    assert len(lines) <= len(found) + 6, "title, frame, heading and the point's name"
    row = {"operation": "rope " * 20, "case": "small", "backend": "triton", "us": 1234.5, "failed": ""}
    result = {"command": "thalweg bench kernels", "rows": [row]}
    console.print(compare.table(compare.compare([result], [result], 0.99, 0.01)[0], ("a.json", "b.json")))
    shown = console.export_text()
    assert "1234 us" in shown and "+0.0 %" in shown and "unknown" in shown, "a long name does not crowd out the numbers"


def test_runs_of_a_batch_are_repeats() -> None:
    rng = Random(4)

    def one_batch(ms: float) -> dict[str, Any]:
        seconds = [ms / 1e3 * (1 + 0.01 * rng.gauss(0, 1)) for _ in range(3)]
        runs = [{"prefill_latency": 0.1, "median_decode_latency": each, "total_latency": 1.0} for each in seconds]
        row = {"batch_size": 1, "input_len": 8, "output_len": 61, "runs": runs, **runs[0]}
        return {"command": "thalweg bench one-batch", "results": [row]}

    found = {one.name: one for one in compare.compare([one_batch(3.3)], [one_batch(3.0)], 0.99, 0.01)[0]}
    assert found["median_decode_latency"].verdict == "better"


def test_files_settings_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (
        serving(20.0, 1000.0, 5, 1),
        serving(26.0, 1000.0, 5, 2, chunked="off") | {"commit": "def", "partial": True, "ended": "Ctrl-C"},
    )
    for name, result in (("a", a), ("b", b)):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    out = tmp_path / "c.json"
    assert compare.main([*paths, "--fail-on-worse", "--output-file", str(out)]) == 3 and compare.main(paths) == 0
    shown = capsys.readouterr().out
    assert "worse at rate 8.0, concurrency any: mean_ttft +3" in shown and "B is partial: Ctrl-C" in shown
    assert "differs: commit: abc → def" in shown and "differs: client.chunked: missing → off" in shown
    assert "output_file" not in shown.split("differs", 1)[1] and "uptime" not in shown
    written = json.loads(out.read_text())
    assert written["command"].startswith("thalweg bench compare") and {
        one["verdict"] for one in written["changes"]
    } >= {"worse"}
    (tmp_path / "lines.jsonl").write_text(json.dumps(a) + "\n{\n")
    (tmp_path / "other.json").write_text(
        json.dumps({"command": "thalweg eval", "results": [{"task": "sums", "hits": 1, "total": 2}]})
    )
    for bad, said in (
        ("nothing.json", "cannot read"),
        ("lines.jsonl", "line 2: not JSON"),
        ("other.json", "nothing to compare"),
    ):
        assert compare.main([paths[0], str(tmp_path / bad)]) == 1
        assert said in capsys.readouterr().err


def test_every_command_has_a_reading(tmp_path: Path) -> None:
    root = Path(__file__).parents[2] / "benchmarks"
    assert points(load(root / "cpu/serve_64.json"))["rate inf, concurrency 64"]["median_ttft"].unit == "ms"
    batches = points(load(root / "cpu/one_batch.json"))
    raw = json.loads((root / "cpu/one_batch.json").read_text())["results"][-1]
    assert batches["batch 32, 128 in, 128 out"]["median_decode_latency"].values == pytest.approx(
        [1e3 * run["median_decode_latency"] for run in raw["runs"]]
    )
    tools = next(
        task for task in json.loads((root / "cpu/eval_tiny.json").read_text())["results"] if task["task"] == "tools"
    )
    share = points(load(root / "cpu/eval_tiny.json"))["tools"]["share"]
    assert share.hits == (tools["hits"], tools["total"]) and tools["total"] >= 100
    phases = [{"name": "weights", "seconds": 1.0}]
    start = {"start": "warm", "ready_seconds": 5.0, "first_token_seconds": 5.5, "cpu_seconds": 4.0, "phases": phases}
    found = points([{"command": "thalweg bench startup", "starts": [start, start]}])["warm start"]
    assert found["phase: weights"].values == [1.0, 1.0] and found["ready_seconds"].values == [5.0, 5.0]
    row = {"operation": "rope", "case": "small", "backend": "triton", "us": 3.0, "failed": ""}
    assert points([{"command": "thalweg bench kernels", "rows": [row, row | {"failed": "x", "case": "y"}]}]) == {
        "rope, small, triton": {"us": Measurement("us", False, [3.0])}
    }
    cells = points(load(root / "cpu/ablation_tiny.json"))
    hits = cells["the base"]["sums"].hits
    assert len(cells["mla off"]["one request"].values) >= 3 and hits is not None and hits[0] == hits[1] >= 10
    assert "one request, a CPU second" in cells["radix off"] and "graph on" not in cells
    with pytest.raises(ResultFileError, match="bench load"):
        points([{"command": "thalweg bench load"}])
