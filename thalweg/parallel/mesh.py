"""The mesh of the processes that share a model: which rank of which axis each process is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from thalweg.parallel.axis import SINGLE, Axis
from thalweg.parallel.layout import Layout
from thalweg.parallel.pipeline import Pipe
from thalweg.parallel.process_axis import ProcessAxis


class MeshSizes(NamedTuple):
    """Sizes of the axes. The processes are pp x dp x cp x tp, tensor-parallel ranks are neighbours, and those of the
    last pipeline stage come first.
    """

    tp: int = 1  # ranks that share attention heads
    dp: int = 1  # groups of them with requests of their own
    ep: int = 1  # groups of ranks that the experts are divided over
    dense: int = 1  # ranks that share the width of dense MLPs: tp or 1
    pp: int = 1  # pipeline stages
    cp: int = 1  # groups of tp ranks that divide the tokens of a step
    dcp: int = 1  # neighbouring tensor-parallel ranks that share the KV of each sequence

    @property
    def stage(self) -> int:
        """Processes of a pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        return self.stage * self.pp


MakeAxis = Callable[[str, tuple[int, ...]], Axis]  # of this name and these processes, in rank order


def axis_ranks(sizes: MeshSizes, rank: int) -> dict[str, tuple[int, ...]]:
    """The processes of each axis of a process, by name."""
    tp, stage, moe_tp = sizes.tp, sizes.stage, sizes.stage // sizes.ep
    place, own = divmod(rank, stage)
    of_tokens, of_tp = divmod(own, tp)  # of_tokens: the number of its dp and cp ranks together
    first = of_tokens // sizes.cp * sizes.cp * tp  # of the ranks with the same requests
    of_ep, of_moe_tp = divmod(own, moe_tp)
    of_stage = {
        "tp": range(of_tokens * tp, (of_tokens + 1) * tp),
        "cp": range(first + of_tp, first + sizes.cp * tp, tp),
        "dp": range(of_tp, stage, tp),
        "dcp": range(own - own % sizes.dcp, own - own % sizes.dcp + sizes.dcp),
        "ep": range(of_moe_tp, stage, moe_tp),
        "moe_tp": range(of_ep * moe_tp, (of_ep + 1) * moe_tp),
    }
    stages = tuple(range(own, sizes.world, stage))
    return {
        **{name: tuple(place * stage + other for other in ranks) for name, ranks in of_stage.items()},
        "hidden": stages,
        "published": stages,
        "world": tuple(range(sizes.world)),
    }


def layout_of(sizes: MeshSizes, rank: int, axis: MakeAxis) -> Layout:
    """The layout of one process."""
    axes = {name: axis(name, ranks) if len(ranks) > 1 else SINGLE for name, ranks in axis_ranks(sizes, rank).items()}
    dense = axes["tp"] if sizes.dense > 1 else SINGLE
    pipe = Pipe(axes["hidden"], axes["published"])
    ranks = axes["tp"], axes["dp"], dense, axes["ep"], axes["moe_tp"], axes["world"]
    return Layout(*ranks, pipe, cp=axes["cp"], dcp=axes["dcp"])


def are_on_one_node(ranks: Iterable[int], nodes: Sequence[int]) -> bool:
    """nodes: of each process; (): all are on one."""
    return len({nodes[rank] for rank in ranks if nodes}) < 2


def build_mesh(
    sizes: MeshSizes, device: torch.device, timeout: float | None = None, nodes: Sequence[int] = ()
) -> Layout:
    """The layout of this process. All connected processes call this together: a group is made by all of them in the
    same order. timeout: seconds that a collective may take; None: as the library has it. nodes: see
    `are_on_one_node`.
    """
    limit = None if timeout is None else timedelta(seconds=timeout)
    rank = dist.get_rank()
    every = dict.fromkeys(
        (name == "published", ranks)
        for other in range(sizes.world)
        for name, ranks in axis_ranks(sizes, other).items()
        if len(ranks) > 1
    )
    groups = {(is_own, ranks): dist.new_group(list(ranks), timeout=limit) for is_own, ranks in every}

    @cache
    def of_group(is_own: bool, ranks: tuple[int, ...]) -> Axis:
        group = groups[is_own, ranks]
        assert group is not None, "torch returns a group to each of its ranks"
        own = ranks.index(rank), device.type == "cpu"
        return ProcessAxis(group, len(ranks), *own, is_on_one_node=are_on_one_node(ranks, nodes))

    layout = layout_of(sizes, rank, lambda name, ranks: of_group(name == "published", ranks))
    layout.pipe.connect(device)
    return layout
