"""Followers: the processes of a data-parallel rank that run what its leader plans, and decide nothing.

A follower runs the halves of each step in the leader's order, with the same agreed sizes and grammar masks. Control
messages come through the same channel, so every process carries them out between the same two steps.
"""

from __future__ import annotations

import logging
from collections import deque

import msgspec
import numpy as np

from thalweg.core.agreement import AgreedStep
from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import GrammarMasks
from thalweg.core.messages import Control, DumpExperts, FillCache, StartProfile, StopProfile, UpdateWeights
from thalweg.core.plan import StepPlan
from thalweg.engine.admin import AdminOperations
from thalweg.engine.worker import Worker
from thalweg.parallel.plan_channel import PlanChannel, PlanReader, PlanWriter

log = logging.getLogger("thalweg.engine")


class ForwardStep(msgspec.Struct, tag=True, frozen=True):
    """Run the first half of a step. A plan of 256 decode rows takes 4.4 kB, 20 µs to encode and 55 µs to decode."""

    plan: StepPlan
    agreed: AgreedStep


class SampleStep(msgspec.Struct, tag=True, frozen=True):
    """Run the second half of the step that was forwarded last."""

    num_drafts: int
    masked_rows: tuple[int, ...] = ()
    mask_bits: bytes = b""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Nothing follows."""


PlanMessage = ForwardStep | SampleStep | Control | Stop


class PlanSender:
    """Sends what a leader runs to its followers; see `worker.Followers`."""

    def __init__(self, channel: PlanChannel, timeout: float) -> None:
        self._writer, self._encode = PlanWriter(channel, timeout), msgspec.msgpack.Encoder().encode

    def forward(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        assert agreed is not None, "several processes run agreed steps"
        self._send(ForwardStep(plan, agreed))

    def sample(self, num_drafts: int, masks: GrammarMasks | None) -> None:
        if masks is None:
            self._send(SampleStep(num_drafts))
        else:
            self._send(SampleStep(num_drafts, masks.rows, masks.bits.tobytes()))

    def control(self, message: Control) -> None:
        self._send(message)

    def stop(self) -> None:
        self._send(Stop())

    def _send(self, message: PlanMessage) -> None:
        self._writer.write(self._encode(message))


class Follower:
    """Runs what its leader sends."""

    def __init__(self, reader: PlanReader, worker: Worker, admin: AdminOperations, depth: int) -> None:
        """depth: steps that may be on their way."""
        self.reader, self.worker, self.admin, self.depth = reader, worker, admin, depth
        self._decode = msgspec.msgpack.Decoder(PlanMessage).decode
        self._inflight: deque[StepPlan] = deque()

    def run(self) -> None:
        """Until the leader says stop."""
        while (message := self.reader.read()) is not None and self._carry_out(self._decode(message)):
            self.reader.done()

    def _carry_out(self, message: PlanMessage) -> bool:
        match message:
            case Stop():
                return False
            case ForwardStep():
                self._inflight.append(message.plan)
                self.worker.forward(message.plan, message.agreed)
            case SampleStep():
                self.worker.sample_masked(self._inflight[-1], _masks(message), message.num_drafts)
                self._finish(self.depth - 1)
            case _:
                self._finish(0)
                try:
                    self._control(message)
                except InvalidRequest as error:  # as its leader, which answers the client
                    log.info("%s", error)
        return True

    def _finish(self, max_in_flight: int) -> None:
        """Waits for the oldest steps until at most `max_in_flight` are in flight."""
        while len(self._inflight) > max_in_flight:
            self.worker.finish(self._inflight.popleft())

    def _control(self, message: Control) -> None:
        match message:
            case UpdateWeights():
                self.admin.update_weights(message, lambda: None)()
            case StartProfile():
                self.admin.start_profile(message)
            case StopProfile():
                self.admin.stop_profile()
            case DumpExperts():
                self.admin.dump_experts(message)
            case FillCache():
                self.admin.fill_cache(message)


def _masks(message: SampleStep) -> GrammarMasks | None:
    if not message.masked_rows:
        return None
    bits = np.frombuffer(message.mask_bits, dtype=np.int32).reshape(len(message.masked_rows), -1)
    return GrammarMasks(message.masked_rows, bits.copy())
