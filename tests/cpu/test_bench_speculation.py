"""The benchmarks of speculation: speed by shape, batch and context, what is neither forward, and acceptance by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compose.matrix import MODEL
from tests.cpu.test_speculation import unrecorded
from thalweg.bench import acceptance, forwards, one_batch, speculation
from thalweg.core.errors import CannotServe
from thalweg.runner.runner import NoGraphs
from tools.release import tables

assert unrecorded  # a fixture of this module, too


def test_speed_by_shape_batch_and_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    words = f"--model {MODEL} --batch-size 2 --input-len 20 30 --output-len 8 --widths 0 2 -1 --trees 2x2x4 --overhead"
    rows = speculation.run([*words.split(), "--max-running-requests", "2", "--result-filename", str(file)])
    cases = [(20, 2), (30, 2)]
    shapes = [("chain", 0), ("chain", 2), ("chain", -1), ("2x2x4", 4)]
    assert [(row["shape"], row["width"], row["input_len"], row["batch_size"]) for row in rows] == [
        (*shape, *case) for of in (shapes[:3], shapes[3:]) for case in cases for shape in of
    ]
    assert rows[0]["accept_length"] == 1.0 and rows[0]["steps"] == 7 and rows[0]["draft_seconds"] < 1e-4
    for row in rows:
        parts = [row[name] for name in ("verify_seconds", "draft_seconds", "overhead_seconds")]
        assert all(isinstance(part, float) and part >= 0 for part in parts), row
    assert all(row["draft_seconds"] for row in rows if row["width"] in (2, 4)), "the drafter's forward was watched"
    written = json.loads(file.read_text())
    assert len(written["speculation"]) == len(rows) and written["command"]
    shown = capsys.readouterr().out
    assert "adaptive" in shown and "2x2x4" in shown


def test_an_imposed_acceptance() -> None:
    words = f"--model {MODEL} --batch-size 1 --input-len 20 --output-len 12 --widths 2 --accept-length 2"
    (row,) = speculation.run(words.split())
    assert isinstance(row["accept_length"], float) and 1.8 < row["accept_length"] < 2.0, (
        "the last one is cut at the end"
    )
    assert row["steps"] == 6
    with pytest.raises(CannotServe, match="NONE"):
        speculation.run([*words.split(), "--speculative-algorithm", "NONE"])
    with pytest.raises(CannotServe, match="at least 1 token"):
        speculation.run(["--model", MODEL, "--accept-length", "0.5"])


def test_what_is_no_tree_is_told() -> None:
    for wrong in ("4", "1x3x3", "4x3"):
        with pytest.raises(CannotServe, match="BRANCHESxDEPTHxNODES"):
            speculation.run(["--model", MODEL, "--trees", wrong])


def test_watches_are_taken_off_again() -> None:
    """What a forward takes is its own; behind the measurement everything is as it was."""

    class Worker:
        graphs = groves = NoGraphs()

        def forward(self) -> int:
            return 7

    engine: Any = type("Engine", (), {})()
    engine.runner = Worker()
    engine.runner.drafting = type("Drafting", (), {"drafter": None})
    settings: Any = type("Settings", (), {"device": "cpu", "threads": 1})
    watch = forwards.Forwards(settings)
    with watch.timed(engine):
        assert engine.runner.forward() == 7
    assert watch.seconds[forwards.VERIFY] > 0 and "forward" not in vars(engine.runner)


def test_acceptance_by_task_and_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "result.json"
    words = f"--model {MODEL} --tasks dialogue --items 2 --widths 1 2 --temperature 0 1 --rules race standard"
    assert acceptance.main([*words.split(), "--result-filename", str(file)]) == 0
    rows = json.loads(file.read_text())["acceptance"]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert ("same_tokens" in row) == (row["rule"] == "race" or row["temperature"] == 0)
        assert row.get("same_tokens", row["tokens"]) == row["tokens"] and not row.get("wrong_answers")
        assert sum(row["accepted_by_depth"]) == pytest.approx(row["verifications"] * (row["accept_length"] - 1))
        assert len(row["accept_rate_by_depth"]) == row["width"]
    assert "as plain" in capsys.readouterr().out


def test_tokens_that_are_not_plain_decodings_fail_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert acceptance.same([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == (2, 1)
    assert acceptance.same([[1, 2]], [[1, 2, 3]]) == (2, 1) and acceptance.same([[]], [[]]) == (0, 0)
    monkeypatch.setattr(acceptance, "run", lambda argv: [{"wrong_answers": 0}, {"wrong_answers": 1}])
    assert acceptance.main([]) == 1
    monkeypatch.setattr(acceptance, "run", lambda argv: [{"wrong_answers": 0}])
    assert acceptance.main([]) == 0


def test_what_was_measured_before_ctrl_c_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, real = tmp_path / "result.json", acceptance.count

    def interrupted(engine: Any, questions: Any, *rest: Any) -> Any:
        if file.with_suffix(".seen").exists():
            raise KeyboardInterrupt
        file.with_suffix(".seen").touch()
        return real(engine, questions, *rest)

    monkeypatch.setattr(acceptance, "count", interrupted)
    words = f"--model {MODEL} --tasks dialogue --items 1 --widths 1 2 --result-filename {file}"
    assert acceptance.main(words.split()) == 130
    result = json.loads(file.read_text())
    assert result["partial"] and [row["width"] for row in result["acceptance"]] == [1]


def test_tables_of_the_docs() -> None:
    one = {"task": "sums", "rule": "race", "temperature": 0.0, "top_p": 1.0, "shape": "chain", "tokens": 1234}
    found = {"accept_length": 1.5, "accept_rate_by_depth": [0.5], "same_tokens": 1234, "wrong_answers": 0}
    lines = tables.acceptance({"acceptance": [{**one, "width": 1, **found}, {**one, "width": 2, **found}]})
    assert lines[2] == "| sums | 1,234 | 1.50 (0.500) | 1.50 (0.500) | all |"
    wrong = found | {"same_tokens": 1230, "wrong_answers": 2}
    for rows in ([wrong, found], [found, wrong]):
        both = [{**one, "width": 1 + i, **row} for i, row in enumerate(rows)]
        assert tables.acceptance({"acceptance": both})[2].endswith("| **2 answers differ** |")
    row = {
        "shape": "chain",
        "width": 0,
        "batch_size": 1,
        "input_len": 60,
        "decode_throughput": 500.4,
        "accept_length": 1.0,
    }
    times = {"verify_seconds": 1e-3, "draft_seconds": 0.0, "overhead_seconds": 2e-4}
    lines = tables.speculation({"speculation": [row, row | {"shape": "2x2x4", "width": 4} | times]})
    assert lines[2] == "| 60 | 1 | 500 (1.00) | 500 (1.00) |" and lines[-1] == "| tree 2x2x4 | 60 | 1,000 | 0 | 200 |"


def test_one_batch_tells_what_was_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    words = f"--model {MODEL} --input-len 30 --output-len 25 --mtp 3 --no-speculative-adaptive --result-filename {file}"
    assert one_batch.main(words.split()) == 0
    (row,) = json.loads(file.read_text())["results"]
    steps = len(row["decode_latencies"])
    assert row["accept_length"] > 1 and 0 < row["accept_rate"] <= 1 and steps < 24
    assert row["median_decode_throughput"] == pytest.approx(24 / steps / row["median_decode_latency"])
    assert f"Accept length: {row['accept_length']:.2f}" in capsys.readouterr().out
