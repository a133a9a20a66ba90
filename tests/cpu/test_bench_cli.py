"""`thalweg bench`: commands are found, and torch is loaded only where it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thalweg.bench import cli, results


def test_bench_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0 and cli.main([]) == 2
    shown = capsys.readouterr().out
    assert "  one-batch   " in shown and "  load   " in shown


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["srve"]) == 2
    assert "unknown command 'srve'" in capsys.readouterr().err


def test_a_command_gets_the_rest_of_the_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--base-url", "http://127.0.0.1:9", "--tokenizer", "x"]) == 1
    assert "cannot connect" in capsys.readouterr().err


def test_the_load_generator_runs_without_torch() -> None:
    code = "import sys, thalweg.bench.serve; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )


def test_results_say_where_they_come_from(tmp_path: Path) -> None:
    told = results.provenance("bench serve", ["--tag", "a b"], {"x": 1})
    assert told["command"] == "thalweg bench serve --tag 'a b'" and told["configuration"] == {"x": 1}
    device, versions = told["device"], told["versions"]
    assert isinstance(device, dict) and device["cores"] >= 1 and device["memory_gib"] > 0
    assert isinstance(versions, dict) and {"thalweg", "python", "tokenizers"} <= set(versions)
    lines, whole = tmp_path / "a" / "r.jsonl", tmp_path / "r.json"
    for n in (1, 2):
        results.write(lines, {"n": n})
        results.write(whole, {"n": n})
    assert [json.loads(line)["n"] for line in lines.read_text().splitlines()] == [1, 2]
    assert json.loads(whole.read_text()) == {"n": 2}


def test_a_result_that_cannot_be_written_is_not_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(results.ResultError, match="printed above"):
        results.write(tmp_path / "file" / "r.json", {"n": 7})
    assert json.loads(capsys.readouterr().out) == {"n": 7}
