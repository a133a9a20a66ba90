"""A covering array by the greedy method: few cases that contain every combination of values of every two columns, or of
every three.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Combination = tuple[tuple[int, int], ...]  # (column, value index) of each of its columns
Case = dict[str, Any]  # column → value


def covering(
    columns: Mapping[str, Sequence[Any]],
    seed: int,
    tries: int = 40,
    strength: int = 2,
    legal: Callable[[Case], bool] = lambda case: True,
) -> list[Case]:
    """Cases that cover all combinations of `strength` columns. Each case is the best of `tries` random ones, steered by
    an uncovered combination. legal: whether a case can be, which a combination in no legal case cannot.
    """
    rng, names = random.Random(seed), list(columns)
    sizes = [len(columns[name]) for name in names]

    def named(case: Sequence[int]) -> Case:
        return {name: columns[name][i] for name, i in zip(names, case, strict=True)}

    def draw(steered: Combination) -> list[int] | None:
        for _ in range(200):
            case = [rng.randrange(size) for size in sizes]
            for column, value in steered:
                case[column] = value
            if legal(named(case)):
                return case
        return None

    missing = {
        tuple(zip(some, values, strict=True))
        for some in itertools.combinations(range(len(names)), strength)
        for values in itertools.product(*(range(sizes[column]) for column in some))
    }
    cases = []
    while missing:
        steered = rng.choice(sorted(missing))
        drawn = [case for case in (draw(steered) for _ in range(tries)) if case is not None]
        best = max(drawn, key=lambda case: len(missing & set(combinations(case, strength))), default=None)
        if best is None:
            missing.remove(steered)
            continue
        missing -= set(combinations(best, strength))
        cases.append(named(best))
    return cases


def combinations(case: Sequence[int], strength: int) -> Iterator[Combination]:
    return itertools.combinations(enumerate(case), strength)
