"""Every pair of features on the CPU gives the plain engine's tokens; `matrix` lists the features."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compose.matrix import CASES, COLUMNS, MODEL, MORE, SEED, check, name, settings
from tests.compose.workload import serve, workload
from tests.cpu import eagle_heads as heads
from thalweg.engine.local import LocalEngine


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_pair_gives_the_plain_engines_tokens(case: dict[str, Any]) -> None:
    check(case)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads for the bundled model with random weights, right hardly ever, in the published formats."""
    made = tmp_path_factory.mktemp("heads")
    target = json.loads((Path(MODEL) / "config.json").read_text())
    for drafts, third in (("eagle3-tree", True), ("eagle", False)):
        given = heads.config(target, third, head_dim=32, num_attention_heads=8)
        heads.publish(made / drafts, given, heads.tensors(given, given["hidden_size"], third))
    return made


@pytest.mark.parametrize("case", MORE, ids=name)
def test_other_drafters_and_rules(case: dict[str, Any], folder: Path) -> None:
    check(case, heads=folder if "eagle" in case["drafts"] else None)


def test_the_cases_cover_every_pair() -> None:
    names = list(COLUMNS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            seen = {(case[a], case[b]) for case in CASES}
            assert len(seen) == len(COLUMNS[a]) * len(COLUMNS[b]), (a, b)


def test_scarce_pages_do_preempt() -> None:
    """The column is worth nothing if it never bites."""
    engine = LocalEngine(
        settings(chunked_prefill_size=2048, max_steps_in_flight=2, num_pages=7, max_running_requests=16)
    )
    serve(engine, workload(SEED, engine.vocab, "greedy", False, False, 1))
    assert engine.loop.stats().preemptions > 0
