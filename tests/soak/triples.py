"""Every triple of the features that `thalweg ablate` has as columns, on groups of 2 and 4 processes: tokens equal one
rank's, as in tests/ranks/test_tokens.py, whose cases have all pairs. The other columns are drawn.

python -m tests.soak.triples [--progress FILE]

310 cases, about an hour on two cores. With --progress a second run goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from random import Random
from typing import Any

from tests.compose.covering import covering
from tests.compose.matrix import name
from tests.ranks.group import ProcessGroup
from tests.ranks.test_tokens import COLUMNS, LAYOUTS, check_levels, is_legal
from tests.soak.report import write
from thalweg.models import traced

FEATURES = (
    "layout", "drafts", "kv", "chunked_prefill_size", "max_steps_in_flight", "radix_cache", "moe_a2a_backend", "experts",
    "graphs", "nnodes",
)  # fmt: skip


def cases(seed: int) -> list[dict[str, Any]]:
    free, draw = {column: levels[0] for column, levels in COLUMNS.items()}, Random(seed)
    features = {column: COLUMNS[column] for column in FEATURES} | {"layout": list(LAYOUTS)}
    array = covering(features, seed, strength=3, legal=lambda levels: is_legal(free | levels))
    return [_drawn(levels, draw) for levels in array]


def _drawn(features: dict[str, Any], draw: Random) -> dict[str, Any]:
    while not is_legal(levels := {column: draw.choice(of) for column, of in COLUMNS.items()} | features):
        pass
    return levels


def main(seed: int, progress: Path | None = None) -> dict[str, Any]:
    """progress: a file of the cases that have passed, which do not run again. Raises AssertionError, or RankError, that
    names the cases that failed.
    """
    traced.ROWS, failed = 0, list[str]()  # eager: tracing is most of a start on a CPU
    groups, some = {size: ProcessGroup(size) for size in (2, 4)}, cases(seed)
    lines = progress.read_text().splitlines() if progress is not None and progress.is_file() else []
    passed: dict[str, float] = dict(json.loads(line) for line in lines)  # seconds by case
    try:
        for i, levels in enumerate(some):
            begun, case = time.monotonic(), name(levels)
            if case in passed:
                continue
            try:
                check_levels(levels, groups)
            except Exception as error:  # noqa: BLE001 - the others run as well
                failed.append(f"{case}: {error!r:.300}")
            else:
                passed[case] = round(time.monotonic() - begun, 1)
                if progress is not None:
                    with progress.open("a") as file:
                        print(json.dumps([case, passed[case]]), file=file)
            print(f"{i + 1} of {len(some)}, {sum(passed.values()):.0f} s, {len(failed)} failed", flush=True)
    finally:
        for group in groups.values():
            group.close()
    assert not failed, "\n".join(failed)
    counts = {"cases": len(some), "columns": list(FEATURES)}
    print(write("triples", f"python -m tests.soak.triples --seed {seed}", sum(passed.values()), counts).name)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--progress", type=Path)
    args = parser.parse_args()
    main(args.seed, args.progress)
