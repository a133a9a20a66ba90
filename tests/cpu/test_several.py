"""benchmarks/gpu/several.py: its cells can be served by four H200, and it runs them once, with their ends told."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cpu.plan_models import DEEPSEEK, INDEXER, QWEN
from thalweg.bench.command import parse_engine_flags
from thalweg.bench.in_process import reserve
from thalweg.bench.one_batch import FLAGS
from thalweg.config.machines import hardware
from thalweg.launch.resolve import resolve

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models/tiny"

MODELS = {
    "qwen2.5-72b": QWEN | {"torch_dtype": "bfloat16"},
    "deepseek-v3": DEEPSEEK | {"num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"},
    "deepseek-v32-slim": DEEPSEEK | INDEXER | {"torch_dtype": "bfloat16"},
}


@pytest.fixture
def several() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks/gpu"))
    import several

    yield several
    sys.path.remove(str(ROOT / "benchmarks/gpu"))


def test_four_gpus_can_serve_every_cell(several: ModuleType, tmp_path: Path) -> None:
    for name, cell in several.CELLS.items():
        if not cell.model:
            continue
        folder = tmp_path / cell.model
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[cell.model]))
        (tmp_path / name).mkdir()
        layers = {"num_hidden_layers": several.LAYERS} if cell.model == several.V3 else {}
        changed = several.with_changes(folder, layers | cell.changes, tmp_path / name)
        argv = several.words(cell, changed, tmp_path / "result.json", [])[5:]
        args, options = parse_engine_flags(argv, "one-batch", "", {"Batches": FLAGS})
        longest = max(args.input_len), max(args.output_len)
        resolved = resolve(
            reserve(options, max(args.batch_size), *longest), hardware("h200x4").machine(), simulates=True
        )
        engine = resolved.engine
        assert engine.processes == engine.tp_size * engine.pp_size <= 4, name
        pages = sum(longest) // engine.page_size
        assert resolved.pages > max(args.batch_size) // engine.attention_dp * pages, name
        assert resolved.engine.cuda_graph_bs, name


def test_a_cell_runs_once_and_its_failure_is_told(
    several: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(TINY, tmp_path / "models/tiny")
    small = "--tp-size 2 --batch-size 1 2 --output-len 4 --no-warmup"
    short = "--context-length 400 --input-len 20"
    cells = {
        "tiny": several.Cell("tiny", small, goals=(several.Goal(2, 0.9),), lengths=short),
        "broken": several.Cell("tiny", "--tp-size 3 --batch-size 1", lengths=short),
    }
    monkeypatch.setattr(several, "CELLS", cells)
    monkeypatch.setattr(several, "COMMON", "--load-format dummy")
    out = tmp_path / "out"

    def run(*more: str) -> int:
        given = ["several.py", "--models", str(tmp_path / "models"), "--out", str(out), *more]
        monkeypatch.setattr(sys, "argv", given)
        status: int = several.main()
        return status

    assert run("--", "--device", "cpu", "--threads", "1") == 1
    shown = capfd.readouterr().out
    result: dict[str, Any] = json.loads((out / "tiny.json").read_text())
    assert (
        [row["batch_size"] for row in result["results"]] == [1, 2] and "| tiny | 2 | " in shown and "| 0.90 |" in shown
    )
    assert "cannot be shared by 3" in (out / "broken.failed.txt").read_text()
    begun = (out / "tiny.json").stat().st_mtime_ns
    assert run("--cells", "tiny", "--time-limit", "1") == 0 and (out / "tiny.json").stat().st_mtime_ns == begun
