"""THE loop: the only one. Its depth is how many steps may be unknown to the host: 1 is synchronous, 2 is overlap, p + 1
a pipeline of p stages. A step is always A (`worker.forward`: prepare → forward → logits) and B (`worker.sample`: mask →
accept → propose → publish).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Callable, Mapping, Protocol, Sequence

from thalweg.core.errors import InvalidRequest
from thalweg.core.messages import (
    Abort,
    Control,
    ControlReply,
    FromEngine,
    Rejected,
    RequestEvent,
    StartProfile,
    Stats,
    StepUpdate,
    StopProfile,
    ToEngine,
    UpdateWeights,
)
from thalweg.core.plan import GrammarState, Output, Shape, StepPlan
from thalweg.engine.recording import NoRecorder, Recorder
from thalweg.scheduler.scheduler import Scheduler

log = logging.getLogger("thalweg.engine")
STATS_EVERY = 0.25  # seconds between two Stats
TICKET_POLL = 0.001  # seconds to wait for messages while only tickets are under way
NEVER = 1 << 62  # a step that does not come
NO_RECORDER = NoRecorder()


class Channel(Protocol):
    """The engine's end of the line to its fronts."""

    def receive(self, timeout: float | None) -> list[ToEngine]:
        """Everything that has come. Waits for the first up to `timeout` seconds: 0 does not wait, None waits for
        ever.
        """

    def send(self, message: FromEngine) -> None:
        """Returns at once."""


class Worker(Protocol):
    """The hands of one rank. `forward` and `sample` return at once; `output` waits."""

    def forward(self, plan: StepPlan, shape: Shape) -> None:
        """A: enqueues prepare → forward → logits."""

    def sample(self, plan: StepPlan, masks: Mapping[int, GrammarState], width: int) -> None:
        """B: enqueues mask → accept → propose `width` drafts → publish, right behind A."""

    def output(self, plan: StepPlan) -> Sequence[Output]:
        """One Output per row of a step that was launched; waits until the device has made it."""


class Profiler(Protocol):
    """Profiles steps. Raises InvalidRequest for what cannot be done."""

    def start(self, wish: StartProfile) -> str:
        """Says what is watched."""

    def stop(self) -> str:
        """Says where the profile is."""


class AdminOperations(Protocol):
    """What is done to a rank between two steps, with none in flight."""

    @property
    def profiler(self) -> Profiler: ...

    def weights(self, wish: UpdateWeights, alive: Callable[[], None]) -> Callable[[], tuple[int, int]]:
        """Looks other weights through and changes nothing; what it returns writes them, and says how many tensors of
        how many. alive: to be called every now and then. Raises InvalidRequest for weights that do not fit.
        """


class Layout(Protocol):
    """How DP ranks agree on a step."""

    def agree(self, plan: StepPlan) -> tuple[Shape | None, int]:
        """The common shape, None when no rank has rows, and the common draft width."""


class OneRank:
    """The layout of a single DP rank: its own word is the agreement."""

    def agree(self, plan: StepPlan) -> tuple[Shape | None, int]:
        return (plan.shape if plan.rows else None), plan.num_drafts


class Loop:
    """Drives one rank: receive → plan → agree → A → B → retire what is older than the depth. turns: how many, so that
    others see it live. workshop: None where the rank stays as it was built.
    """

    def __init__(
        self,
        channel: Channel,
        scheduler: Scheduler,
        worker: Worker,
        layout: Layout,
        depth: int,
        recorder: Recorder = NO_RECORDER,
        workshop: AdminOperations | None = None,
    ) -> None:
        assert 1 <= depth <= scheduler.stages + 1, (
            f"depth {depth} with {scheduler.stages} stages: masks would miss their commit"
        )
        self.channel, self.scheduler, self.worker, self.layout, self.depth = channel, scheduler, worker, layout, depth
        self.recorder, self.workshop, self.turns = recorder, workshop, 0
        self.profiled_until = NEVER  # the step before which a profile ends by itself
        self.inflight: deque[StepPlan] = deque()
        self.width = 0  # the last launched step's agreed draft width
        self.busy_since = self.stats_at = self.busy_seconds = 0.0
        self.marks: list[RequestEvent] = []  # not yet sent

    def run(self) -> None:
        """Serves until a front asked to drain and everything has ended."""
        while not (self.scheduler.draining and self.scheduler.is_idle and not self.inflight):
            self.turn()

    def turn(self) -> None:
        plan = self.begin()
        shape, width = self.layout.agree(plan)
        self.finish(plan, shape, width)

    def begin(self) -> StepPlan:
        self.turns += 1
        self.take()
        plan = self.scheduler.plan(self.width)
        if marks := self.scheduler.take_events():
            now = time.time()
            self.marks += (RequestEvent(uid, kind, now) for uid, kind in marks)
        return plan

    def take(self) -> None:
        """Does what the fronts ask, in their order."""
        messages: list[ToEngine] = []
        replies: list[Rejected | ControlReply] = []
        for message in self.channel.receive(self._patience()):
            if isinstance(message, Control):
                replies += self._took(messages)
                messages = []
                replies += self._carry_out(message)
            else:
                messages.append(message)
        for reply in replies + self._took(messages):
            self.channel.send(reply)

    def _took(self, messages: Sequence[ToEngine]) -> list[Rejected | ControlReply]:
        replies = self.scheduler.handle(messages)
        if messages or replies:
            self.recorder.took(self.scheduler.step, messages, replies)
        return replies

    def finish(self, plan: StepPlan, shape: Shape | None, width: int) -> None:
        if shape:
            if not self.inflight:
                self.busy_since = time.monotonic()
            self.width = width
            self.recorder.launches(plan)
            self.worker.forward(plan, shape)
            if plan.waits_for_commit:
                self.retire(self.depth - 2)  # commit what its masks need
            self.worker.sample(plan, self.scheduler.grammar_states(), width)
            self.inflight.append(plan)
            self.scheduler.mark_launched()
        self.retire(self.depth - 1 if shape else len(self.inflight) - 1)
        self._send_news()
        if self.scheduler.step >= self.profiled_until:
            self._end_profile()

    def retire(self, keep: int) -> None:
        """Waits for and commits the oldest steps until at most `keep` are in flight."""
        while len(self.inflight) > max(keep, 0):
            plan = self.inflight.popleft()
            outputs = self.worker.output(plan)
            self.scheduler.commit(plan, outputs)
            self.recorder.retired(plan, outputs)
            if not self.inflight:
                self.busy_seconds += time.monotonic() - self.busy_since

    # ---- between two steps

    def _carry_out(self, message: Control) -> list[Rejected | ControlReply]:
        """Its answer, and what the scheduler has to say about it. In flight is nothing then."""
        if self.workshop is None:
            return [ControlReply(message.id, error="this engine stays as it was built")]
        try:
            match message:
                case UpdateWeights():
                    return self._update(message, self.workshop)
                case StartProfile():
                    self.retire(0)
                    told = self.workshop.profiler.start(message)
                    self.profiled_until = self.scheduler.step + message.steps if message.steps else NEVER
                case StopProfile():
                    self.retire(0)
                    self.profiled_until = NEVER
                    told = self.workshop.profiler.stop()
        except InvalidRequest as wrong:
            return [ControlReply(message.id, error=wrong.message, field=wrong.field)]
        return [ControlReply(message.id, told)]

    def _update(self, message: UpdateWeights, workshop: AdminOperations) -> list[Rejected | ControlReply]:
        """Running requests go on with the new weights, on what the old ones computed of them. After a flush that is
        never cached: the tree has another epoch then, and they stand in the old one. Raises InvalidRequest before
        anything is changed.
        """
        write = workshop.weights(message, self.alive)
        self.retire(0)
        replies: list[Rejected | ControlReply] = []
        if message.abort:
            replies += self._took([Abort(tuple(self.scheduler.requests))])
        held, of = write()
        if message.flush:
            self.scheduler.allocator.flush()
        done = ControlReply(message.id, f"{held} of {of} tensors replaced", replaced_all=held == of)
        self.recorder.took(self.scheduler.step, [message], [done])
        return [*replies, done]

    def _end_profile(self) -> None:
        """After the steps that were asked for. Nobody waits for an answer."""
        assert self.workshop is not None, "only a workshop starts profiles"
        self.profiled_until = NEVER
        self.retire(0)
        self._send_news()
        try:
            log.info("profile written: %s", self.workshop.profiler.stop())
        except InvalidRequest as failed:
            log.error("the profile is lost: %s", failed)

    def alive(self) -> None:
        """To be called during what takes longer than a step, so that nobody takes the engine for wedged."""
        self.turns += 1
        now = time.time()
        if now - self.stats_at >= STATS_EVERY:
            self.stats_at = now
            self.channel.send(StepUpdate((), now, self.stats()))

    # ---- waiting and telling

    def _patience(self) -> float | None:
        if self.inflight or self.scheduler.has_work:
            return 0.0
        return None if self.scheduler.is_idle and not self.scheduler.draining else TICKET_POLL

    def _send_news(self) -> None:
        deltas, now = self.scheduler.take_deltas(), time.time()
        idle = self.scheduler.is_idle
        due = now - self.stats_at >= STATS_EVERY or (idle and bool(deltas))
        if deltas or (due and not idle):
            if due:
                self.stats_at = now
            marks, self.marks = tuple(self.marks), []
            self.channel.send(StepUpdate(deltas, now, self.stats() if due else None, marks))

    def stats(self) -> Stats:
        return self.scheduler.stats(self.busy_seconds)
