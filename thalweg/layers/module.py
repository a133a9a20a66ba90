"""The base of Thalweg's modules, and how they declare which checkpoint tensors fill them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from thalweg.quant.scheme import TensorSpec
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
        if isinstance(value, (nn.Module, nn.Parameter)):
            self.__dict__[name] = value

    def loads(
        self, parameter: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, transform: Transform = unchanged
    ) -> None:
        """The whole published tensor `name` fills `parameter`. dtype: as it is published."""
        self.weights.rules.append(WeightRule(TensorSpec(name, shape, dtype), parameter, transform=transform))


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)
