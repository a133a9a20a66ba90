"""A mixture-of-experts block: router, routed experts, shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.config.model import Moe
from thalweg.layers.mlp import Mlp
from thalweg.layers.part import Part
from thalweg.moe.experts import Experts
from thalweg.moe.router import Router


class MoeBlock(Part):
    """Σ_k w_k · expert_k(x) + shared(x); the shared experts are one MLP, without a gate."""

    def __init__(self, moe: Moe, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.router = Router(moe, hidden, device)
        self.experts = Experts(moe, hidden, dtype, device)
        self.shared = Mlp(hidden, moe.shared * moe.intermediate, dtype, device) if moe.shared else None

    def add_(self, h_TH: Tensor, x_TH: Tensor, real_T: Tensor | None = None) -> Tensor:
        """h += moe(x), in place; expert outputs are summed in float32. Padding is computed, too."""
        total = h_TH.float()  # itself when it is float32
        self.experts.add_(total, x_TH, *self.router.forward(x_TH))
        if total is not h_TH:
            h_TH.copy_(total)
        return h_TH if self.shared is None else self.shared.add_(h_TH, x_TH)
