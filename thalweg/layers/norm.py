"""Norms. Weights are float32 whatever the model computes in (facts §2.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.kernels.norm.ref import rms_norm, rms_norm_
from thalweg.layers.linear import parameter


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dim, computed in float32, returned in x's dtype."""

    floor: Tensor
    zero: Tensor

    def __init__(self, dim: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(dim, dtype=torch.float32, device=device)
        self.register_buffer("floor", torch.tensor((dim * eps) ** 0.5, device=device), persistent=False)
        self.register_buffer("zero", torch.tensor(0.0, device=device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.floor, self.zero)

    def forward_(self, x: Tensor) -> Tensor:
        """The same, in place."""
        return rms_norm_(x, self.weight, self.floor, self.zero)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) · weight + bias over the last dim, computed in float32, returned in x's dtype."""

    def __init__(self, dim: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(dim, dtype=torch.float32, device=device)
        self.bias = parameter(dim, dtype=torch.float32, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return F.layer_norm(x.float(), weight.shape, weight, self.bias, self.eps).to(x.dtype)
