"""Linear layers, norms and the token embedding in plain torch, and what linear layers of any kind have in common.

Parameters are empty: a loader fills them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.kernels.gemm.prefetch import no_prefetch, prefetch_for
from thalweg.kernels.norm.ref import rms_norm, rms_norm_
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.module import Module, parameter
from thalweg.parallel.axis import vocabulary_of
from thalweg.quant.scheme import Quantized, Take
from thalweg.weights.table import Transform, unchanged

if TYPE_CHECKING:
    from thalweg.layers.factory import LayerFactory  # makes these


@dataclass(frozen=True, slots=True)
class PackedShard:
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

    def computes_norm(self, rows: int) -> bool:
        """Whether its kernel computes a norm of so many rows itself, as it reads them."""
        return False

    def split(self, x: Activation) -> tuple[Tensor, ...]:
        """The result, one view for each part."""
        return torch.split(self.forward(x), self.widths, 1)

    def load_parts(
        self,
        parts: Sequence[PackedShard],
        inputs: int,
        published: torch.dtype,
        has_bias: bool,
        held: Quantized | None = None,
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


class Linear(LinearLayer):
    """weight [out, in], and a bias where the model has one."""

    def __init__(
        self, layers: LayerFactory, widths: Sequence[int], inputs: int, has_bias: bool, is_partial: bool = False
    ) -> None:
        super().__init__(widths, is_partial)
        self.weight = parameter(sum(widths), inputs, dtype=layers.dtype, device=layers.device)
        self.bias = parameter(sum(widths), dtype=layers.dtype, device=layers.device) if has_bias else None
        self._prefetch = prefetch_for(self.weight)
        self.refresh()

    def refresh(self) -> None:
        """The weight lies elsewhere now."""
        self._transposed = self.weight.data.t()  # a view: loading is in place

    def prefetched(self) -> None:
        """Another layer reads the weight ahead, with its neighbours in memory."""
        self._prefetch = no_prefetch
        self.refresh()

    def forward(self, x: Tensor) -> Tensor:
        self._prefetch(self._transposed)
        y = torch.mm(x, self._transposed)
        return y if self.bias is None else y.add_(self.bias)

    def add_(self, h: Tensor, x: Tensor) -> Tensor:
        """The residual sum costs no pass of its own."""
        self._prefetch(self._transposed)
        h.addmm_(x, self._transposed)
        return h if self.bias is None else h.add_(self.bias)

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = self.forward(x).chunk(2, -1)
        return F.silu(gate).mul_(up)


class Mlp(Module):
    """The SwiGLU MLP: down(silu(gate x) · up x). gate_up: gate rows first, then up."""

    def __init__(self, gate_up: LinearLayer, down: LinearLayer) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def add_to(self, h: ResidualStream, x: Activation, real_T: Tensor | None = None) -> None:
        """h += mlp(x); padding is computed, too."""
        h.add(self.down, self.gate_up.swiglu(x))


class RMSNorm(Module):
    """x / sqrt(mean(x²) + eps) · weight over the last dim, computed in float32, returned in x's dtype."""

    def __init__(self, layers: LayerFactory, name: str, dim: int, eps: float, reorder: Transform = unchanged) -> None:
        """reorder: of its dims."""
        super().__init__()
        device = layers.device
        self.weight = parameter(dim, dtype=torch.float32, device=device)
        self.loads("weight", f"{name}.weight", (dim,), layers.published, reorder)
        floor, zero = torch.tensor((dim * eps) ** 0.5, device=device), torch.tensor(0.0, device=device)
        self.eps, self._operands = eps, (self.weight.data, floor, zero)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, *self._operands)

    def lazy(self, x: Tensor) -> Activation:
        """The norm now; a GPU's is computed by its reader."""
        return rms_norm(x, *self._operands)

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


class Embedding(Module):
    """Rows of a [vocabulary, hidden] table; as a head, its scores. A rank may hold some of the rows."""

    def __init__(self, layers: LayerFactory, name: str, vocab: int, hidden: int) -> None:
        super().__init__()
        self.here = here = vocabulary_of(vocab, layers.layout.tp)  # the rows on this rank
        self.is_partial = len(here) < vocab
        self.weight = parameter(len(here), hidden, dtype=layers.dtype, device=layers.device)
        take = taken(here) if self.is_partial else ()
        self.loads("weight", f"{name}.weight", (vocab, hidden), layers.published, take=take)
        self._transposed = self.weight.data.t()
        self._prefetch = prefetch_for(self.weight)

    def forward(self, ids_T: Tensor) -> Tensor:
        """[T, hidden]; with a part of the vocabulary, zeros for tokens of the others."""
        if not self.is_partial:
            return self.weight.index_select(0, ids_T)
        row_T = ids_T - self.here.start
        inside_T = (row_T >= 0) & (row_T < len(self.here))
        return self.weight.index_select(0, row_T * inside_T) * inside_T.unsqueeze(1)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 [N, rows here]."""
        self._prefetch(self._transposed)
        return torch.mm(hidden_NH, self._transposed).float()


def place_together(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Moves parameters side by side into one memory, to be read ahead at once. Returns that memory."""
    memory = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    for part, p in zip(torch.split(memory, [p.numel() for p in parameters]), parameters, strict=True):
        p.data = part.view(p.shape)
    return memory
