"""y = x Wᵀ (+ b) (+ residual), each row by itself, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y [M, N] in `dtype` (default x's), summed in float32. residual_MN: added, and written: the result is then the
    residual itself.
    """
    rows = [torch.mv(w_NK.float(), x_K.float()) for x_K in x_MK]
    y = torch.stack(rows) if rows else x_MK.new_zeros(0, len(w_NK), dtype=torch.float32)
    if bias_N is not None:
        y = y + bias_N.float()
    if residual_MN is None:
        return y.to(dtype or x_MK.dtype)
    return residual_MN.copy_(y + residual_MN.float())
