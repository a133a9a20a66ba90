"""Norms in plain torch. Weights are float32 whatever the model computes in."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.kernels.norm.ref import rms_norm, rms_norm_
from thalweg.layers.factory import LayerFactory
from thalweg.layers.module import Module, parameter
from thalweg.weights.table import Transform, unchanged


class RMSNorm(Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dim, computed in float32, returned in x's dtype."""

    def __init__(self, layers: LayerFactory, name: str, dim: int, eps: float, reorder: Transform = unchanged) -> None:
        """reorder: of its dims."""
        super().__init__()
        device = layers.device
        self.weight = parameter(dim, dtype=torch.float32, device=device)
        self.loads("weight", f"{name}.weight", (dim,), layers.published, reorder)
        floor, zero = torch.tensor((dim * eps) ** 0.5, device=device), torch.tensor(0.0, device=device)
        self._operands = (self.weight.data, floor, zero)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, *self._operands)

    lazy = forward  # a GPU's norm is computed by its reader

    def forward_(self, x: Tensor) -> Tensor:
        """The same, in place."""
        return rms_norm_(x, *self._operands)


class LayerNorm(Module):
    """(x - mean) / sqrt(var + eps) · weight + bias over the last dim, computed in float32, returned in x's dtype.
    Published in float32.
    """

    def __init__(self, layers: LayerFactory, name: str, dim: int, eps: float, reorder: Transform = unchanged) -> None:
        super().__init__()
        device = layers.device
        self.weight = parameter(dim, dtype=torch.float32, device=device)
        self.bias = parameter(dim, dtype=torch.float32, device=device)
        for parameter_name in ("weight", "bias"):
            self.loads(parameter_name, f"{name}.{parameter_name}", (dim,), torch.float32, reorder)
        self._shape, self.eps = (dim,), eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return self.forward(x.float()).to(x.dtype)
        return torch.layer_norm(x, self._shape, self.weight, self.bias, self.eps)
