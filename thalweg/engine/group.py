"""The processes that share a copy of a model: who leads whom, and what connects them.

Every data-parallel rank has one scheduler, in the process of its first tensor-parallel rank on the last pipeline stage,
the leader. The leader's plans go to the rank's other processes, the followers, which decide nothing. Leaders agree on
each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from thalweg.config.engine import EngineConfig
from thalweg.parallel.layout import SINGLE_RANK, Layout
from thalweg.parallel.mesh import MeshSizes, build_mesh
from thalweg.parallel.plan_channel import PlanChannel
from thalweg.parallel.process_axis import connect, nothing_lost
from thalweg.parallel.shared_memory import WakePipe
from thalweg.parallel.step_records import StepRecords


@dataclass(frozen=True)
class Member:
    """What a process of a copy gets at its start."""

    rank: int = 0  # among the processes of the copy
    device: int = 0  # number of its GPU
    name: str = ""  # for errors
    store: Path = Path()  # a file through which the processes find each other
    wake_pipe: WakePipe | None = None
    step_records: StepRecords | None = None  # of the leaders, if there are several
    plans: PlanChannel | None = None  # of its data-parallel rank, if that has followers


@dataclass(frozen=True)
class RankContext:
    """A process that has joined its copy."""

    member: Member = Member()
    layout: Layout = SINGLE_RANK
    device: torch.device | None = None  # None: the one that the configuration names

    @property
    def is_leader(self) -> bool:
        return self.layout.tp.rank == 0 and self.layout.pipe.is_last


ALONE = RankContext()


def timeout_of(config: EngineConfig) -> float:
    """Seconds without progress after which a rank counts as lost."""
    return config.watchdog_timeout or 1e6


def members_of(config: EngineConfig, folder: Path) -> list[Member]:
    """All processes of an engine, copy by copy. folder: empty, for files of their start."""
    return [member for copy in range(config.copies) for member in _copy(config, copy, folder / f"copy{copy}")]


def _copy(config: EngineConfig, copy: int, store: Path) -> list[Member]:
    count, first = config.copy_processes, copy * config.copy_processes
    if count == 1:
        return [Member(device=first, name=f"copy {copy}" if config.copies > 1 else "")]
    names = [rank_name(config, copy, rank) for rank in range(count)]
    wake_pipes, step_records = [WakePipe() for _ in names], None
    groups = [[rank for rank in range(count) if place_of(config, rank).dp == dp] for dp in range(config.attention_dp)]
    if config.attention_dp > 1:
        leaders = [ranks[0] for ranks in groups]
        step_records = StepRecords(
            [wake_pipes[rank] for rank in leaders], [names[rank] for rank in leaders], timeout_of(config)
        )
    channels = [
        PlanChannel([wake_pipes[rank] for rank in ranks], [names[rank] for rank in ranks]) if len(ranks) > 1 else None
        for ranks in groups
    ]
    return [
        Member(
            rank, first + rank, names[rank], store, wake_pipes[rank], step_records, channels[place_of(config, rank).dp]
        )
        for rank in range(count)
    ]


class Place(NamedTuple):
    """Of a process in its copy of the model."""

    stage: int  # of the pipeline, from 0, which embeds
    dp: int
    tp: int
    number: int  # in its data-parallel rank: 0 is the leader, the others are its followers in this order


def place_of(config: EngineConfig, rank: int) -> Place:
    """rank: a process's number in its copy. See `parallel.mesh`."""
    behind, own = divmod(rank, config.tp_size)
    dp, tp = divmod(own, config.attention_tp)
    return Place(config.pp_size - 1 - behind, dp, tp, behind * config.attention_tp + tp)


def mesh_of(config: EngineConfig) -> MeshSizes:
    sizes = config.attention_tp, config.attention_dp, config.ep_size, config.moe_dense_tp_size
    return MeshSizes(*sizes, config.pp_size)


def rank_name(config: EngineConfig, copy: int, rank: int) -> str:
    """Of a process, by its number in its copy: "rank 1 (DP 0, TP 1)"."""
    place = place_of(config, rank)
    places = {
        f"copy {copy}": config.copies > 1,
        f"PP {place.stage}": config.pp_size > 1,
        f"DP {place.dp}": config.attention_dp > 1,
        f"TP {place.tp}": config.tp_size > 1,
    }
    return (
        f"rank {copy * config.copy_processes + rank} ({', '.join(name for name, is_said in places.items() if is_said)})"
    )


def leaders_of(config: EngineConfig, members: Sequence[Member]) -> list[Member]:
    return [member for member in members if place_of(config, member.rank).number == 0]


def join(config: EngineConfig, member: Member, lost: Callable[[], str] = nothing_lost) -> RankContext:
    """Connects this process with the others of its copy. All of them call this together. lost: see `connect`."""
    if config.processes == 1:
        return RankContext(member)
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", member.device)
        torch.cuda.set_device(device)
    if config.copy_processes == 1:
        return RankContext(member, device=device)
    # some ranks wait for others already while these compile or load, so a start's time is the limit
    timeout = max(timeout_of(config), config.restart_timeout)
    store = connect(member.store, member.rank, config.copy_processes, device, timeout, lost)
    layout = build_mesh(mesh_of(config), device, timeout)
    del store  # torch holds it in C++ only, which does not keep a Python object alive
    return RankContext(member, layout, device)
