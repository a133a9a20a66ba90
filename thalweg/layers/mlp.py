"""The SwiGLU MLP: down(silu(gate x) · up x)."""

from __future__ import annotations

from torch import Tensor

from thalweg.layers.interface import LayerFactory, PackedLinear
from thalweg.layers.linear import Part
from thalweg.layers.module import Module
from thalweg.layers.residual import Activation, Addend, ResidualStream
from thalweg.parallel.axis import Axis, width_of


class Mlp(Module):
    """gate_up: gate rows first, then up."""

    def __init__(self, gate_up: PackedLinear, down: Addend) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def add_to(self, h: ResidualStream, x: Activation, real_T: Tensor | None = None) -> None:
        """h += mlp(x); padding is computed, too."""
        h.add(self.down, self.gate_up.swiglu(x))


def make_mlp(layers: LayerFactory, name: str, hidden: int, intermediate: int, has_bias: bool, axis: Axis) -> Mlp:
    """An MLP of the published names gate_proj, up_proj and down_proj. axis: the ranks that share its width."""
    here = None if axis.size == 1 else width_of(intermediate, axis)
    gate_up = [Part(f"{name}.{half}_proj", intermediate, here) for half in ("gate", "up")]
    return Mlp(
        layers.packed(gate_up, hidden, has_bias),
        layers.row(f"{name}.down_proj", (hidden, intermediate), here, has_bias),
    )
