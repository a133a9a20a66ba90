"""The steps after a matrix product in the same launch: bias, residual, where the result goes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Epilogue(NamedTuple):
    """y = x Wᵀ + bias + residual. A residual and an `out` exclude each other."""

    bias_N: Tensor | None = None
    residual_MN: Tensor | None = None  # added to, in place: the result is this tensor
    out_MN: Tensor | None = None  # the result is stored here, without a residual: one rank's part of a sum
    dtype: torch.dtype | None = None  # of a new result; None is x's

    def result(self, rows: int, columns: int, x: Tensor) -> Tensor:
        """The tensor that the product writes."""
        if self.residual_MN is not None:
            return self.residual_MN
        if self.out_MN is not None:
            return self.out_MN
        return torch.empty(rows, columns, dtype=self.dtype or x.dtype, device=x.device)

    def finish(self, y_MN: Tensor) -> Tensor:
        """Adds or stores a product that a library has returned or written into `result`."""
        if self.residual_MN is not None:
            return self.residual_MN.add_(y_MN)
        return y_MN if self.out_MN is None or y_MN is self.out_MN else self.out_MN.copy_(y_MN)


PLAIN = Epilogue()
