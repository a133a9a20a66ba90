"""What linear layers have in common: their parts, and the published tensors that fill them. And the MLP of two."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.layers.module import Module
from thalweg.layers.residual import Activation, ResidualStream
from thalweg.quant.scheme import Quantized, Take
from thalweg.weights.table import Transform, unchanged


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a packed linear that come from one published tensor."""

    name: str  # of the published layer, without ".weight"
    rows: int  # as published
    here: range | None = None  # those on this rank; None is all
    reorder: Transform = unchanged  # of the rows on this rank

    @property
    def width(self) -> int:
        """Rows on this rank."""
        return self.rows if self.here is None else len(self.here)


def taken(rows: range | None = None, columns: range | None = None) -> Take:
    """The slice of a published matrix with these rows and columns; None is all of them."""
    row_slice, column_slice = (slice(None) if x is None else slice(x.start, x.stop) for x in (rows, columns))
    if columns is not None:
        return row_slice, column_slice
    return () if rows is None else (row_slice,)


class LinearLayer(Module, ABC):
    """y = x Wᵀ (+ b) of two-dimensional x. A packed layer has one part for each published tensor, below one another.

    A row-parallel layer reads some of the input columns, and its result is a partial sum.
    """

    def __init__(self, widths: Sequence[int], is_partial: bool = False) -> None:
        super().__init__()
        self.widths, self.is_partial = list(widths), is_partial

    @abstractmethod
    def forward(self, x: Activation) -> Tensor: ...

    @abstractmethod
    def add_(self, h: Tensor, x: Activation) -> Tensor:
        """h += x Wᵀ (+ b), in place."""

    @abstractmethod
    def swiglu(self, x: Activation) -> Tensor:
        """silu(gate) · up of the result, whose first half are the gates."""

    def split(self, x: Activation) -> tuple[Tensor, ...]:
        """The result, one view for each part."""
        return torch.split(self.forward(x), self.widths, 1)

    def load_parts(
        self, parts: Sequence[Part], inputs: int, published: torch.dtype, has_bias: bool, held: Quantized | None = None
    ) -> None:
        """The published tensors of the parts fill `weight` (and `bias`)."""
        row = 0
        for part in parts:
            into, take = (slice(row, row + part.width),), taken(part.here)
            shape = (part.rows, inputs)
            self.loads("weight", f"{part.name}.weight", shape, published, part.reorder, into, take, held)
            if has_bias:
                self.loads("bias", f"{part.name}.bias", (part.rows,), published, part.reorder, into, take)
            row += part.width

    def load_row(
        self,
        name: str,
        shape: tuple[int, int],
        published: torch.dtype,
        columns: range | None,
        held: Quantized | None = None,
    ) -> None:
        """The published tensor fills `weight`, cut by its columns."""
        self.loads("weight", f"{name}.weight", shape, published, take=taken(columns=columns), held=held)

    def load_bias(self, name: str, outputs: int, published: torch.dtype, is_here: bool) -> None:
        """One rank holds the bias of a linear that several ranks compute parts of."""
        if is_here:
            self.loads("bias", f"{name}.bias", (outputs,), published)
        else:
            self.weights.skips.append(re.escape(f"{name}.bias"))


class Mlp(Module):
    """The SwiGLU MLP: down(silu(gate x) · up x). gate_up: gate rows first, then up."""

    def __init__(self, gate_up: LinearLayer, down: LinearLayer) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def add_to(self, h: ResidualStream, x: Activation, real_T: Tensor | None = None) -> None:
        """h += mlp(x); padding is computed, too."""
        h.add(self.down, self.gate_up.swiglu(x))
