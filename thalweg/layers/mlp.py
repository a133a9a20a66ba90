"""The SwiGLU MLP: down(silu(gate x) · up x)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.layers.linear import Linear
from thalweg.layers.part import Part


class Mlp(Part):
    """gate_up: gate rows first, then up."""

    def __init__(
        self, hidden: int, intermediate: int, dtype: torch.dtype, device: torch.device, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * intermediate, dtype, device, bias)
        self.down = Linear(intermediate, hidden, dtype, device, bias)

    def add_(self, h_TH: Tensor, x_TH: Tensor, real_T: Tensor | None = None) -> Tensor:
        """h += mlp(x), in place; padding is computed, too."""
        gate, up = self.gate_up.forward(x_TH).chunk(2, -1)
        return self.down.add_(h_TH, F.silu(gate).mul_(up))
