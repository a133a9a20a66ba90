"""The processes that share a copy of a model: who leads whom, and what connects them.

Every data-parallel rank has one scheduler, in its first process on the last pipeline stage, the leader. The leader's
plans go to the rank's other processes, the followers, which decide nothing. Leaders agree on each step.

On several nodes each has as many of the processes, in order, and a relay copies what leaders send to other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from thalweg.config.engine import EngineConfig
from thalweg.parallel.layout import SINGLE_RANK, Layout
from thalweg.parallel.mesh import MeshSizes, build_mesh
from thalweg.parallel.plan_channel import PlanChannel
from thalweg.parallel.process_axis import Rendezvous, connect, nothing_lost
from thalweg.parallel.relay import Mirrors, SentPlans, SharedRecords
from thalweg.parallel.shared_memory import WakePipe
from thalweg.parallel.step_records import StepRecords


@dataclass(frozen=True)
class Member:
    """What a process of a copy gets at its start."""

    rank: int = 0  # among the processes of the copy
    device: int = 0  # number of its GPU
    name: str = ""  # for errors
    rendezvous: Rendezvous = Path()  # where the processes find each other
    wake_pipe: WakePipe | None = None
    step_records: StepRecords | None = None  # of the leaders, if there are several
    plans: PlanChannel | None = None  # of its data-parallel rank, if that has followers
    follower: int = 0  # of those that read these plans
    nodes: tuple[int, ...] = ()  # of each process of the copy; (): all are on one


@dataclass(frozen=True)
class RankContext:
    """A process that has joined its copy."""

    member: Member = Member()
    layout: Layout = SINGLE_RANK
    device: torch.device | None = None  # None: the one that the configuration names

    @property
    def is_leader(self) -> bool:
        return self.layout.tp.rank == self.layout.cp.rank == 0 and self.layout.pipe.is_last


ALONE = RankContext()


def timeout_of(config: EngineConfig) -> float:
    """Seconds without progress after which a rank counts as lost."""
    return config.watchdog_timeout or 1e6


def members_of(
    config: EngineConfig, rendezvous: Rendezvous, node: int = 0, mirrors: Mirrors | None = None
) -> list[Member]:
    """The processes of a node, copy by copy. rendezvous: an empty folder for files of their start, or an address.
    mirrors: gets what the node shares with others.
    """
    mirrors = Mirrors() if mirrors is None else mirrors
    return [member for copy in range(config.copies) for member in _copy(config, copy, rendezvous, node, mirrors)]


def named_members(config: EngineConfig) -> list[Member]:
    """The processes of all nodes, without what they share."""
    every = [(copy, rank) for copy in range(config.copies) for rank in range(config.copy_processes)]
    return [Member(rank, name=rank_name(config, copy, rank)) for copy, rank in every]


def _copy(config: EngineConfig, copy: int, rendezvous: Rendezvous, node: int, mirrors: Mirrors) -> list[Member]:
    count, first = config.copy_processes, copy * config.copy_processes
    nodes = tuple(config.node_of(first + rank) for rank in range(count))
    own = [rank for rank in range(count) if nodes[rank] == node]
    members = [Member(rank, (first + rank) % config.node_processes, rank_name(config, copy, rank)) for rank in own]
    if count == 1:
        return members
    wake_pipes, records = {rank: WakePipe() for rank in own}, None
    groups = [[rank for rank in range(count) if place_of(config, rank).dp == dp] for dp in range(config.attention_dp)]
    if len(groups) > 1:
        records = _records(config, copy, [ranks[0] for ranks in groups], wake_pipes, mirrors)
    channels = [_plans(config, copy, ranks, wake_pipes, mirrors) for ranks in groups]
    rendezvous = rendezvous / f"copy{copy}" if isinstance(rendezvous, Path) else rendezvous.part(f"copy{copy}")
    with_shared = list[Member]()
    for member in members:
        dp = place_of(config, member.rank).dp
        before = sum(rank in wake_pipes for rank in groups[dp][1:] if rank < member.rank)
        shared = replace(member, rendezvous=rendezvous, wake_pipe=wake_pipes[member.rank], step_records=records)
        with_shared.append(replace(shared, plans=channels[dp], follower=before, nodes=nodes))
    return with_shared


WakePipes = dict[int, WakePipe]  # of the processes of this node, by rank


def _records(
    config: EngineConfig, copy: int, leaders: Sequence[int], wake_pipes: WakePipes, mirrors: Mirrors
) -> StepRecords:
    """leaders: ranks, in the order of the data-parallel ranks."""
    relay, names = WakePipe(), [rank_name(config, copy, rank) for rank in leaders]
    records = StepRecords([wake_pipes.get(rank, relay) for rank in leaders], names, timeout_of(config))
    own = [dp for dp, rank in enumerate(leaders) if rank in wake_pipes]
    nodes = _nodes(config, copy, (rank for rank in leaders if rank not in wake_pipes))
    if own and nodes:
        mirrors.records[copy] = SharedRecords(records, own, nodes, relay)
    return records


def _plans(
    config: EngineConfig, copy: int, ranks: Sequence[int], wake_pipes: WakePipes, mirrors: Mirrors
) -> PlanChannel | None:
    """ranks: the leader and its followers. None where no two processes of this node share plans with each other or with
    a relay.
    """
    leader, *followers = ranks
    own, nodes = [rank for rank in followers if rank in wake_pipes], _nodes(config, copy, followers)
    number = copy * config.copy_processes + leader
    names = [rank_name(config, copy, rank) for rank in (leader, *own)]
    if leader not in wake_pipes:
        if not own:
            return None
        mirrors.received[number] = channel = PlanChannel([WakePipe(), *(wake_pipes[rank] for rank in own)], names)
        return channel
    others = [node for node in nodes if node != config.node_of(number)]
    pipes = [wake_pipes[rank] for rank in (leader, *own)]
    if others:
        channel = PlanChannel([*pipes, WakePipe()], [*names, "the relay to other nodes"])
        mirrors.sent[number] = SentPlans(channel, len(own), others)
        return channel
    return PlanChannel(pipes, names) if own else None


def _nodes(config: EngineConfig, copy: int, ranks: Iterable[int]) -> list[int]:
    """The nodes of these processes of a copy, each once."""
    return sorted({config.node_of(copy * config.copy_processes + rank) for rank in ranks})


class Place(NamedTuple):
    """Of a process in its copy of the model."""

    stage: int  # of the pipeline, from 0, which embeds
    dp: int
    cp: int
    tp: int
    number: int  # in its data-parallel rank: 0 is the leader, the others are its followers in this order


def place_of(config: EngineConfig, rank: int) -> Place:
    """rank: a process's number in its copy. See `parallel.mesh`."""
    behind, own = divmod(rank, config.tp_size)
    group, tp = divmod(own, config.attention_tp)
    dp, cp = divmod(group, config.attn_cp_size)
    inner = config.attention_tp * config.attn_cp_size  # processes of a stage with the same requests
    return Place(config.pp_size - 1 - behind, dp, cp, tp, behind * inner + cp * config.attention_tp + tp)


def mesh_of(config: EngineConfig) -> MeshSizes:
    sizes = config.attention_tp, config.attention_dp, config.ep_size, config.moe_dense_tp_size
    return MeshSizes(*sizes, config.pp_size, config.attn_cp_size, config.dcp_size)


def rank_name(config: EngineConfig, copy: int, rank: int) -> str:
    """Of a process, by its number in its copy: "rank 1 (DP 0, TP 1)". "" for the only one."""
    place, number = place_of(config, rank), copy * config.copy_processes + rank
    if config.processes == 1:
        return ""
    if config.processes == config.copies and config.nnodes == 1:
        return f"copy {copy}"
    places = {
        f"node {config.node_of(number)}": config.nnodes > 1,
        f"copy {copy}": config.copies > 1,
        f"PP {place.stage}": config.pp_size > 1,
        f"DP {place.dp}": config.attention_dp > 1,
        f"CP {place.cp}": config.attn_cp_size > 1,
        f"TP {place.tp}": config.tp_size > config.attn_cp_size,
    }
    return f"rank {number} ({', '.join(name for name, is_said in places.items() if is_said)})"


def has_pending_plans(config: EngineConfig, member: Member) -> bool:
    """Whether a follower has not carried out all that its leader has sent."""
    plans, is_follower = member.plans, place_of(config, member.rank).number > 0
    return plans is not None and is_follower and plans.carried_out(member.follower) < plans.sent


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
    store = connect(member.rendezvous, member.rank, config.copy_processes, device, timeout, lost)
    layout = build_mesh(mesh_of(config), device, timeout, member.nodes)
    del store  # torch holds it in C++ only, which does not keep a Python object alive
    return RankContext(member, layout, device)
