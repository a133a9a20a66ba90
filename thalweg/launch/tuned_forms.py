"""What a choice of `thalweg tune` must look like to be used: as one that its tuner tries. A file that was damaged or
edited might else hold a tile with which a kernel runs, and computes something else.
"""

from __future__ import annotations

from typing import Callable

from thalweg.core.kernels import TuningValues

Numbers = tuple[int, ...]
Form = Callable[[Numbers, Numbers, Numbers], bool]  # key, default, choice

WARPS = 4, 8
ROWS = 32  # most of a threshold


def fits(operation: str, key: TuningValues, default: TuningValues, choice: TuningValues) -> bool:
    """operation: one of `kernels.tuned.SOURCES`."""
    form, numbers, keys = FORMS[operation]
    if operation == "experts":
        form, key = PATHS.get(str(key[0]) if key else "", _never), key[1:]
    given = [tuple(one for one in part if isinstance(one, int)) for part in (key, default, choice)]
    lengths = [len(key), len(default), len(choice)]
    return lengths == [keys, numbers, numbers] == [len(part) for part in given] and form(*given)


def _gemv(key: Numbers, default: Numbers, choice: Numbers) -> bool:
    """`kernels.gemm.tuning.candidates`."""
    _, k, itemsize, _ = key
    m, n, parts, columns, ahead, stages, warps = choice
    return (
        (m == default[0] or (default[0], m) == (1, 8))
        and n in (4, 8, 16, 32, 64)
        and parts in (1, 4, 8)
        and columns in ((128,) if itemsize == 1 else (128, 256))
        and k % (parts * columns) == 0
        and (m == 1 or parts * n >= 16)
        and 0 <= ahead <= k // (parts * columns)
        and stages in (1, 3, 4, 5)
        and warps == max(4, parts)
    )


def _pairs(key: Numbers, default: Numbers, choice: Numbers) -> bool:
    tables = (4, 8, 16, 32), (128, 256, 512), (1, 3, 4, 5, 6), WARPS
    sides = _side(default[:5], choice[:5], *tables) and _side(default[5:10], choice[5:10], *tables)
    return sides and 0 <= choice[10] <= 4


def _grouped(key: Numbers, default: Numbers, choice: Numbers) -> bool:
    """FP8: n is a block of scales, and so is k."""
    codes = key[3]
    columns, widths = (((128,), (64, 128)), (128,)) if codes else (((32, 64, 128, 256),) * 2, (64, 128))
    stages = (2, 3, 4, 5, 6) if codes else (2, 3, 4, 5)
    up = _side(default[:5], choice[:5], columns[0], widths, stages, WARPS)
    return up and _side(default[5:10], choice[5:10], columns[1], widths, stages, WARPS) and choice[10] == default[10]


def _side(default: Numbers, choice: Numbers, *tables: Numbers) -> bool:
    """The table's own tile, or another of as many rows, since pairs are sorted by them (`kernels.experts.tuning`)."""
    same = choice[0] == default[0]
    return choice == default or same and all(one in table for one, table in zip(choice[1:], tables, strict=True))


def _few(key: Numbers, default: Numbers, choice: Numbers) -> bool:
    return 0 <= choice[0] <= ROWS


def _switch(key: Numbers, default: Numbers, choice: Numbers) -> bool:
    return choice[0] in (0, 1)


def _never(key: Numbers, default: Numbers, choice: Numbers) -> bool:
    return False


PATHS: dict[str, Form] = {"pairs": _pairs, "direct": _grouped, "sorted": _grouped}
# by operation: the form, of experts by path; how many numbers a choice has; and how many a key
FORMS: dict[str, tuple[Form, int, int]] = {
    "gemv": (_gemv, 7, 4),
    "experts": (_never, 11, 4),
    "fp8_rows": (_few, 1, 2),
    "read_ahead": (_switch, 1, 2),
}
