"""Norms. Weights are float32 whatever the model computes in."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.kernels.norm.ref import rms_norm, rms_norm_
from thalweg.layers.linear import parameter
from thalweg.layers.part import Part


class RMSNorm(Part):
    """x / sqrt(mean(x²) + eps) · weight over the last dim, computed in float32, returned in x's dtype."""

    def __init__(self, dim: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(dim, dtype=torch.float32, device=device)
        floor, zero = torch.tensor((dim * eps) ** 0.5, device=device), torch.tensor(0.0, device=device)
        self._given = (self.weight.data, floor, zero)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, *self._given)

    before = forward

    def forward_(self, x: Tensor) -> Tensor:
        """The same, in place."""
        return rms_norm_(x, *self._given)


class LayerNorm(Part):
    """(x - mean) / sqrt(var + eps) · weight + bias over the last dim, computed in float32, returned in x's dtype."""

    def __init__(self, dim: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(dim, dtype=torch.float32, device=device)
        self.bias = parameter(dim, dtype=torch.float32, device=device)
        self._shape, self.eps = (dim,), eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self.forward(x.float()).to(x.dtype)
        return torch.layer_norm(x, self._shape, self.weight, self.bias, self.eps)
