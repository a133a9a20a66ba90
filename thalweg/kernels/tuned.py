"""The choices that `thalweg tune` has found for this device, in place of those of the kernels' own tables.

A choice is found for one operation, one key (the shape of a weight) and one default of the operation's table. It
replaces that default wherever the table would use it with such a weight. The numbers of rows at which other compiled
kernels begin stay where they are.
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
Lookup = tuple[str, TuningValues, Any]  # operation, key, default

# by operation: the file with whose code a choice was measured
SOURCES = {
    "gemv": "gemm/triton.py",
    "experts": "experts/triton.py",
    "fp8_rows": "gemm/fp8.py",
    "read_ahead": "gemm/prefetch.py",
}


class TuningTable:
    """The choices of a process. `use` fills it before the first model is made; it does not change while kernels run."""

    def __init__(self) -> None:
        self._choices: dict[Lookup, TuningValues] = {}
        self._recorded: list[Lookup] | None = None

    def use(self, rows: Iterable[TunedKernel]) -> None:
        """Replaces the contents."""
        self._choices = {(row.operation, row.key, row.default): row.choice for row in rows}

    def lookup(self, operation: str, key: TuningValues, default: T) -> T:
        """The choice in place of `default`, which is a number or a dataclass of numbers; or the default itself."""
        if self._recorded is not None:
            self._recorded.append((operation, key, default))
        choice = self._choices.get((operation, key, flat(default))) if self._choices else None
        return default if choice is None else rebuilt(default, choice)

    @contextmanager
    def recorded(self) -> Iterator[list[Lookup]]:
        """Records every lookup meanwhile."""
        lookups: list[Lookup] = []
        self._recorded = lookups
        try:
            yield lookups
        finally:
            self._recorded = None


TUNED = TuningTable()  # a process computes on one device


def flat(choice: Any) -> TuningValues:
    """The numbers of a choice, nested dataclasses in their order."""
    if not is_dataclass(choice):
        return (choice,)
    return tuple(number for field in fields(choice) for number in flat(getattr(choice, field.name)))


def rebuilt(like: T, numbers: TuningValues) -> T:
    """A choice of the same type from its numbers. Raises ValueError for too few or too many."""
    if len(numbers) != len(flat(like)):
        raise ValueError(f"{type(like).__name__} has {len(flat(like))} numbers, not {len(numbers)}")
    if not is_dataclass(like):
        return cast(T, numbers[0])
    values = []
    for field in fields(like):
        value = getattr(like, field.name)
        count = len(flat(value))
        values.append(rebuilt(value, numbers[:count]))
        numbers = numbers[count:]
    assert not isinstance(like, type)
    return type(like)(*values)


@cache
def digest(operation: str) -> str:
    """A hash of the code with which the operation's choices were measured. With other code they may be slower, or not
    compile.
    """
    return hashlib.sha256((Path(__file__).parent / SOURCES[operation]).read_bytes()).hexdigest()[:16]
