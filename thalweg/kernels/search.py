"""What `thalweg tune` searches: the choices that there are for one operation and shape, and how each is tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thalweg.core.kernels import TuningValues
from thalweg.kernels.case import Inputs

Pair = tuple[Callable[[], Tensor], Callable[[], Tensor]]  # a result, and what it must come to


def nowhere(candidate: Any, given: Inputs) -> Sequence[Pair]:
    """No other uses."""
    return ()


def nothing(timed: Sequence[Any]) -> Sequence[Any]:
    """No further candidates."""
    return ()


@dataclass(frozen=True, slots=True)
class TuningSearch:
    """operation, key: of the choice, as `tuned` has them. label: of the case that is timed. default: what the
    operation's table says. candidates: others of its type. draw: inputs, as `case.Sized` draws them. run: of a
    candidate, results. reference: what they must come to, within `tolerance` of the largest. bytes: that a call reads,
    so that calls in a row read more than a cache holds. further: more candidates, from those that were timed, the
    fastest first. alike: candidates run the same kernels, so that there is nothing to compile for each. uses: the other
    ways in which a candidate that is chosen will be used, and what each must come to; held against it too.
    """

    operation: str
    key: TuningValues
    label: str
    default: Any
    candidates: tuple[Any, ...]
    draw: Callable[[torch.Generator, Inputs | None], Inputs]
    run: Callable[[Any, Inputs], tuple[Tensor, ...]]
    reference: Callable[[Inputs], tuple[Tensor, ...]]
    tolerance: float
    bytes: float
    further: Callable[[Sequence[Any]], Sequence[Any]] = nothing
    alike: bool = False
    uses: Callable[[Any, Inputs], Sequence[Pair]] = nowhere
