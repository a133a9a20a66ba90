"""Every feature with every other, on this machine's processor: see `matrix`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compose.matrix import CASES, COLUMNS, SEED, check, name, settings
from tests.compose.workload import serve, workload
from thalweg.engine.local import LocalEngine


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_pair_gives_the_plain_engines_tokens(case: dict[str, Any]) -> None:
    check(case)


def test_the_cases_cover_every_pair() -> None:
    names = list(COLUMNS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            seen = {(case[a], case[b]) for case in CASES}
            assert len(seen) == len(COLUMNS[a]) * len(COLUMNS[b]), (a, b)


def test_scarce_pages_do_preempt() -> None:
    """The column is worth nothing if it never bites."""
    engine = LocalEngine(settings(budget=2048, depth=2, pages=7, slots=16))
    serve(engine, workload(SEED, engine.vocab, "greedy", False, False, 1))
    assert engine.loop.stats().preemptions > 0
