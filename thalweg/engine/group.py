"""The processes that share a copy of a model: who leads whom, and what connects them.

Every data-parallel rank has one scheduler, in the process of its first tensor-parallel rank, the leader. The leader's
plans go to the rank's other processes, the followers, which decide nothing. Leaders agree on each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
        return self.layout.tp.rank == 0


ALONE = RankContext()


def timeout_of(config: EngineConfig) -> float:
    """Seconds without progress after which a rank counts as lost."""
    return config.watchdog_timeout or 1e6


def members_of(config: EngineConfig, folder: Path) -> list[Member]:
    """All processes of an engine, copy by copy. folder: empty, for files of their start."""
    return [member for copy in range(config.copies) for member in _copy(config, copy, folder / f"copy{copy}")]


def _copy(config: EngineConfig, copy: int, store: Path) -> list[Member]:
    tp, first = config.attention_tp, copy * config.tp_size
    if config.tp_size == 1:
        return [Member(device=first, name=f"copy {copy}" if config.copies > 1 else "")]
    names = [rank_name(config, copy, rank) for rank in range(config.tp_size)]
    wake_pipes, step_records = [WakePipe() for _ in names], None
    if config.attention_dp > 1:
        step_records = StepRecords(wake_pipes[::tp], names[::tp], timeout_of(config))
    channels = [
        PlanChannel(wake_pipes[leader : leader + tp], names[leader : leader + tp]) if tp > 1 else None
        for leader in range(0, config.tp_size, tp)
    ]
    return [
        Member(rank, first + rank, names[rank], store, wake_pipes[rank], step_records, channels[rank // tp])
        for rank in range(config.tp_size)
    ]


def rank_name(config: EngineConfig, copy: int, rank: int) -> str:
    """Of a process, by its number in its copy: "rank 1 (DP 0, TP 1)"."""
    dp, tp = divmod(rank, config.attention_tp)
    places = [f"copy {copy}"] * (config.copies > 1) + [f"DP {dp}"] * (config.attention_dp > 1)
    return f"rank {copy * config.tp_size + rank} ({', '.join([*places, f'TP {tp}'])})"


def leaders_of(config: EngineConfig, members: Sequence[Member]) -> list[Member]:
    return [member for member in members if member.rank % config.attention_tp == 0]


def join(config: EngineConfig, member: Member, lost: Callable[[], str] = nothing_lost) -> RankContext:
    """Connects this process with the others of its copy. All of them call this together. lost: see `connect`."""
    if config.processes == 1:
        return RankContext(member)
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", member.device)
        torch.cuda.set_device(device)
    if config.tp_size == 1:
        return RankContext(member, device=device)
    # some ranks wait for others already while these compile or load, so a start's time is the limit
    timeout = max(timeout_of(config), config.restart_timeout)
    store = connect(member.store, member.rank, config.tp_size, device, timeout, lost)
    sizes = MeshSizes(config.attention_tp, config.attention_dp, config.ep_size, config.moe_dense_tp_size)
    layout = build_mesh(sizes, device)
    del store  # torch holds it in C++ only, which does not keep a Python object alive
    return RankContext(member, layout, device)
