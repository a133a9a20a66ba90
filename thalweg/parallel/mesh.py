"""The mesh of the processes that share a model: which rank of which axis each process is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from thalweg.parallel.axis import SINGLE, Axis
from thalweg.parallel.layout import Layout
from thalweg.parallel.process_axis import ProcessAxis


class MeshSizes(NamedTuple):
    """Sizes of the axes. The processes are dp x tp, tensor-parallel ranks are neighbours."""

    tp: int = 1  # ranks that share attention heads
    dp: int = 1  # groups of them with requests of their own
    ep: int = 1  # groups of ranks that the experts are divided over
    dense: int = 1  # ranks that share the width of dense MLPs: tp or 1

    @property
    def world(self) -> int:
        return self.tp * self.dp


MakeAxis = Callable[[tuple[int, ...]], Axis]  # of these processes, in rank order


def axis_ranks(sizes: MeshSizes, rank: int) -> dict[str, tuple[int, ...]]:
    """The processes of each axis of a process, by name."""
    tp, world, moe_tp = sizes.tp, sizes.world, sizes.world // sizes.ep
    of_dp, of_tp = divmod(rank, tp)
    of_ep, of_moe_tp = divmod(rank, moe_tp)
    return {
        "tp": tuple(range(of_dp * tp, (of_dp + 1) * tp)),
        "dp": tuple(range(of_tp, world, tp)),
        "ep": tuple(range(of_moe_tp, world, moe_tp)),
        "moe_tp": tuple(range(of_ep * moe_tp, (of_ep + 1) * moe_tp)),
        "world": tuple(range(world)),
    }


def layout_of(sizes: MeshSizes, rank: int, axis: MakeAxis) -> Layout:
    """The layout of one process."""
    axes = {name: axis(ranks) if len(ranks) > 1 else SINGLE for name, ranks in axis_ranks(sizes, rank).items()}
    dense = axes["tp"] if sizes.dense > 1 else SINGLE
    return Layout(axes["tp"], axes["dp"], dense, axes["ep"], axes["moe_tp"], axes["world"])


def build_mesh(sizes: MeshSizes, device: torch.device) -> Layout:
    """The layout of this process. All connected processes call this together: a group is made by all of them in the
    same order.
    """
    rank = dist.get_rank()
    every = dict.fromkeys(
        ranks for other in range(sizes.world) for ranks in axis_ranks(sizes, other).values() if len(ranks) > 1
    )
    groups = {ranks: dist.new_group(list(ranks)) for ranks in every}

    @cache
    def axis(ranks: tuple[int, ...]) -> Axis:
        group = groups[ranks]
        assert group is not None, "torch returns a group to each of its ranks"
        return ProcessAxis(group, len(ranks), ranks.index(rank), device.type == "cpu")

    return layout_of(sizes, rank, axis)
