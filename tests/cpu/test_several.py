"""benchmarks/gpu/several.py: its cells can be served by four H200, and it runs them once, with their ends told."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cpu.plan_models import DEEPSEEK, INDEXER, QWEN
from thalweg.bench.command import parse_engine_flags
from thalweg.bench.in_process import reserve
from thalweg.bench.one_batch import FLAGS
from thalweg.config.args import options_parser, parse_options
from thalweg.config.machines import hardware
from thalweg.launch.resolve import resolve

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models/tiny"

MODELS = {
    "qwen2.5-72b": QWEN | {"torch_dtype": "bfloat16"},
    "deepseek-v3": DEEPSEEK | {"num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"},
    "deepseek-v32-slim": DEEPSEEK | INDEXER | {"torch_dtype": "bfloat16"},
}

HEAD = json.loads((ROOT / "models/tiny-eagle3/config.json").read_text()) | {
    "hidden_size": 8192, "target_hidden_size": 8192, "intermediate_size": 29568, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 152064, "draft_vocab_size": 32000,
    "max_position_embeddings": 32768, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 39, 76]},
}  # fmt: skip


@pytest.fixture
def several() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "benchmarks/gpu"))
    import several

    yield several
    sys.path.remove(str(ROOT / "benchmarks/gpu"))


def test_four_gpus_can_serve_every_cell(several: ModuleType, tmp_path: Path) -> None:
    head = tmp_path / "qwen2.5-72b-eagle3"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(HEAD))
    for name, cell in several.CELLS.items():
        if cell.model not in MODELS or cell.command not in ("bench one-batch", "serve"):
            continue
        folder = tmp_path / cell.model
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[cell.model]))
        (tmp_path / name).mkdir()
        layers = {"num_hidden_layers": several.LAYERS} if cell.model == several.V3 else {}
        changed = several.with_changes(folder, layers | cell.changes, tmp_path / name)
        argv = several.words(cell, changed, [], tmp_path)[len(cell.command.split()) :]
        if cell.loads:
            options = parse_options(options_parser("serve", ""), argv, needs_model=True).options
            batch = max(load.concurrency for load in cell.loads)
            longest = max(load.longest for load in cell.loads)
        else:
            args, options = parse_engine_flags(argv, "one-batch", "", {"Batches": FLAGS})
            batch, longest = max(args.batch_size), (max(args.input_len), max(args.output_len))
            options = reserve(options, batch, *longest, args.fill_cache)
        resolved = resolve(options, hardware("h200x4").machine(), simulates=True)
        engine = resolved.engine
        assert engine.max_running_requests * engine.dp_size >= batch, name
        assert engine.processes == engine.tp_size * engine.pp_size <= 4, name
        pages = sum(longest) // engine.page_size
        assert resolved.pages > batch // engine.attention_dp * pages, name
        assert resolved.engine.cuda_graph_bs, name


@pytest.fixture
def main(several: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with models in `models` and results in `out`."""
    shutil.copytree(TINY, tmp_path / "models/small")

    def run(*more: str) -> int:
        folders = ["--models", str(tmp_path / "models"), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["several.py", *folders, *more])
        status: int = several.main()
        return status

    return run


def test_a_cell_runs_once_and_its_failure_is_told(
    several: ModuleType,
    main: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    small = "--tp-size 2 --batch-size 1 2 --output-len 4 --no-warmup"
    short = "--context-length 400 --input-len 20"
    start = {"command": "bench startup", "common": "--load-format dummy"}
    cells = {
        "start": several.Cell("small", "--tp-size 2", lengths="--cold 0 --warm 1 --no-warmup", **start),
        "filled": several.Cell("small", small, lengths=f"{short} --fill-cache"),
        "tiny": several.Cell("small", small, goals=(several.Goal(2, 0.9),), lengths=short),
        "broken": several.Cell("small", "--tp-size 3 --batch-size 1", lengths=short),
    }
    monkeypatch.setattr(several, "CELLS", cells)
    out = tmp_path / "out"
    assert main("--", "--device", "cpu", "--threads", "1") == 1
    shown = capfd.readouterr().out
    result: dict[str, Any] = json.loads((out / "tiny.json").read_text())
    assert (
        [row["batch_size"] for row in result["results"]] == [1, 2]
        and "| tiny | 2 | 20 + 4 | " in shown
        and "| 0.90 |" in shown
    )
    assert "| filled | 2 | 20 + 4 | " in shown, "without the prompts' times"
    assert "| start, warm | 1 | first token |" in shown
    assert "cannot be shared by 3" in (out / "broken.failed.txt").read_text()
    begun = (out / "tiny.json").stat().st_mtime_ns
    assert main("--cells", "tiny", "--time-limit", "1") == 0 and (out / "tiny.json").stat().st_mtime_ns == begun


def test_loads_are_sent_again_until_they_have_taken_long_enough(several: ModuleType) -> None:
    points, loads = list[dict[str, float]](), ("a", "b")
    for _ in several.several_http.turns(loads, 25.0, points):
        points.append({"duration": 10.0})
    assert len(points) == 4 and list(several.several_http.turns(loads, 0.0, [])) == ["a", "b"]


def test_a_server_under_its_loads(
    several: ModuleType,
    main: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The first server reads a checkpoint that is written once. A recording has to be given. A request that is refused
    fails its cell.
    """
    loads = several.Load(24, 6, 2), several.Load(8, 4, 1, requests=2)
    rates = (several.Load(64, 6, rate=20, requests=10, warm=1, trace=several.TRACE),)
    crowd = (several.Load(24, 6, 8, warm=1),)
    dp2 = "--tp-size 2 --dp-size 2 --enable-dp-attention --ep-size 2"
    small = {"num_hidden_layers": 2}
    cells = {
        "closed": several.http("small", dp2, loads, small, is_written=True),
        "rates": several.http("small", "--tp-size 2", rates, small),
        "crowd": several.http("small", "--max-running-requests 1 --max-queued-requests 1", crowd, small),
    }
    monkeypatch.setattr(several, "CELLS", cells)
    ratios = (
        several.of_fields("answers", "closed", ("completed", "requests"), 1.0, max_concurrency=2),
        several.of_cells("no result", "completed", ("rates", "none"), 1.0),
    )
    monkeypatch.setattr(several, "RATIOS", ratios)
    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    more = ["--checkpoints", str(disk), "--", "--device", "cpu", "--threads", "1", "--no-warmup"]
    assert main(*more) == 1
    closed = json.loads((out / "closed.json").read_text())
    assert [(point["load"], point["completed"]) for point in closed["points"]] == [
        ("2 at a time", 6),
        ("1 at a time, 2 requests", 2),
    ]
    assert (disk / "small-2/model.safetensors").is_file() and "dummy" not in closed["server_flags"]
    assert closed["command"].startswith("thalweg bench serve ") and closed["points"][0]["kv_tokens"] >= 24 + 6
    assert "give --trace FILE" in (out / "rates.failed.txt").read_text()
    assert "429" in (out / "crowd.failed.txt").read_text() and not (out / "crowd.json").exists()
    capfd.readouterr()
    trace = str(ROOT / "benchmarks/traces/azure2023_conv_200.csv")
    assert main("--cells", "closed", "rates", "--trace", trace, *more) == 0
    shown = capfd.readouterr().out
    assert "closed: " not in shown, "it has a result"
    assert re.search(r"\| rates  +\| 20 requests/s for 0.5 s +\| +10 \| +0 \|", shown), shown
    assert re.search(r"\| answers \| +6 \| +6 \| +1 \| +1 \| yes +\|", shown) and "no result" not in shown, shown
