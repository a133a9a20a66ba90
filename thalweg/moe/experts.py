"""The routed experts of a MoE layer, stacked."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thalweg.config.model import Moe
from thalweg.kernels.experts.ref import add_experts_
from thalweg.kernels.gemm.warm import warm_for


class Experts(nn.Module):
    """w13: gate rows, then up rows of each expert [E, 2 I, H]; w2: [E, H, I]. Loaded in place: the views on them stay valid."""

    def __init__(self, moe: Moe, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size = moe.intermediate
        self.w13 = nn.Parameter(
            torch.empty(moe.experts, 2 * size, hidden, dtype=dtype, device=device), requires_grad=False
        )
        self.w2 = nn.Parameter(torch.empty(moe.experts, hidden, size, dtype=dtype, device=device), requires_grad=False)
        self._warm = warm_for(device)
        self._w13 = [weight.t() for weight in self.w13.data]
        self._w2 = [weight.t() for weight in self.w2.data]

    def add_(self, out_TH: Tensor, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """out (float32) += Σ_k weights · expert(x), in place."""
        return add_experts_(out_TH, x_TH, ids_TK, weights_TK, self._w13, self._w2, self._warm)
