"""DP ranks in lockstep, each with a real loop, a real scheduler and a simulated device."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Callable, Iterable, Sequence

from tests.null.sim.clock import Clock
from tests.null.sim.device import Device, SimWorker
from tests.null.sim.front import Case
from tests.null.sim.model import EOS, VOCAB
from tests.null.sim.tier import SlowTier
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import NoPrefixCache, RadixTree
from thalweg.core.agreement import coordinate_step, rank_step_of
from thalweg.core.messages import Abort, ControlReply, FromEngine, Rejected, StepUpdate, ToEngine
from thalweg.core.plan import StepPlan
from thalweg.core.request import Request
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.engine.loop import Loop
from thalweg.scheduler.draft_length import VerifiedDrafts
from thalweg.scheduler.plan_builder import DecodeLoad, WaitingPrompt, WholeBudget
from thalweg.scheduler.requests import Limits, make_request
from thalweg.scheduler.scheduler import Scheduler

PAGE, WIDEST, CONTEXT = 4, 3, 36


class RandomDraftLength:
    """A draft width that changes with every step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.max_drafts = rng, WIDEST

    def choose(self, sampling: Sequence[Request], most: int) -> int:
        return min(self.rng.randint(0, WIDEST), self.max_drafts, most)

    def observe(self, verified: Sequence[VerifiedDrafts]) -> None:
        assert verified and all(0 <= path < 1 << drafts <= 1 << WIDEST for _, drafts, path in verified)

    def note_prefill(self) -> None:
        return

    def disable(self) -> None:
        self.max_drafts = 0


class RandomShare(WholeBudget):
    """Any number of prompt tokens beside decode rows."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = random.Random(rng.random())

    def choose(self, load: DecodeLoad, waiting: Iterable[WaitingPrompt], others: int, most: int) -> int:
        assert most and others >= 0 and all(prompt.tokens > 0 for prompt in waiting)
        return self.rng.randint(1, most)


class CountingTree(RadixTree):
    """The real tree, how many pages it has evicted, and what it holds."""

    evicted = 0

    def prefixes(self) -> set[tuple[int, tuple[int, ...]]]:
        """(salt, all tokens up to its end) of each cached page."""
        found: set[tuple[int, tuple[int, ...]]] = set()
        below = [
            (int(root.key.split(b":")[1]), (), node)
            for root in self._top.children.values()
            for node in root.children.values()
        ]
        while below:
            salt, before, node = below.pop()
            tokens = (*before, *array("i", node.key))
            found.add((salt, tokens))
            below += [(salt, tokens, child) for child in node.children.values()]
        return found

    def evict(self, count: int) -> list[int]:
        freed = super().evict(count)
        self.evicted += len(freed)
        return freed


class SimChannel:
    """The engine's end of the line to a front that lives in the same turn. inbox: messages, and calls that stand for
    what no message of today carries (grammars, transfers); they are carried out in order.
    """

    def __init__(self) -> None:
        self.inbox: list[ToEngine | Callable[[], None]] = []
        self.outbox: list[FromEngine] = []
        self.take: Callable[[list[ToEngine]], Sequence[FromEngine]] = list
        self.timeout: float | None = 0.0
        self.quiet = True

    def receive(self, timeout: float | None) -> list[ToEngine]:
        self.timeout, self.quiet = timeout, not self.inbox
        messages: list[ToEngine] = []
        for item in self.inbox:
            if callable(item):
                self.outbox.extend(self.take(messages))
                messages = []
                item()
            else:
                messages.append(item)
        self.inbox = []
        return messages

    def send(self, message: FromEngine) -> None:
        self.outbox.append(message)


@dataclass(frozen=True)
class Setting:
    """What a rank is made of. fail: the share of tier loads that fail."""

    slots: int
    pages: int
    budget: int
    stages: int
    depth: int
    fail: float
    policy: str = "fcfs"
    radix: bool = True
    context: int = CONTEXT
    shares_steps: bool = False  # prompts get a random part of what a step leaves beside decode rows
    tree: TreeShape = CHAIN


class NoGrammars:
    """A tracker for requests whose masks the simulated device makes itself."""

    def advance(self, uid: int, tokens: Sequence[int]) -> bool:
        return True

    def close(self, uid: int) -> None: ...


class Rank:
    """One rank: scheduler, simulated device, loop, and the requests of its client."""

    def __init__(self, clock: Clock, rng: random.Random, s: Setting) -> None:
        tree: RadixTree = CountingTree(PAGE) if s.radix else NoPrefixCache(PAGE)
        self.setting, self.allocator = s, PageAllocator(s.pages, tree)
        self.device = Device(clock, rng, s.stages, s.depth, self.allocator, s.tree)
        self.tier = SlowTier(clock, rng, self.device, s.fail)
        self.limits = Limits(s.slots, s.budget, s.context, VOCAB, (EOS,), s.stages, s.policy, 1, s.tree)
        share = RandomShare(rng) if s.shares_steps else WholeBudget()
        self.scheduler = Scheduler(
            self.limits, self.allocator, self.tier, RandomDraftLength(rng), share, grammars=NoGrammars()
        )
        self.channel = SimChannel()
        self.loop = Loop(self.channel, self.scheduler, SimWorker(self.device), s.depth)
        self.cases: dict[int, Case] = {}
        self.rejected: dict[int, Rejected] = {}
        self.done: list[int] = []
        self.channel.take = self.scheduler.handle
        self.spins = 0
        self.waiting: list[Request] = []

    def submit(self, case: Case) -> None:
        self.cases[case.submit.uid] = case
        if case.masked or case.send:
            self.channel.inbox.append(lambda: self._add(case))
        else:
            self.channel.inbox.append(case.submit)

    def _add(self, case: Case) -> None:
        scheduler = self.scheduler
        request = make_request(
            case.submit, self.limits, scheduler.context, scheduler.seeds, scheduler.requests.get(case.submit.sibling)
        )
        request.has_grammar, request.send = case.masked, case.send
        scheduler.add(request)

    def abort(self, case: Case) -> None:
        case.aborted = True
        self.channel.inbox.append(Abort((case.submit.uid,)))

    def hear(self) -> None:
        for message in self.channel.outbox:
            match message:
                case StepUpdate():
                    for delta in message.deltas:
                        self.cases[delta.uid].hear(delta)
                case Rejected():
                    self.rejected[message.uid] = message
                case ControlReply():
                    self.done.append(message.id)
                case _:
                    raise AssertionError(f"unexpected {message}")
        self.channel.outbox.clear()

    def check_patience(self, plan: StepPlan, launched: bool) -> None:
        """Waiting for messages with work at hand loses time; not waiting without any burns a core."""
        timeout = self.channel.timeout
        if timeout is None:
            assert self.scheduler.is_idle or not self.channel.quiet, "the loop blocks while there are requests"
        if timeout != 0.0 and self.channel.quiet:
            assert not plan.rows, "the loop waits for messages while there is something to plan"
        landed = any(r not in self.scheduler._transferring for r in self.waiting)
        self.waiting = self.scheduler._transferring.copy()
        idle = timeout == 0.0 and not launched and not self.loop.inflight and self.channel.quiet and not landed
        self.spins = self.spins + 1 if idle else 0
        assert self.spins < 3, "the loop spins while there is nothing to plan"

    def check_home(self) -> None:
        scheduler, allocator = self.scheduler, self.allocator
        slots = scheduler.kv_cache.free_slots
        assert sorted(slots) == list(range(self.setting.slots)), "a slot was lost"
        assert not any(allocator.ref_counts) and not self.device.work, "a lease was lost"
        free, cached = allocator.free_pages, allocator.tree.num_cached
        assert len(free) == len(set(free)) and allocator.num_available() == allocator.num_pages == len(free) + cached, (
            "a page was lost"
        )
        assert (
            scheduler.is_idle
            and not scheduler.has_work
            and not scheduler.live
            and not scheduler.kv_cache.cursors
            and not len(scheduler.queue)
        )
        assert not scheduler._transferring and not self.loop.inflight and not scheduler.kv_cache.to_trim


def serve(ranks: Sequence[Rank], receive: Callable[[int], bool], clock: Clock, rng: random.Random) -> int:
    """Turns until the front has nothing more and every rank is idle. `receive(turn)` fills the inboxes; True: more will
    come.
    """
    turn = 0
    while receive(turn) or any(r.loop.inflight or not r.scheduler.is_idle or r.channel.inbox for r in ranks):
        turn += 1
        clock.spend(rng.randint(1, 3))
        plans = [rank.loop.plan_step() for rank in ranks]
        waits = [rank.scheduler.prefill_wait for rank in ranks]
        agreed = coordinate_step(
            [rank_step_of(plan)._replace(prefill_wait=wait) for plan, wait in zip(plans, waits, strict=True)]
        )
        for rank, plan in zip(ranks, plans, strict=True):
            rank.loop.launch_and_commit(plan, agreed)
            rank.check_patience(plan, agreed.rows > 0)
            rank.hear()
        if not agreed.rows and not any(r.loop.inflight for r in ranks) and clock.events:
            clock.tick()  # nothing but tickets: wait on them
        assert turn < 4000, "stuck"
    return ranks[0].scheduler.step
