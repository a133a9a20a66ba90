"""Parts that the self-checks of kernel libraries share: a small result, computed and compared with the exact one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# raised by a library that is not the one we know
FAILURES = RuntimeError, AttributeError, TypeError, ValueError, OSError, AssertionError, ImportError


def check_results(
    library: str, instead: str, run: Callable[[], Sequence[Tensor]], exact: Sequence[Tensor], tolerance: float
) -> None:
    """Raises RuntimeError if the library cannot run here, or a result is wrong by more than `tolerance` of its norm.

    instead: what to do then.
    """
    try:
        results = [result.double().cpu() for result in run()]
    except FAILURES as error:
        raise RuntimeError(f"{library} does not run here ({error}): {instead}") from error
    pairs = [(result, right.double().cpu()) for result, right in zip(results, exact, strict=True)]
    errors = ((result - right).norm() / right.norm() for result, right in pairs)
    wrong = max(float(error.nan_to_num(torch.inf)) for error in errors)  # `max` would pass over what is no number
    if not wrong < tolerance:
        raise RuntimeError(f"{library} is wrong here by {wrong:.3f} of the norm: {instead}")
