"""What `thalweg tune` has found for this device, in place of what the kernels' own tables say.

A choice is found for one operation, one key (the shape of a weight) and one default: what the operation's table says.
So it replaces that tile wherever the table would use it with such a weight, and the numbers of rows at which other
compiled kernels begin stay where they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from thalweg.core.kernels import TunedKernel, TuningValues

T = TypeVar("T")
Question = tuple[str, TuningValues, Any]  # operation, key, default

# by operation: the file whose code a choice was measured with
SOURCES = {
    "gemv": "gemm/triton.py",
    "experts": "experts/triton.py",
    "fp8_rows": "gemm/fp8.py",
    "read_ahead": "gemm/prefetch.py",
}


class TuningTable:
    """The choices that a process uses. Filled by `use` before the first model is made, and left alone while kernels
    run.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, TuningValues], dict[TuningValues, TuningValues]] = {}
        self._asked: list[Question] | None = None

    def use(self, rows: Iterable[TunedKernel]) -> None:
        """These and no others from here on."""
        found: dict[tuple[str, TuningValues], dict[TuningValues, TuningValues]] = {}
        for row in rows:
            found.setdefault((row.operation, row.key), {})[row.default] = row.choice
        self._found = found

    def lookup(self, operation: str, key: TuningValues, default: T) -> T:
        """What was found in place of `default`: a number, or a dataclass of such. Itself where nothing was."""
        if self._asked is not None:
            self._asked.append((operation, key, default))
        if not self._found:
            return default
        found = self._found.get((operation, key), {}).get(flat(default))
        return default if found is None else rebuilt(default, found)

    @contextmanager
    def noted(self) -> Iterator[list[Question]]:
        """Everything that is asked meanwhile."""
        asked: list[Question] = []
        self._asked = asked
        try:
            yield asked
        finally:
            self._asked = None


TUNED = TuningTable()  # a process computes on one device


def flat(choice: Any) -> TuningValues:
    """The numbers of a choice, nested dataclasses in their order."""
    if not is_dataclass(choice):
        return (choice,)
    return tuple(number for field in fields(choice) for number in flat(getattr(choice, field.name)))


def rebuilt(like: T, numbers: TuningValues) -> T:
    """A choice of the same type from its numbers. Raises ValueError for too few or too many."""
    made, left = _taken(like, numbers)
    if left:
        raise ValueError(f"{len(numbers)} numbers are more than {type(like).__name__} has")
    return cast(T, made)


def _taken(like: Any, numbers: TuningValues) -> tuple[Any, TuningValues]:
    if not numbers:
        raise ValueError(f"too few numbers for {type(like).__name__}")
    if not is_dataclass(like):
        return numbers[0], numbers[1:]
    values = []
    for field in fields(like):
        value, numbers = _taken(getattr(like, field.name), numbers)
        values.append(value)
    assert not isinstance(like, type)
    return type(like)(*values), numbers


@cache
def digest(operation: str) -> str:
    """Of the code that the operation's choices were measured with; another one's choices may be slower, or not
    compile.
    """
    return hashlib.sha256((Path(__file__).parent / SOURCES[operation]).read_bytes()).hexdigest()[:16]
