"""The engine's only loop. Its depth is the number of steps whose results the host may not know yet: 1 is synchronous, 2
is overlapped, p and p + 1 are pipelines of p stages without and with overlap. A step has two parts: forward and sample
(masks, acceptance, copy of tokens to the host, drafts). Clients get tokens before drafts are made.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from thalweg.core.agreement import AgreedStep
from thalweg.core.errors import InvalidRequest
from thalweg.core.messages import (
    Abort,
    Control,
    ControlReply,
    DumpExperts,
    FillCache,
    FromEngine,
    Rejected,
    StartProfile,
    Stats,
    StepUpdate,
    StopProfile,
    ToEngine,
    UpdateWeights,
)
from thalweg.core.plan import StepPlan
from thalweg.engine.coordination import OWN_PLAN, Coordinator, RankState
from thalweg.engine.recording import StepRecorder
from thalweg.scheduler.scheduler import Scheduler

if TYPE_CHECKING:  # both need torch, and a simulated device does not
    from thalweg.engine.admin import AdminOperations
    from thalweg.engine.worker import Worker

log = logging.getLogger("thalweg.engine")
STATS_INTERVAL = 0.25  # seconds between two `Stats`
TICKET_POLL = 0.001  # seconds to wait for messages while only tickets are under way
NEVER = 1 << 62  # a step that is never reached
Replies = list[Rejected | ControlReply]


class Channel(Protocol):
    """The engine's end of the connection to its client."""

    def receive(self, timeout: float | None) -> list[ToEngine]:
        """All messages that have come. Waits up to `timeout` seconds for the first; None waits without limit."""

    def send(self, message: FromEngine) -> None:
        """Returns at once."""


class Loop:
    """Drives one rank: receive, plan, coordinate ranks, forward, sample, commit steps older than the depth."""

    def __init__(
        self,
        channel: Channel,
        scheduler: Scheduler,
        worker: Worker,
        depth: int,
        recorder: StepRecorder | None = None,
        admin: AdminOperations | None = None,
        coordinator: Coordinator = OWN_PLAN,
        expert_stats: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """expert_stats: fields of `Stats` about experts that move."""
        assert 1 <= depth <= scheduler.stages + 1, (
            f"depth {depth} with {scheduler.stages} stages: masks would miss their commit"
        )
        self.channel, self.scheduler, self.worker, self.depth = channel, scheduler, worker, depth
        self.recorder, self.admin, self.coordinator = recorder, admin, coordinator
        self.expert_stats = expert_stats
        self.controls: deque[Control] = deque()  # that wait until all data-parallel ranks have them
        self.epoch = 0  # of the weights
        self.may_prefill = True  # of the next plan, as the data-parallel ranks agreed
        self.has_ended = False  # drained, and every request has ended
        self.profile_end = NEVER  # step before which a profile ends by itself
        self.inflight: deque[StepPlan] = deque()
        self.num_drafts = 0  # that the last launched step was asked for
        self.busy_since = self.stats_at = self.busy_seconds = 0.0
        self.was_idle = True

    def run(self) -> None:
        """Serves until a client has asked to drain and every request has ended."""
        while not self.has_ended:
            self.step()

    def step(self) -> None:
        plan = self.plan_step()
        has_ended = self.scheduler.draining and self.scheduler.is_idle and not self.inflight
        control = self.controls[0].id if self.controls else 0
        state = RankState(self.epoch, control, has_ended, self.scheduler.prefill_wait)
        agreed = self.coordinator.agree(plan, state)
        self.launch_and_commit(plan, agreed)
        if agreed is not None and agreed.control:
            for reply in self._control(self.controls.popleft()):
                self.channel.send(reply)
        self.has_ended = agreed.has_ended if self.coordinator.is_shared and agreed else has_ended

    def plan_step(self) -> StepPlan:
        self.receive()
        return self.scheduler.plan(self.num_drafts, self.may_prefill)

    def launch_and_commit(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        """agreed: the step of all processes; None: there is one, whose plan decides."""
        self.may_prefill = agreed is None or agreed.may_prefill
        num_drafts, is_launched = (agreed or plan).num_drafts, bool(agreed.rows if agreed else plan.rows)
        if is_launched:
            if not self.inflight:
                self.busy_since = time.monotonic()
            self.num_drafts = num_drafts
            if self.recorder:
                self.recorder.add_plan(plan)
            self.worker.forward(plan, agreed)
            if plan.waits_for_commit:
                self.commit_until(self.depth - 2)  # commit what its masks depend on
            self.worker.sample(plan, self.scheduler.grammar_states(), num_drafts)
            self.inflight.append(plan)
            self.scheduler.mark_launched()
        self.commit_until(self.depth - 1 if is_launched else len(self.inflight) - 1)
        self._send_update()
        if self.scheduler.step >= self.profile_end:
            self._end_profile()

    def commit_until(self, max_in_flight: int) -> None:
        """Waits for and commits the oldest steps until at most `max_in_flight` steps are in flight."""
        while len(self.inflight) > max(max_in_flight, 0):
            plan = self.inflight.popleft()
            outputs = self.worker.output(plan)
            self.scheduler.commit(plan, outputs)
            if not self.inflight:
                self.busy_seconds += time.monotonic() - self.busy_since
            self._send_update()
            outputs = self.worker.add_drafts(plan, outputs)
            self.scheduler.commit_drafts(plan, outputs)
            if self.recorder:
                self.recorder.add_outputs(plan, outputs)

    # ---- messages
    def receive(self) -> None:
        """Handles all messages in their order."""
        messages, replies = list[ToEngine](), Replies()
        for message in self.channel.receive(self._timeout()):
            if isinstance(message, Control) and self.coordinator.is_shared:
                self.controls.append(message)
            elif isinstance(message, Control):
                replies += self._handle(messages)
                messages = []
                replies += self._control(message)
            else:
                messages.append(message)
        for reply in replies + self._handle(messages):
            self.channel.send(reply)

    def _timeout(self) -> float | None:
        if self.inflight or self.scheduler.has_work or self.coordinator.is_busy or self.controls:
            return 0.0
        return None if self.scheduler.is_idle and not self.scheduler.draining else TICKET_POLL

    def _handle(self, messages: Sequence[ToEngine]) -> Replies:
        replies = self.scheduler.handle(messages)
        if self.recorder and (messages or replies):
            self.recorder.add_messages(self.scheduler.step, messages, replies)
        return replies

    def _send_update(self) -> None:
        """Counters go out with deltas, at most every STATS_INTERVAL, and once when everything has ended."""
        deltas, now, is_idle = self.scheduler.take_deltas(), time.time(), self.scheduler.is_idle and not self.inflight
        has_ended = is_idle and (bool(deltas) or not self.was_idle)
        with_stats, self.was_idle = now - self.stats_at >= STATS_INTERVAL or has_ended, is_idle
        if deltas or has_ended or (with_stats and not is_idle):
            if with_stats:
                self.stats_at = now
            stats, events = self.stats() if with_stats else None, self.scheduler.take_events()
            self.channel.send(StepUpdate(deltas, now, stats, events))

    def stats(self) -> Stats:
        return msgspec.structs.replace(self.scheduler.stats(self.busy_seconds), **self.expert_stats())

    # ---- control messages: between two steps, with none in flight
    def _control(self, message: Control) -> Replies:
        if self.admin is None:
            return [ControlReply(message.id, error="weight updates and profiles are not available in this engine")]
        self.commit_until(0)
        try:
            match message:
                case UpdateWeights():
                    return self._update_weights(message, self.admin)
                case StartProfile():
                    result = self.admin.start_profile(message)
                    self.profile_end = self.scheduler.step + message.steps if message.steps else NEVER
                case StopProfile():
                    self.profile_end = NEVER
                    result = self.admin.stop_profile()
                case DumpExperts():
                    result = self.admin.dump_experts(message)
                case FillCache():
                    self.scheduler.allocator.cache_prompts(message.prompts)
                    result = self.admin.fill_cache(message)
        except InvalidRequest as error:
            return [ControlReply(message.id, error=error.message, field=error.field)]
        return [ControlReply(message.id, result)]

    def _update_weights(self, message: UpdateWeights, admin: AdminOperations) -> Replies:
        """Running requests continue with the new weights and their old KV, which after a flush is never cached. Raises
        InvalidRequest before anything is changed.
        """
        write = admin.update_weights(message, self.alive)
        replies = self._handle([Abort(tuple(self.scheduler.requests))]) if message.abort else []
        replaced, total = write()
        self.epoch += 1
        self.scheduler.kv_cache.prompt_logprobs.drop()
        if message.flush:
            self.scheduler.allocator.flush()
        reply = ControlReply(message.id, f"{replaced} of {total} tensors replaced", replaced == total)
        if self.recorder:
            self.recorder.add_messages(self.scheduler.step, [message], [reply])
        return [*replies, reply]

    def _end_profile(self) -> None:
        """Ends a profile after the number of steps that was asked for. Nobody waits for the answer."""
        self.commit_until(0)
        self._send_update()
        for reply in self._control(StopProfile(-1)):
            assert isinstance(reply, ControlReply)
            log.log(logging.ERROR if reply.error else logging.INFO, "profile: %s", reply.error or reply.result)

    def alive(self) -> None:
        """Must be called during long operations, so that the client does not take the engine for stuck."""
        now = time.time()
        if now - self.stats_at >= STATS_INTERVAL:
            self.stats_at = now
            self.channel.send(StepUpdate((), now, self.stats()))
