"""Benchmarks of speculation: speed by tree, batch and context, overhead beside the forwards, acceptance by task."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from tests.compose.matrix import MODEL
from tests.cpu.test_speculation import unrecorded
from thalweg.bench import acceptance, one_batch, speculation
from thalweg.config.tree import options_of
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve
from thalweg.sampling.simulated_acceptance import SimulatedAcceptance
from thalweg.spec.autoregressive import AutoregressiveDrafter
from tools.release import tables

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
recompute, step_parts = importlib.import_module("recompute"), importlib.import_module("step_parts")

assert unrecorded  # a fixture of this module, too


def test_speed_by_shape_batch_and_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    words = f"--model {MODEL} --batch-size 2 --input-len 20 30 --output-len 8 --widths 0 2 -1 --trees 2x2x4"
    rows = speculation.run([*words.split(), "--max-running-requests", "2", "--result-filename", str(file)])
    cases = [(20, 2), (30, 2)]
    shapes = [("chain", 0), ("chain", 2), ("chain", -1), ("2x2x4", 4)]
    assert [(row["shape"], row["width"], row["input_len"], row["batch_size"]) for row in rows] == [
        (*shape, *case) for of in (shapes[:3], shapes[3:]) for case in cases for shape in of
    ]
    assert rows[0]["accept_length"] == 1.0 and rows[0]["steps"] == 7 and rows[0]["step_latency"] > 0
    written = json.loads(file.read_text())
    assert len(written["speculation"]) == len(rows) and written["command"]
    shown = capsys.readouterr().out
    assert "adaptive" in shown and "2x2x4" in shown


def test_simulated_acceptance() -> None:
    words = f"--model {MODEL} --batch-size 1 --input-len 20 --output-len 12 --widths 2 --accept-length 2"
    whole = words.replace("--accept-length", "--speculative-simulate-accept-length")
    assert [row["steps"] for row in speculation.run(whole.split())] == [6]
    (row,) = speculation.run(words.split())
    assert isinstance(row["accept_length"], float) and 1.8 < row["accept_length"] < 2.0, (
        "the last one is cut at the end"
    )
    assert row["steps"] == 6
    with pytest.raises(UnsupportedConfig, match="NONE"):
        speculation.run([*words.split(), "--speculative-algorithm", "NONE"])
    with pytest.raises(UnsupportedConfig, match="at least 1"):
        speculation.run(["--model", MODEL, "--accept-length", "0.5"])


def test_an_invalid_tree_is_refused() -> None:
    for wrong in ("4", "1x3x3", "4x3"):
        with pytest.raises(UnsupportedConfig, match="branches x depth x drafts"):
            speculation.run(["--model", MODEL, "--trees", wrong])


def test_a_drafters_forwards_are_kept_and_let_go_again() -> None:
    """What one makes within another is a part of it; behind the measurement everything is as it was."""
    config = options_of(model=str(MODEL), speculative_algorithm="NEXTN", speculative_num_steps=2, context_length=256)
    engine = LocalEngine(
        msgspec.structs.replace(resolve(config).engine, speculative_adaptive=False, show_progress=False)
    )
    runner = engine.runner
    drafter, graphs = runner.drafting.drafter, runner.graphs
    assert isinstance(drafter, AutoregressiveDrafter)
    (uid,) = engine.submit(list(range(20, 50)), SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    for _ in range(4):
        engine.step()
    engine.loop.commit_until(0)
    plan = step_parts.upcoming(engine, 2)
    assert [(row.uid, row.n, row.num_drafts) for row in plan.rows] == [(uid, 3, 2)]
    forwarded = runner.forward(plan)
    with step_parts.watching(engine) as calls:
        runner.draft(forwarded, runner.sample(forwarded), 2)
    assert len(calls.draft) == 4 and len(calls.learn) == 1, "two forwards and two heads; one look at the step"
    assert runner.graphs is graphs and "forward" not in vars(drafter.steps) and "logits" not in vars(drafter.head)
    found = step_parts.parts(engine, 2)
    assert all(seconds > 0 for seconds in found[:3]) and found.simulation == 0
    runner.sampler = SimulatedAcceptance(runner.sampler, 2.0)
    assert step_parts.parts(engine, 2).simulation > 0 and "draw" not in vars(runner.sampler)


def test_a_long_generation_beside_its_prompt() -> None:
    """Fine as it is; not with a single entry of one position that is another's, nor with one that was no number."""
    config = options_of(
        model=str(MODEL), speculative_algorithm="NEXTN", speculative_num_steps=3, context_length=256,
        max_running_requests=1, max_total_tokens=512, chunked_prefill_size=128,
    )  # fmt: skip
    settings = msgspec.structs.replace(
        resolve(config).engine,
        speculative_adaptive=False,
        speculative_simulate_accept_length=2.5,
        show_progress=False,
    )

    def checked(spoil: Callable[[torch.Tensor], object]) -> dict[tuple[str, int], dict[str, Any]]:
        request = recompute.generated(engine, list(range(20, 60)), 140, 1)
        page = engine.runner.planes.paged("latent", 0)[request.pages[1]]
        spoil(page)
        found = recompute.check(engine, request, 128)
        engine.abort([request.uid])
        while not engine.idle:
            engine.step()
        engine.flush_cache()
        assert found["tokens"] >= 140 and found["fine"] == all(row["fine"] for row in found["parts"])
        return {(row["name"], row["layer"]): row for row in found["parts"]}

    engine = LocalEngine(settings)
    good = checked(lambda page: None)
    assert all(row["fine"] for row in good.values()) and ("logits", 4) in good and ("latent", 4) in good
    assert not checked(lambda page: page[5].copy_(page[6].clone()))["latent", 0]["fine"]
    zeroed = checked(lambda page: page[5].zero_())["latent", 0]
    assert not zeroed["fine"] and zeroed["broken"] == 1


def test_a_large_spread_is_reported() -> None:
    torch.manual_seed(1)
    there, noise, other = torch.randn(3, 2000, 64)
    near, far = there + 0.005 * noise, there + 0.3 * noise

    def fine(made: torch.Tensor, again: torch.Tensor, certain: bool = False) -> bool:
        found = recompute.judged(recompute.apart(there, made), recompute.apart(there, again), 0.02, certain)
        assert isinstance(found["fine"], bool)
        return found["fine"]

    assert fine(near, there) and fine(near, there, certain=True)
    assert not fine(far, there), "far beyond rounding"
    assert fine(far, far) and not fine(far, far, certain=True), "but another choice may be that"
    assert not fine(other, other), "unrelated"
    for many, good in ((1, True), (5, False)):  # of two thousand
        few = near.clone()
        few[:many] = other[:many]
        assert fine(few, far) == good and not fine(few, far, certain=True)
    near[7, 3] = torch.nan
    assert not fine(near, far) and recompute.apart(there, near).broken == 1


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_speculation", ROOT / "benchmarks" / "gpu" / "speculation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_part_of_what_is_measured_on_a_gpu(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"v2-lite-tree --model {MODEL} --batches 1 --input 20 --output 8 --out {tmp_path}".split()
    assert script.main(words) == 0
    result = json.loads((tmp_path / "speculation_v2_lite_tree.json").read_text())
    assert [row["width"] for row in result["speculation"]] == [0, 1, 3, 7, 15, -1] and not result["partial"]
    lines = tables.speculation_steps(result)
    assert lines[0] == "| context | requests | plain | 1 draft | 3 drafts | 7 drafts | tree 4x4x15 | chosen |"
    assert "its KV writes" in lines[-7] and "where 2.5 are accepted" in "\n".join(lines)
    capsys.readouterr()
    assert script.main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert "is there (--again" in shown and "together" in shown and "ms a step" not in shown


def test_acceptance_by_task_and_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "result.json"
    words = f"--model {MODEL} --tasks dialogue --items 2 --widths 1 2 --temperature 0 1"
    words += " --rules gumbel-max rejection-sampling"
    assert acceptance.main([*words.split(), "--result-filename", str(file)]) == 0
    rows = json.loads(file.read_text())["acceptance"]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert ("same_tokens" in row) == (row["rule"] == "gumbel-max" or row["temperature"] == 0)
        assert row.get("same_tokens", row["tokens"]) == row["tokens"] and not row.get("wrong_answers")
        assert sum(row["accepted_by_depth"]) == pytest.approx(row["verifications"] * (row["accept_length"] - 1))
        assert len(row["accept_rate_by_depth"]) == row["width"]
    assert "as plain" in capsys.readouterr().out


def test_drafts_over_ranks_are_plain_decodings(tmp_path: Path) -> None:
    """The scheduler is in this process, and its plans say how many drafts there are. Others have schedulers of their
    own.
    """
    words = f"--model {MODEL} --tasks sums --items 2 --tp-size 2 --result-filename {tmp_path / 'result.json'}"
    plain, drafted = acceptance.run([*words.split(), "--widths", "0", "2"])
    assert plain["verifications"] == 0 and drafted["accepted_by_depth"][1] > 0 and not drafted["wrong_answers"]
    with pytest.raises(UnsupportedConfig, match="bench acceptance sets the drafts of one scheduler.*--dp-size"):
        acceptance.run([*words.split(), "--dp-size", "2", "--enable-dp-attention"])


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
    one = {"task": "sums", "rule": "gumbel-max", "temperature": 0.0, "top_p": 1.0, "shape": "chain", "tokens": 1234}
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
    slow = row | {"step_latency": 0.002}
    drafted = {"step_latency": 0.003, "accept_length": 2.0, "steps_by_num_drafts": [1, 0, 3]}
    wide = [slow | drafted | {"width": width} for width in (2, -1)]
    lines = tables.speculation_steps({"speculation": [slow, *wide], "accept_length": 2.5})
    assert lines[2] == "| 60 | 1 | 2.00 | 3.00 (1.50) | 3.00 (1.50, brings 1.50; drafts in 75%) |"


def test_one_batch_tells_what_was_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "result.json"
    words = f"--model {MODEL} --input-len 30 --output-len 25 --mtp 3 --no-speculative-adaptive --result-filename {file}"
    assert one_batch.main(words.split()) == 0
    (row,) = json.loads(file.read_text())["results"]
    steps = len(row["decode_latencies"])
    assert row["accept_length"] > 1 and 0 < row["accept_rate"] <= 1 and steps < 24
    assert row["median_decode_throughput"] == pytest.approx(24 / steps / row["median_decode_latency"])
    shown = capsys.readouterr().out
    assert "accept length" in shown and f"{row['accept_length']:.2f}" in shown
