"""The base of Thalweg's modules, and how they declare which checkpoint tensors fill them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from thalweg.quant.scheme import Index, Quantized, Take, TensorSpec
from thalweg.weights.table import Transform, WeightRule, WeightTable, unchanged


class Module(nn.Module):
    """An nn.Module whose children and parameters are plain attributes too.

    nn.Module finds them through `__getattr__`, 0.6 µs each time: over a hundred times in a step of a small model, where
    an operation takes 1 to 3 µs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = WeightTable()  # of the parameters of this module itself, see `weights.table.table_of`

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, (nn.Module, nn.Parameter)) or (value is None and name in self.__dict__):
            self.__dict__[name] = value

    def loads(
        self,
        parameter: str,
        name: str,
        shape: tuple[int, ...],
        published: torch.dtype,
        transform: Transform = unchanged,
        into: Index = (),
        take: Take = (),
        held: Quantized | None = None,
    ) -> None:
        """The published tensor `name` fills `parameter`; see `weights.table.WeightRule`."""
        source = TensorSpec(name, shape, published)
        self.weights.rules.append(WeightRule(source, parameter, into, take, transform, held))


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
