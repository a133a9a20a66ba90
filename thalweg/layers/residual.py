"""The residual stream of a forward: what sublayers read through a norm and add to.

On one rank an addition is the epilogue of the product that makes it. On several ranks a sublayer leaves a partial sum,
which stays pending until the stream is read: then one reduction settles it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.layers.interface import Activation, Addend, ExpertBlock, Norm, ResidualStream
from thalweg.parallel.axis import Axis
from thalweg.parallel.layout import Layout


def rows_of(x: Activation) -> Tensor:
    """The rows of an activation, computed if they have not been."""
    return x if isinstance(x, Tensor) else x.rows()


def stream(layout: Layout, x_TH: Tensor, is_partial: bool = False) -> ResidualStream:
    """A residual stream that begins with x. is_partial: x is this rank's part of a sum over tensor-parallel ranks."""
    return SingleStream(x_TH) if layout.is_single else ShardedStream(x_TH, layout.tp, is_partial)


class SingleStream:
    """The stream on one rank: additions edit x in place."""

    __slots__ = ("x_TH",)

    def __init__(self, x_TH: Tensor) -> None:
        self.x_TH = x_TH

    def add(self, linear: Addend, x: Activation) -> None:
        linear.add_(self.x_TH, x)

    def add_experts(self, experts: ExpertBlock, x: Activation, real_T: Tensor | None) -> None:
        experts.add_(self.x_TH, x, real_T)

    def normed(self, norm: Norm) -> Activation:
        return norm.lazy(self.x_TH)

    def value(self) -> Tensor:
        return self.x_TH


class ShardedStream:
    """The stream on one of several ranks. x holds settled rows, which are equal on all tensor-parallel ranks, and
    `pending` what is still to be added.
    """

    __slots__ = ("axis", "pending_TH", "x_TH")

    def __init__(self, x_TH: Tensor, axis: Axis, is_partial: bool = False) -> None:
        """axis: the tensor-parallel ranks. is_partial: x is this rank's part of a sum, as of a vocabulary that is cut.
        The stream edits x.
        """
        self.axis = axis
        self.x_TH = torch.zeros_like(x_TH) if is_partial else x_TH
        self.pending_TH: Tensor | None = x_TH if is_partial else None

    def add(self, linear: Addend, x: Activation) -> None:
        if not linear.is_partial:
            self.value()
            linear.add_(self.x_TH, x)
        elif self.pending_TH is None:
            self.pending_TH = linear.forward(x)
        elif self.pending_TH.dtype == self.x_TH.dtype:
            linear.add_(self.pending_TH, x)
        else:  # what other ranks' experts have sent back is float32
            self.pending_TH = self.pending_TH + linear.forward(x)

    def add_experts(self, experts: ExpertBlock, x: Activation, real_T: Tensor | None) -> None:
        if not experts.is_partial:
            experts.add_(self.value(), x, real_T)
            return
        partial_TH = experts.partial(x, real_T)
        self.pending_TH = partial_TH if self.pending_TH is None else self.pending_TH + partial_TH

    def normed(self, norm: Norm) -> Activation:
        kernel = self.axis.sum_and_norm
        if self.pending_TH is None or kernel is None or not kernel.takes(lazy := norm.lazy(self.x_TH)):
            return norm.lazy(self.value())
        (self.x_TH, normed), self.pending_TH = kernel(self.pending_TH, lazy), None
        return normed

    def value(self) -> Tensor:
        if self.pending_TH is not None:
            self.axis.add_(self.x_TH, self.pending_TH)
            self.pending_TH = None
        return self.x_TH
