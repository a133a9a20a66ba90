"""Search space of `thalweg tune`: the candidates of one operation and shape, and how each is run and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from thalweg.core.kernels import TuningValues
from thalweg.kernels.case import Inputs
from thalweg.kernels.tuned import flat

T = TypeVar("T")
Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]  # a result, and the expected one


@dataclass(frozen=True, slots=True)
class TuningSearch:
    """The candidates of one choice."""

    operation: str  # with `key`: the choice, as `tuned` names it
    key: TuningValues
    label: str  # of the case that is timed
    default: Any  # of the operation's table
    candidates: tuple[Any, ...]  # of the default's type
    draw: Callable[[torch.Generator, Inputs | None], Inputs]  # as in `TimedCase`
    run: Callable[[Any, Inputs], tuple[Tensor, ...]]  # a candidate and inputs → results
    reference: Callable[[Inputs], tuple[Tensor, ...]]  # the expected results
    tolerance: float  # of max |difference| / max |expected|
    bytes: float  # read by one call: calls in a row must read more than a cache holds
    # from the timed candidates, the fastest first → more candidates
    further: Callable[[Sequence[Any]], Sequence[Any]] = lambda timed: ()
    alike: bool = False  # candidates run the same kernels: nothing is compiled for each
    # the other uses of a candidate that is chosen; they are checked too
    uses: Callable[[Any, Inputs], Sequence[Pair]] = lambda candidate, inputs: ()


def nearest_first(default: T, others: Iterable[T]) -> list[T]:
    """The others without the default, sorted by how many doublings of their numbers lie between them and it."""

    def distance(other: T) -> tuple[int, str]:
        pairs = zip(flat(other), flat(default), strict=True)
        return sum(abs(int(a).bit_length() - int(b).bit_length()) for a, b in pairs), repr(other)

    return sorted({other for other in others if other != default}, key=distance)
