"""THE loop: the only one. Its depth is how many steps may be unknown to the host: 1 is synchronous, 2 is overlap, p + 1 a pipeline of
p stages. A step is always A (`worker.forward`: prepare → forward → logits) and B (`worker.sample`: mask → accept → propose → publish)."""

from __future__ import annotations

import time
from collections import deque
from typing import Mapping, Protocol, Sequence

from thalweg.core.messages import FromEngine, Mark, Stats, StepNews, ToEngine
from thalweg.core.plan import MaskState, Output, Shape, StepPlan
from thalweg.engine.recording import NoRecorder, Recorder
from thalweg.scheduler.scheduler import Scheduler

STATS_EVERY = 0.25  # seconds between two Stats
TICKET_POLL = 0.001  # seconds to wait for messages while only tickets are under way
NO_RECORDER = NoRecorder()


class Channel(Protocol):
    """The engine's end of the line to its fronts."""

    def receive(self, timeout: float | None) -> list[ToEngine]:
        """Everything that has come. Waits for the first up to `timeout` seconds: 0 does not wait, None waits for ever."""

    def send(self, message: FromEngine) -> None:
        """Returns at once."""


class Worker(Protocol):
    """The hands of one rank. `forward` and `sample` return at once; `output` waits."""

    def forward(self, plan: StepPlan, shape: Shape) -> None:
        """A: enqueues prepare → forward → logits."""

    def sample(self, plan: StepPlan, masks: Mapping[int, MaskState], width: int) -> None:
        """B: enqueues mask → accept → propose `width` drafts → publish, right behind A."""

    def output(self, plan: StepPlan) -> Sequence[Output]:
        """One Output per row of a step that was launched; waits until the device has made it."""


class Layout(Protocol):
    """How DP ranks agree on a step."""

    def agree(self, plan: StepPlan) -> tuple[Shape | None, int]:
        """The common shape, None when no rank has rows, and the common draft width."""


class OneRank:
    """The layout of a single DP rank: its own word is the agreement."""

    def agree(self, plan: StepPlan) -> tuple[Shape | None, int]:
        return (plan.shape if plan.rows else None), plan.draft


class Loop:
    """Drives one rank: receive → plan → agree → A → B → retire what is older than the depth. turns: how many, so that others see it live."""

    def __init__(
        self,
        channel: Channel,
        scheduler: Scheduler,
        worker: Worker,
        layout: Layout,
        depth: int,
        recorder: Recorder = NO_RECORDER,
    ) -> None:
        assert 1 <= depth <= scheduler.stages + 1, (
            f"depth {depth} with {scheduler.stages} stages: masks would miss their commit"
        )
        self.channel, self.scheduler, self.worker, self.layout, self.depth = channel, scheduler, worker, layout, depth
        self.recorder, self.turns = recorder, 0
        self.inflight: deque[StepPlan] = deque()
        self.width = 0  # the last launched step's agreed draft width
        self.busy_since = self.stats_at = self.busy_seconds = 0.0
        self.marks: list[Mark] = []  # not yet sent

    def run(self) -> None:
        """Serves until a front asked to drain and everything has ended."""
        while not (self.scheduler.draining and self.scheduler.idle and not self.inflight):
            self.turn()

    def turn(self) -> None:
        plan = self.begin()
        shape, width = self.layout.agree(plan)
        self.finish(plan, shape, width)

    def begin(self) -> StepPlan:
        self.turns += 1
        messages = self.channel.receive(self._patience())
        replies = self.scheduler.take(messages)
        for reply in replies:
            self.channel.send(reply)
        if messages or replies:
            self.recorder.took(self.scheduler.step, messages, replies)
        plan = self.scheduler.plan(self.width)
        if marks := self.scheduler.marks():
            now = time.time()
            self.marks += (Mark(uid, kind, now) for uid, kind in marks)
        return plan

    def finish(self, plan: StepPlan, shape: Shape | None, width: int) -> None:
        if shape:
            if not self.inflight:
                self.busy_since = time.monotonic()
            self.width = width
            self.recorder.launches(plan)
            self.worker.forward(plan, shape)
            if plan.masked:
                self.retire(self.depth - 2)  # commit what its masks need
            self.worker.sample(plan, self.scheduler.masks(plan), width)
            self.inflight.append(plan)
            self.scheduler.launched()
        self.retire(self.depth - 1 if shape else len(self.inflight) - 1)
        self._send_news()

    def retire(self, keep: int) -> None:
        """Waits for and commits the oldest steps until at most `keep` are in flight."""
        while len(self.inflight) > max(keep, 0):
            plan = self.inflight.popleft()
            outputs = self.worker.output(plan)
            self.scheduler.commit(plan, outputs)
            self.recorder.retired(plan, outputs)
            if not self.inflight:
                self.busy_seconds += time.monotonic() - self.busy_since

    def _patience(self) -> float | None:
        if self.inflight or self.scheduler.runnable:
            return 0.0
        return None if self.scheduler.idle and not self.scheduler.draining else TICKET_POLL

    def _send_news(self) -> None:
        deltas, now = self.scheduler.news(), time.time()
        idle = self.scheduler.idle
        due = now - self.stats_at >= STATS_EVERY or (idle and bool(deltas))
        if deltas or (due and not idle):
            if due:
                self.stats_at = now
            marks, self.marks = tuple(self.marks), []
            self.channel.send(StepNews(deltas, now, self.stats() if due else None, marks))

    def stats(self) -> Stats:
        return self.scheduler.stats(self.busy_seconds)
