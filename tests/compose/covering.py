"""A covering array by the greedy method: few cases that contain every pair of values of every two columns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

Pair = tuple[int, int, int, int]  # column, value index, column, value index


def covering(columns: Mapping[str, Sequence[Any]], seed: int, tries: int = 40) -> list[dict[str, Any]]:
    """Cases (column → value) that cover all pairs. Each case is the best of `tries` random ones, steered by an
    uncovered pair.
    """
    rng, names = random.Random(seed), list(columns)
    sizes = [len(columns[name]) for name in names]
    missing: set[Pair] = {
        (a, i, b, j)
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(sizes[a])
        for j in range(sizes[b])
    }
    cases = []
    while missing:
        best: list[int] = []
        most = -1
        for _ in range(tries):
            a, i, b, j = rng.choice(sorted(missing))
            case = [rng.randrange(size) for size in sizes]
            case[a], case[b] = i, j
            gain = len(pairs(case) & missing)
            if gain > most:
                best, most = case, gain
        missing -= pairs(best)
        cases.append({name: columns[name][i] for name, i in zip(names, best, strict=True)})
    return cases


def pairs(case: Sequence[int]) -> set[Pair]:
    return {(a, case[a], b, case[b]) for a, b in itertools.combinations(range(len(case)), 2)}
