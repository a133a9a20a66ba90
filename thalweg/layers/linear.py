"""Linear layers and the token embedding in plain torch. Parameters are empty: a loader fills them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.kernels.gemm.warm import nothing, warm_for
from thalweg.layers.module import Module, parameter
from thalweg.quant.scheme import Quantized, TensorSpec
from thalweg.weights.table import Transform, WeightRule, WeightTable, unchanged


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

    @property
    def take(self) -> slice:
        return slice(None) if self.here is None else slice(self.here.start, self.here.stop)


def declare_packed(
    table: WeightTable,
    parts: Sequence[Part],
    inputs: int,
    dtype: torch.dtype,
    has_bias: bool,
    held: Quantized | None = None,
) -> None:
    """The published tensors of the parts fill `weight` (and `bias`), below one another. dtype: as published."""
    row = 0
    for part in parts:
        into = (slice(row, row + part.width),)
        take = () if part.here is None else (part.take,)
        weight = TensorSpec(f"{part.name}.weight", (part.rows, inputs), dtype)
        table.rules.append(WeightRule(weight, "weight", into, take, part.reorder, held))
        if has_bias:
            bias = TensorSpec(f"{part.name}.bias", (part.rows,), dtype)
            table.rules.append(WeightRule(bias, "bias", into, take, part.reorder))
        row += part.width


def declare_row(
    table: WeightTable,
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    columns: range | None,
    held: Quantized | None = None,
) -> None:
    """The published tensor fills `weight`, cut by its columns."""
    take = () if columns is None else (slice(None), slice(columns.start, columns.stop))
    table.rules.append(WeightRule(TensorSpec(f"{name}.weight", shape, dtype), "weight", (), take, unchanged, held))


def declare_row_bias(table: WeightTable, name: str, outputs: int, dtype: torch.dtype, is_here: bool) -> None:
    """The bias of a linear that several ranks compute a part of is on one of them."""
    if is_here:
        table.rules.append(WeightRule(TensorSpec(f"{name}.bias", (outputs,), dtype), "bias"))
    else:
        table.skips.append(re.escape(f"{name}.bias"))


class Linear(Module):
    """y = x Wᵀ (+ b); weight [out, in]. x and y are two-dimensional.

    A packed linear has one part for each published tensor. A row-parallel one reads some of the input columns, and its
    result is a partial sum.
    """

    def __init__(
        self,
        widths: Sequence[int],
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        has_bias: bool,
        is_partial: bool = False,
    ) -> None:
        super().__init__()
        self.widths, self.is_partial = list(widths), is_partial
        self.weight = parameter(sum(widths), inputs, dtype=dtype, device=device)
        self.bias = parameter(sum(widths), dtype=dtype, device=device) if has_bias else None
        self._prefetch = warm_for(self.weight)
        self.refresh()

    def refresh(self) -> None:
        """The weight lies elsewhere now."""
        self._transposed = self.weight.data.t()  # a view: loading is in place

    def prefetched(self) -> None:
        """Somebody else reads the weight ahead, with its neighbours in memory."""
        self._prefetch = nothing
        self.refresh()

    def forward(self, x: Tensor) -> Tensor:
        self._prefetch(self._transposed)
        y = torch.mm(x, self._transposed)
        return y if self.bias is None else y.add_(self.bias)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """The result, one view for each part."""
        return torch.split(self.forward(x), self.widths, 1)

    def add_(self, h: Tensor, x: Tensor) -> Tensor:
        """h += x Wᵀ (+ b), in place: the residual sum costs no pass of its own."""
        self._prefetch(self._transposed)
        h.addmm_(x, self._transposed)
        return h if self.bias is None else h.add_(self.bias)

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(gate) · up of the result, whose first half are the gates."""
        gate, up = self.forward(x).chunk(2, -1)
        return F.silu(gate).mul_(up)


class Embedding(Module):
    """Rows of a [vocabulary, hidden] table; as a head, its scores. `here`: the rows on this rank."""

    def __init__(
        self,
        name: str,
        vocab: int,
        hidden: int,
        here: range,
        published: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = parameter(len(here), hidden, dtype=dtype, device=device)
        self.here, self.is_partial = here, len(here) < vocab
        declare_rows(self.weights, name, (vocab, hidden), here, published)
        self._transposed = self.weight.data.t()
        self._prefetch = warm_for(self.weight)

    def forward(self, ids_T: Tensor) -> Tensor:
        """[T, hidden]; with a part of the vocabulary, zeros for tokens of the others."""
        if not self.is_partial:
            return self.weight.index_select(0, ids_T)
        return embed_some(self.weight, ids_T, self.here)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 [N, rows here]."""
        self._prefetch(self._transposed)
        return torch.mm(hidden_NH, self._transposed).float()


def declare_rows(table: WeightTable, name: str, shape: tuple[int, int], here: range, dtype: torch.dtype) -> None:
    """The rows `here` of the published tensor fill `weight`."""
    take = () if len(here) == shape[0] else (slice(here.start, here.stop),)
    table.rules.append(WeightRule(TensorSpec(f"{name}.weight", shape, dtype), "weight", (), take))


def embed_some(weight_VH: Tensor, ids_T: Tensor, here: range) -> Tensor:
    """The rows of tokens in this part of the vocabulary, zeros for others."""
    row_T = ids_T - here.start
    inside_T = (row_T >= 0) & (row_T < len(here))
    return weight_VH.index_select(0, row_T * inside_T) * inside_T.unsqueeze(1)


def place_together(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Moves parameters side by side into one memory, to be read ahead at once. Returns that memory."""
    memory = torch.empty(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    for part, p in zip(torch.split(memory, [p.numel() for p in parameters]), parameters, strict=True):
        p.data = part.view(p.shape)
    return memory
