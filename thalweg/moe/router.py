"""The router of a MoE layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thalweg.config.model import Moe
from thalweg.kernels.router import ref


class Router(nn.Module):
    """Weight and bias are float32 and so are the scores."""

    def __init__(self, moe: Moe, hidden: int, device: torch.device) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden, device=device), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if moe.method == "noaux_tc":
            self.bias = nn.Parameter(torch.empty(moe.experts, device=device), requires_grad=False)
        self._turned = self.weight.data.t()

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """→ weights float32 [T, topk], ids int64 [T, topk]."""
        moe, logits = self.moe, torch.mm(x_TH if x_TH.dtype == torch.float32 else x_TH.float(), self._turned)
        if self.bias is not None:
            return ref.noaux_tc(logits, self.bias, moe.topk, moe.scale, moe.groups, moe.topk_groups, moe.normalise)
        if moe.method == "greedy":
            return ref.greedy(logits, moe.topk, moe.scale)
        return ref.group_limited_greedy(logits, moe.topk, moe.scale, moe.groups, moe.topk_groups)
