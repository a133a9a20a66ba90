"""Processes that are started once and run case after case: each joins a layout, builds its part of the engine, serves
its share of a script, and sends back what its requests got.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.cpu.recorder import POOLS, Recording, record_instead_of_capturing
from thalweg.config.engine import EngineConfig
from thalweg.core.messages import Drain, FromEngine, Rejected, StepUpdate, Submit, ToEngine, TokenDelta
from thalweg.engine import build
from thalweg.engine.group import ALONE, Member, RankContext, members_of, mesh_of, place_of
from thalweg.engine.local import sequences
from thalweg.models import traced
from thalweg.parallel.mesh import MeshSizes, build_mesh
from thalweg.parallel.process_axis import connect, disconnect
from thalweg.parallel.relay import Mirrors, Relay, RelayInbox
from thalweg.runner.runner import Runner

SPAWN = multiprocessing.get_context("spawn")
PATIENCE = 150.0  # seconds until a rank that answers nothing fails the case
CPU = torch.device("cpu")

Script = tuple[tuple[int, Submit], ...]  # (number of the step before which it arrives, sequence)


@dataclass
class Served:
    """What the sequences of a rank got, and how it went."""

    deltas: dict[int, TokenDelta] = field(default_factory=dict)  # merged, by uid
    rejected: dict[int, str] = field(default_factory=dict)
    preemptions: int = 0
    cached: int = 0
    accepted: int = 0
    steps: int = 0
    checksum: int = 0  # of the passes that were run
    expert_moves: int = 0
    balanced_layers: int = 0
    replays: int = 0  # of captured steps, samples and drafts


class ScriptChannel:
    """Gives the engine its messages in their steps, and drains it when all sequences have ended."""

    def __init__(self, script: Script, served: Served) -> None:
        self.script, self.served = list(script), served
        self.left = {submit.uid for _, submit in script}
        self.calls = 0
        self.is_draining = False

    def receive(self, timeout: float | None) -> list[ToEngine]:
        self.calls += 1
        due = [message for at, message in self.script if at <= self.calls]
        self.script = self.script[len(due) :]
        messages: list[ToEngine] = list(due)
        if not self.left and not self.is_draining:
            self.is_draining = True
            messages.append(Drain())
        return messages

    def send(self, message: FromEngine) -> None:
        if isinstance(message, Rejected):
            self.left.discard(message.uid)
            self.served.rejected[message.uid] = message.message
        if isinstance(message, StepUpdate):
            for delta in message.deltas:
                earlier = self.served.deltas.get(delta.uid)
                self.served.deltas[delta.uid] = delta if earlier is None else earlier.merge(delta)
                if delta.finish:
                    self.left.discard(delta.uid)


def serve(config: EngineConfig, script: Script, rank_context: RankContext = ALONE) -> Served:
    """Serves a script with one scheduler, and the other processes of the rank_context's group."""
    served = Served()
    loop, runner, *_ = build.build(config, ScriptChannel(script, served), rank_context)
    capture(config, runner)
    loop.run()
    loop.worker.followers.stop()
    stats = loop.stats()
    served.preemptions, served.cached, served.accepted = stats.preemptions, stats.cached_tokens, stats.accepted_tokens
    served.steps, served.checksum, served.expert_moves = stats.steps, runner.pass_checksum, stats.expert_moves
    served.replays, served.balanced_layers = Recording.replays, len(stats.expert_imbalance)
    return served


def capture(config: EngineConfig, runner: Runner) -> None:
    """Captures the steps as on a GPU, if the configuration says so, with recorders in place of graphs."""
    build._capture(config, runner)
    Recording.replays = 0


@dataclass(frozen=True)
class Job:
    config: EngineConfig
    member: Member
    sizes: MeshSizes
    script: Script  # of the leader
    plant: str = ""  # a bug of `BUGS`


def _run(job: Job, bugs: dict[str, Any]) -> Served | None:
    restore, patch = bugs[job.plant]() if job.plant else lambda: None, pytest.MonkeyPatch()
    if job.config.cuda_graph_bs:
        record_instead_of_capturing(patch)
    try:
        rank_context = RankContext(job.member, build_mesh(job.sizes, CPU))
        if rank_context.is_leader:
            return serve(job.config, job.script, rank_context)
        follower = build.build_follower(job.config, rank_context)
        capture(job.config, follower.worker.runner)
        follower.run()
        return None
    finally:
        restore()
        patch.undo()
        POOLS.clear()  # recordings hold all that was computed in them


def _process(rank: int, size: int, store: Path, jobs: Connection) -> None:
    from tests.ranks.bugs import BUGS

    torch.set_num_threads(1)
    traced.ROWS = 0
    watched = connect(store, rank, size, CPU, PATIENCE)
    while (job := jobs.recv()) is not None:
        try:
            jobs.send(_run(job, BUGS))
        except Exception:  # noqa: BLE001 - the test fails with it
            jobs.send(traceback.format_exc())
    disconnect()
    del watched


class RankError(Exception):
    """A rank has failed a case. The group cannot run another."""


class ProcessGroup:
    """`size` processes."""

    def __init__(self, size: int, patience: float = PATIENCE) -> None:
        self.size, self.patience, self.is_broken, self.starts = size, patience, False, 0
        self.folder = tempfile.TemporaryDirectory()
        self.inboxes, self.cases = list[RelayInbox](), 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        store = Path(self.folder.name) / f"store{self.starts}"
        ends = [SPAWN.Pipe() for _ in range(self.size)]
        self.jobs = [here for here, _ in ends]
        self.processes = [
            SPAWN.Process(target=_process, args=(rank, self.size, store, there), daemon=True)
            for rank, (_, there) in enumerate(ends)
        ]
        for process in self.processes:
            process.start()
        self.is_broken = False

    def serve(self, config: EngineConfig, scripts: Sequence[Script], plant: str = "") -> list[Served]:
        """The result of each data-parallel rank. Raises RankError."""
        if self.is_broken:
            self.close()
            self.start()
        with self._members(config) as members:
            return self._serve(config, members, scripts, plant)

    @contextlib.contextmanager
    def _members(self, config: EngineConfig) -> Iterator[list[Member]]:
        """Those of all nodes. Several nodes are on this machine, and a relay of each is in this process."""
        members, nodes, failures, self.cases = list[Member](), range(config.nnodes), list[str](), self.cases + 1
        every_mirrors = [Mirrors() for _ in nodes]
        for node, mirrors in zip(nodes, every_mirrors, strict=True):
            members += members_of(config, Path(), node, mirrors)
        while len(self.inboxes) < config.nnodes:
            self.inboxes.append(RelayInbox(failures.append, "127.0.0.1"))
        addresses = [f"tcp://127.0.0.1:{inbox.port}" for inbox in self.inboxes]
        for inbox, mirrors in zip(self.inboxes, every_mirrors, strict=False):
            inbox.relay = Relay(mirrors, self.cases, addresses, PATIENCE, failures.append)
        try:
            yield members
        finally:
            for inbox in self.inboxes[: config.nnodes]:
                relay, inbox.relay = inbox.relay, None
                assert relay is not None
                relay.close()
        assert not failures

    def _serve(
        self, config: EngineConfig, members: Sequence[Member], scripts: Sequence[Script], plant: str
    ) -> list[Served]:
        assert len(members) == self.size
        sizes = mesh_of(config)
        for member, connection in zip(members, self.jobs, strict=True):
            script = scripts[place_of(config, member.rank).dp]
            bug = plant if member.rank == self.size - 1 else ""
            connection.send(Job(config, replace(member, device=0), sizes, script, bug))
        results, errors = list[Served](), list[str]()
        for connection in self.jobs:
            answer = _answer(connection, 5.0 if errors else self.patience)
            errors += [answer] if isinstance(answer, str) else []
            results += [answer] if isinstance(answer, Served) else []
        if errors:
            self.is_broken = True
            raise RankError("\n".join(errors))
        return results

    def close(self) -> None:
        for connection, process in zip(self.jobs, self.processes, strict=True):
            if not self.is_broken:
                connection.send(None)
            else:
                process.kill()
        for process in self.processes:
            process.join(10)


def _answer(connection: Connection, timeout: float) -> Served | str | None:
    """What a rank has served, or its error; None from a follower."""
    try:
        return connection.recv() if connection.poll(timeout) else "no answer"
    except (EOFError, ConnectionResetError):  # Gloo ends a process whose peer sends another size
        return "it has ended"


def dealt(script: Script, ranks: int) -> list[Script]:
    """The script's requests on the ranks in turn; siblings stay together."""
    homes: dict[int, int] = {}
    parts: list[list[tuple[int, Submit]]] = [[] for _ in range(ranks)]
    for at, submit in script:
        if submit.sibling in homes:
            home = homes[submit.sibling]
        else:
            home = len(homes) % ranks
        homes[submit.uid] = home
        parts[home].append((at, submit))
    return [tuple(part) for part in parts]


def submits(first_uid: int, prompt: Sequence[int], params: Any, **options: Any) -> list[Submit]:
    return [msgspec.structs.replace(message) for message in sequences(first_uid, prompt, params, **options)]
