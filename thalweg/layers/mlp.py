"""The SwiGLU MLP: down(silu(gate x) · up x)."""

from __future__ import annotations

from torch import Tensor

from thalweg.layers.linear import LinearLayer
from thalweg.layers.module import Module
from thalweg.layers.residual import Activation, ResidualStream


class Mlp(Module):
    """gate_up: gate rows first, then up."""

    def __init__(self, gate_up: LinearLayer, down: LinearLayer) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def add_to(self, h: ResidualStream, x: Activation, real_T: Tensor | None = None) -> None:
        """h += mlp(x); padding is computed, too."""
        h.add(self.down, self.gate_up.swiglu(x))
