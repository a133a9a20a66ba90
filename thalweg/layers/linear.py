"""Linear layers and the token embedding. Parameters are empty: a loader fills them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from thalweg.kernels.gemm.warm import nothing, warm_for
from thalweg.layers.part import Part


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


def neighbours(*shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[nn.Parameter]]:
    """Parameters of these shapes side by side in one memory, and that memory: to be read ahead at once."""
    memory = torch.empty(sum(math.prod(shape) for shape in shapes), dtype=dtype, device=device)
    parts = torch.split(memory, [math.prod(shape) for shape in shapes])
    return memory, [
        nn.Parameter(part.view(shape), requires_grad=False) for part, shape in zip(parts, shapes, strict=True)
    ]


class Linear(Part):
    """y = x Wᵀ (+ b); weight [out, in]. A weight that is given is one of `neighbours`, whose owner reads them ahead."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dtype: torch.dtype,
        device: torch.device,
        bias: bool = False,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype, device=device) if weight is None else weight
        self.bias = parameter(outputs, dtype=dtype, device=device) if bias else None
        self._turned = self.weight.data.t()  # a view: loading is in place
        self._warm = warm_for(self.weight) if weight is None else nothing

    def forward(self, x: Tensor) -> Tensor:
        """x: two-dimensional."""
        self._warm(self._turned)
        y = torch.mm(x, self._turned)
        return y if self.bias is None else y.add_(self.bias)

    def add_(self, h: Tensor, x: Tensor) -> Tensor:
        """h += x Wᵀ (+ b), in place: the residual sum costs no pass of its own. h, x: two-dimensional."""
        self._warm(self._turned)
        h.addmm_(x, self._turned)
        return h if self.bias is None else h.add_(self.bias)


class Embedding(Part):
    """Rows of a [vocabulary, hidden] table; as a head, its scores."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(vocab, hidden, dtype=dtype, device=device)
        self._turned = self.weight.data.t()
        self._warm = warm_for(self.weight)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.weight.index_select(0, ids_T)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 [N, vocabulary]."""
        self._warm(self._turned)
        return torch.mm(hidden_NH, self._turned).float()
