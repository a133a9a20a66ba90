"""`bench offline` and `bench startup` with the bundled model: whole runs, interrupted runs, failed starts."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from thalweg.bench import offline, startup, structured
from thalweg.bench.startup import phases_of
from thalweg.models import traced

MODEL = str(Path(__file__).parents[2] / "models/tiny")
SMALL = ["--threads", "1", "--random-input-len", "24", "--random-output-len", "12", "--random-range-ratio", "1"]


def test_offline_counts_every_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    flags = [MODEL, *SMALL, "--num-prompts", "5", "--repeat", "2", "--result-filename", str(out)]
    assert offline.main(flags) == 0
    result = json.loads(out.read_text())
    for row in result["points"]:
        assert (row["successful_requests"], row["total_input_tokens"], row["total_output_tokens"]) == (5, 120, 60)
        assert sum(row["tokens_by_second"]) == 60 and row["cpu_seconds"] > 0 and row["total_cached_tokens"] == 0
        assert row["output_throughput"] == pytest.approx(60 / row["total_latency"])
    assert [row["repeat"] for row in result["points"]] == [0, 1] and result["partial"] is False
    assert result["configuration"]["engine"]["threads"] == 1 and "decisions" in result["configuration"]
    shown = capsys.readouterr().out
    assert shown.count("Offline Throughput Benchmark Result") == 2 and "Last generation throughput (tok/s):" in shown


def test_offline_with_drafts_and_simulated_acceptance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced, "ROWS", 0)  # most of a start is recording
    out = tmp_path / "r.json"
    flags = ["--speculative-algorithm", "NEXTN", "--no-speculative-adaptive", "--num-prompts", "3", "--skip-warmup"]
    flags += ["--speculative-simulate-accept-length", "2", "--output-file", str(out)]
    assert offline.main([MODEL, *SMALL, *flags]) == 0
    result = json.loads(out.read_text())
    (row,) = result["points"]
    assert row["total_output_tokens"] == 36 and row["accept_length"] == pytest.approx(2.0, abs=0.2)
    assert result["configuration"]["engine"]["speculative_simulate_accept_length"] == 2.0
    assert "Accept length:" in capsys.readouterr().out


def test_offline_keeps_what_was_computed(tmp_path: Path) -> None:
    out = tmp_path / "r.json"

    def press() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = offline.measure

    def pressed(*args: object) -> None:
        threading.Timer(0.3, press).start()
        before(*args)  # type: ignore[arg-type]

    flags = [MODEL, "--threads", "1", "--num-prompts", "4", "--random-output-len", "3000", "--random-range-ratio", "1"]
    offline_measure = pytest.MonkeyPatch()
    offline_measure.setattr(offline, "measure", pressed)
    try:
        status = offline.main(
            [*flags, "--random-input-len", "8", "--skip-warmup", "--repeat", "3", "--result-filename", str(out)]
        )
    finally:
        offline_measure.undo()
    (row,) = json.loads(out.read_text())["points"]
    assert status == 130 and row["successful_requests"] == 0 and 0 < row["total_output_tokens"] < 12000
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--dataset-name", "trace"], 2, "needs --dataset-path"),
        (["--dataset-name", "conversations"], 1, "bench serve"),
        (["--num-promts", "3"], 2, "did you mean --num-prompts"),
    ],
)
def test_offline_refuses(flags: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--threads", "1", "--max-running-requests", "2"]
    assert offline.main([MODEL, *small, *flags]) == status
    assert words in capsys.readouterr().err


def test_the_phases_of_a_start_add_up() -> None:
    told = "started: model 0.2 s, weights 1.5 s, recorded steps 2.2 s; 3.9 s in all"
    phases = phases_of({"resolved": 2.0, "started": 7.0, "ready": 7.25}, told, 7.5)
    assert list(phases.items())[2:5] == [("model", 0.2), ("weights", 1.5), ("recorded steps", 2.2)]
    assert sum(phases.values()) == pytest.approx(7.5)
    assert phases["engine process"] == pytest.approx(1.1) and phases["first token"] == 0.25


def test_a_start_is_measured_and_one_that_fails_keeps_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    assert (
        startup.main(["--model", MODEL, "--threads", "1", "--cold", "0", "--warm", "1", "--output-file", str(out)]) == 0
    )
    result = json.loads(out.read_text())
    (start,) = result["starts"]
    assert (
        start["start"] == "warm"
        and 0 < start["ready_seconds"] < start["first_token_seconds"]
        and start["cpu_seconds"] > 1
    )
    names = [phase["name"] for phase in start["phases"]]
    assert (
        names[:2] == ["imports, settings", "engine process"]
        and "weights" in names
        and names[-2:] == ["serving", "first token"]
    )
    assert sum(phase["seconds"] for phase in start["phases"]) == pytest.approx(start["first_token_seconds"], abs=0.11)
    assert result["configuration"]["server"]["resolved"]["architecture"] == "DeepseekV32ForCausalLM"
    assert (
        startup.main(
            [
                "--model",
                MODEL,
                "--cold",
                "0",
                "--warm",
                "1",
                "--no-such-flag",
                "--output-file",
                str(tmp_path / "n.json"),
            ]
        )
        == 1
    )
    assert "unknown flag --no-such-flag" in capsys.readouterr().err and not (tmp_path / "n.json").exists()
    assert startup.main(["--model", str(tmp_path)]) == 1 and "no config.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        startup.main(["--model", MODEL, "--cold", "0", "--warm", "0"])
    assert left.value.code == 2 and "nothing to start" in capsys.readouterr().err


def test_what_grammars_cost_keeps_the_rounds_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = iter([9.0, 9.0, 0.01, 0.0125, 0.02, 0.025, 9.0, 9.0])  # warm-ups, two rounds; warm-ups, none

    def step_seconds(*_: object) -> float:
        if (one := next(seconds, None)) is None:
            raise KeyboardInterrupt
        return one

    monkeypatch.setattr(structured, "step_seconds", step_seconds)
    monkeypatch.setattr(structured, "LocalEngine", lambda settings: None)
    out = tmp_path / "s.json"
    words = ["--model", MODEL, "--rounds", "2", "--batch", "3", "--output", str(out)]
    assert structured.main(words) == 130
    saved = json.loads(out.read_text())
    (row,) = saved["results"]
    assert (row["overlap"], row["rounds"], row["batch"]) == (False, 2, 3) and row["kept"] == pytest.approx(0.8)
    assert saved["partial"] is True and saved["ended"] == "Ctrl-C"
    shown = capsys.readouterr()
    assert "66.7 steps/s without, 53.3 with" in shown.out and "PARTIAL" in shown.err
    assert structured.main(["--model", "nowhere"]) == 1 and "nowhere" in capsys.readouterr().err
