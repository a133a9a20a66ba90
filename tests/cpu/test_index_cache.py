"""Layers that share a selection of context: by flag, and found by a search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.plan_models import DEEPSEEK, INDEXER
from thalweg.bench import index_cache, tune
from thalweg.bench.index_cache import PatternLoss, cut, evaluations, search
from thalweg.config.model import index_pattern, with_index_pattern
from thalweg.config.tree import options_of
from thalweg.core.errors import CheckpointError, UnsupportedConfig
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve
from thalweg.models.catalog import read_config_facts, read_facts

TINY, TEXT = "models/tiny", Path(__file__).parents[2] / "docs/architecture.md"
TOPK, WINDOW = 64, 200


def resolved(**wishes: Any) -> Any:
    return resolve(options_of(**{"model": TINY, "device": "cpu", "threads": 1, "radix_cache": False} | wishes))


def loss(pattern: str, **wishes: Any) -> PatternLoss:
    """Of an engine that was started with these wishes."""
    made = resolved(**wishes)
    tokens = made.tokenizer.encode(TEXT.read_text(encoding="utf-8"), True)
    return PatternLoss(LocalEngine(made.engine), pattern, cut(tokens, WINDOW, 2), TOPK)


def test_a_frequency_is_a_pattern() -> None:
    assert index_pattern(1, 5) == "FFFFF" and index_pattern(2, 6) == "FFSFSF" and index_pattern(4, 7) == "FFSSSFS"
    facts = read_config_facts(DEEPSEEK | INDEXER | {"index_topk_freq": 4}, "")
    assert facts.indexer is not None
    assert "".join("SF"[full] for full in facts.indexer.full) == index_pattern(4, facts.layers)


def test_flags_are_in_the_report_and_reach_the_engine() -> None:
    made = resolved(index_topk_freq=2)
    assert made.engine.index_topk_pattern == "FFSF"
    assert "FFSF" in str(made.engine.report.as_tree()["index_topk_pattern"])
    indexer = read_facts(made.path, made.engine.index_topk_pattern).indexer
    assert indexer is not None and indexer.full == (True, True, False, True)
    planes = [plane.name for plane in LocalEngine(made.engine).runner.model.planes()]
    assert planes.count("index") == 3 and planes.count("latent") == 4, "a layer that shares keeps no index keys"


@pytest.mark.parametrize(
    ("wishes", "match"),
    [
        ({"index_topk_pattern": "FS"}, "F or S for each of 4 layers"),
        ({"index_topk_pattern": "SFFF"}, "the first one F"),
        ({"index_topk_pattern": "FfSS"}, "F or S for each"),
        ({"index_topk_pattern": "FFSS", "index_topk_freq": 2}, "give one of them"),
    ],
)
def test_nonsense_is_refused(wishes: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedConfig, match=match):
        resolved(**wishes)


def test_models_that_cannot_are_refused() -> None:
    with pytest.raises(UnsupportedConfig, match="no sparse attention"):
        with_index_pattern(read_config_facts(DEEPSEEK, ""), "F" * 61)
    shared = read_config_facts(DEEPSEEK | INDEXER | {"index_topk_freq": 4}, "")
    with pytest.raises(UnsupportedConfig, match="layer 2 of this checkpoint shares"):
        with_index_pattern(shared, "F" * 61)


def test_kinds_of_a_config_json_are_those_that_are_known() -> None:
    made = read_config_facts(DEEPSEEK | INDEXER | {"indexer_types": ["full"] * 60 + ["shared"]}, "")
    assert made.indexer is not None and made.indexer.full == (True,) * 60 + (False,)
    for given, said in (
        ({"indexer_types": ["full"] * 60 + ["Full"]}, "indexer_types must have full or shared for each of 61 layers"),
        ({"index_topk_pattern": "F" * 60 + "X"}, "index_topk_pattern must have F or S for each of 61 layers"),
        ({"index_topk_pattern": "S" + "F" * 60}, "index_topk_pattern must .* the first one F"),
        ({"index_topk_freq": 0}, "index_topk_freq"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read_config_facts(DEEPSEEK | INDEXER | given, "")


def test_a_frequency_keeps_to_the_checkpoints_first_layers(tmp_path: Path) -> None:
    for file in Path(TINY).iterdir():
        (tmp_path / file.name).symlink_to(file.resolve())
    config = json.loads((tmp_path / "config.json").read_text()) | {"index_topk_freq": 2, "index_skip_topk_offset": 3}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolved(model=str(tmp_path), index_topk_freq=2).engine.index_topk_pattern == "FFFS"


def test_a_layer_put_aside_shares_as_one_that_was_never_loaded() -> None:
    whole = loss("FFFF")
    for pattern in ("FFSF", "FSSS"):
        assert whole(pattern) == loss(pattern, index_topk_pattern=pattern)(pattern)
    assert whole("FFFF") < whole("FSSS"), "sharing costs something"
    assert whole("FFFF") == loss("FFFF")("FFFF"), "and can be taken back"


def test_the_search_takes_the_cheapest_layer_each_time() -> None:
    costs, asked = {1: 0.3, 2: 0.1, 3: 0.2}, list[str]()

    def made_up(pattern: str) -> float:
        asked.append(pattern)
        return sum(costs[layer] for layer, kind in enumerate(pattern) if kind == "S")

    steps = [step.pattern for step in search(made_up, "FFFF", 1)]
    assert steps == ["FFFF", "FFSF", "FFSS", "FSSS"] and len(asked) == evaluations(4, 1) == 7


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = ["index-cache", TINY, "--text", str(TEXT), "--windows", "1", "--window", "100", "--full", "3"]
    assert tune.main([*argv, "--device", "cpu", "--threads", "1", "--output-file", str(out)]) == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["sharing"] for row in rows] == [0, 1] and rows[1]["loss"] >= rows[0]["loss"] - 0.1
    assert f"--index-topk-pattern {rows[1]['pattern']}" in capsys.readouterr().out
    for more, problem in (
        (["--window", "65"], "65 tokens must be 66 to"),  # 65 tokens have no loss beyond the choice
        (["--text", str(tmp_path / "none")], "cannot be read"),
    ):
        assert index_cache.main([*argv[1:], *more, "--device", "cpu"]) in (1, 2)
        assert problem in capsys.readouterr().err
