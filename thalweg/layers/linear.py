"""Linear layers and the token embedding. Parameters are empty: a loader fills them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.kernels.gemm.warm import warm_for


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ (+ b); weight [out, in]."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device, bias: bool = False) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype, device=device)
        self.bias = parameter(outputs, dtype=dtype, device=device) if bias else None
        self.warm = warm_for(device)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        self.warm(weight)
        return F.linear(x, weight, self.bias)

    def add_(self, h: Tensor, x: Tensor) -> Tensor:
        """h += x Wᵀ (+ b), in place: the residual sum costs no pass of its own. h, x: two-dimensional."""
        weight = self.weight
        self.warm(weight)
        h.addmm_(x, weight.t())
        return h if self.bias is None else h.add_(self.bias)


class Embedding(nn.Module):
    """Rows of a [vocabulary, hidden] table; as a head, its scores."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(vocab, hidden, dtype=dtype, device=device)
        self.warm = warm_for(device)

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.weight.index_select(0, ids_T)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 [N, vocabulary]."""
        weight = self.weight
        self.warm(weight)
        return F.linear(hidden_NH, weight).float()
