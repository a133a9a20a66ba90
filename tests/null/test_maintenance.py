"""Weight updates and profiles in the loop: between which steps, and their effect on requests and cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.null.sim.fleet import SimChannel
from tests.null.test_scheduler import EOS, PAGE, cached, make_scheduler, submit
from thalweg.core.agreement import AgreedStep
from thalweg.core.errors import InvalidRequest
from thalweg.core.messages import (
    Abort,
    ControlReply,
    FlushCache,
    FromEngine,
    StartProfile,
    StepUpdate,
    StopProfile,
    ToEngine,
    TokenDelta,
    UpdateWeights,
)
from thalweg.core.plan import GrammarState, Output, StepPlan
from thalweg.core.request import Request
from thalweg.engine.loop import Loop

PROMPT = tuple(range(10, 10 + 3 * PAGE + 1))


class Hands:
    """A worker whose every token is `says`; it has made a step when it is asked for it."""

    def __init__(self, requests: Mapping[int, Request]) -> None:
        self.requests, self.says = requests, 7
        self.inside: list[int] = []  # steps that are launched and not retired
        self.ends: dict[int, int] = {}

    def forward(self, plan: StepPlan, agreed: AgreedStep | None) -> None:
        self.inside.append(plan.step)

    def sample(self, plan: StepPlan, masks: Mapping[int, GrammarState], width: int) -> None:
        for bind, row in zip(plan.binds, [row for row in plan.rows if row.n > 1], strict=False):
            self.ends[row.uid] = bind.end

    def output(self, plan: StepPlan) -> Sequence[Output]:
        self.inside.remove(plan.step)
        return [self._output(row.uid) if row.samples else Output() for row in plan.rows]

    def add_drafts(self, plan: StepPlan, outputs: Sequence[Output]) -> Sequence[Output]:
        return outputs

    def _output(self, uid: int) -> Output:
        r = self.requests[uid]
        if r.num_tokens >= r.end:
            return Output(done=True)
        return Output((self.says,), done=r.num_tokens + 1 >= r.end or self.says in r.stop_ids)


class Shop:
    """A workshop whose weights are what its hands say."""

    def __init__(self, hands: Hands) -> None:
        self.hands, self.log = hands, list[Any]()

    def update_weights(self, wish: UpdateWeights, alive: Callable[[], None]) -> Callable[[], tuple[int, int]]:
        self.log.append("looked")
        if wish.path == "bad":
            raise InvalidRequest("model_path", "bad; nothing was changed")

        def write() -> tuple[int, int]:
            assert not self.hands.inside, "a step was in flight"
            alive()
            self.hands.says = int(wish.path)
            self.log.append("wrote")
            return (3, 3) if wish.version else (1, 3)

        return write

    def start_profile(self, wish: StartProfile) -> str:
        assert not self.hands.inside, "a step was in flight"
        if "started" in self.log:
            raise InvalidRequest("", "a profile runs already")
        self.log.append("started")
        return "CPU"

    def stop_profile(self) -> str:
        assert not self.hands.inside, "a step was in flight"
        if "started" not in self.log:
            raise InvalidRequest("", "no profile runs")
        self.log.remove("started")
        return "trace"


class Notes:
    """What the recorder was told to have been taken."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, ToEngine]] = []

    def add_messages(self, step: int, messages: Sequence[ToEngine], replies: Sequence[FromEngine]) -> None:
        self.taken += ((step, message) for message in messages)

    def add_plan(self, plan: StepPlan) -> None:
        return

    def add_outputs(self, plan: StepPlan, outputs: Sequence[Output]) -> None:
        return


class Rank:
    def __init__(self, depth: int = 2) -> None:
        self.scheduler, self.channel, self.notes = make_scheduler(), SimChannel(), Notes()
        self.hands = Hands(self.scheduler.requests)
        self.shop = Shop(self.hands)
        self.loop = Loop(self.channel, self.scheduler, self.hands, depth, self.notes, self.shop)
        self.heard: list[FromEngine] = []

    def say(self, *messages: ToEngine) -> None:
        self.channel.inbox += messages

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.loop.step()
            self.heard += self.channel.outbox
            self.channel.outbox.clear()

    def finish(self) -> None:
        while self.channel.inbox or not self.scheduler.is_idle or self.loop.inflight:
            self.turn()

    def deltas(self, uid: int) -> list[TokenDelta]:
        return [d for news in self.heard if isinstance(news, StepUpdate) for d in news.deltas if d.uid == uid]

    def tokens(self, uid: int) -> list[int]:
        return [token for delta in self.deltas(uid) for token in delta.tokens]

    def done(self) -> list[ControlReply]:
        return [one for one in self.heard if isinstance(one, ControlReply)]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_last_counters_of_an_engine_say_that_it_is_idle(depth: int) -> None:
    rank = Rank(depth)
    rank.say(submit(1, PROMPT, max_tokens=8))
    rank.turn(4)
    rank.hands.says = EOS  # ends it while the next step is in flight
    rank.finish()
    told = [news.stats for news in rank.heard if isinstance(news, StepUpdate) and news.stats]
    assert (told[-1].running, told[-1].finished, told[-1].pages_used) == (0, 1, 0)
    assert told[-1].decode_tokens == len(rank.tokens(1)) < 8
    count = len(rank.heard)
    rank.turn(3)
    assert len(rank.heard) == count, "an idle engine says nothing"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("flush", [True, False])
def test_a_running_request_goes_on_and_what_old_weights_made_is_not_cached_after_a_flush(
    depth: int, flush: bool
) -> None:
    rank = Rank(depth)
    rank.say(submit(1, PROMPT, max_tokens=8))
    rank.turn(4)
    assert rank.hands.inside == [3] * (depth > 1), "a step is in flight where there may be one"
    rank.say(UpdateWeights(5, "9", flush=flush), submit(2, PROMPT, max_tokens=3))
    rank.finish()
    assert rank.done() == [ControlReply(5, "1 of 3 tensors replaced")]
    assert rank.tokens(1) == [7] * 4 + [9] * 4 and rank.deltas(1)[-1].finish == "length"
    assert rank.tokens(2) == [9] * 3
    assert rank.deltas(2)[0].cached == (0 if flush else 3 * PAGE), "its prompt was computed by the old weights"
    assert cached(rank.scheduler, (*PROMPT, *rank.tokens(1))) == (3 if flush else 5)
    assert (
        rank.scheduler.allocator.num_available() == rank.scheduler.allocator.num_pages
        and (4, UpdateWeights(5, "9", flush=flush)) in rank.notes.taken
    )


def test_a_request_preempted_after_a_weight_update_is_recomputed_and_cached() -> None:
    rank = Rank()
    rank.say(submit(1, PROMPT, max_tokens=8))
    rank.turn(4)
    rank.say(UpdateWeights(5, "9"))
    rank.turn()
    rank.scheduler._preempt_one()
    rank.finish()
    assert len(rank.tokens(1)) == 8 and cached(rank.scheduler, (*PROMPT, *rank.tokens(1))) == 5


def test_weights_that_do_not_fit_change_nothing() -> None:
    rank = Rank()
    rank.say(submit(1, PROMPT, max_tokens=2))
    rank.finish()
    rank.say(submit(2, (*PROMPT, 50, 51), max_tokens=8))
    rank.turn(3)
    rank.say(UpdateWeights(5, "bad", abort=True))
    rank.finish()
    assert rank.done() == [ControlReply(5, error="bad; nothing was changed", field="model_path")] and rank.shop.log == [
        "looked"
    ]
    assert rank.tokens(2) == [7] * 8 and rank.deltas(2)[0].cached == 3 * PAGE
    assert cached(rank.scheduler, PROMPT) == 3
    assert not any(isinstance(message, (UpdateWeights, Abort)) for _, message in rank.notes.taken), "nothing to record"


def test_all_requests_can_be_ended_first_queued_ones_too() -> None:
    rank = Rank()
    rank.say(*(submit(uid, max_tokens=20) for uid in range(12)))
    rank.turn(3)
    rank.say(UpdateWeights(5, "9", abort=True), submit(20, max_tokens=2))
    rank.finish()
    assert [rank.deltas(uid)[-1].finish for uid in range(12)] == ["abort"] * 12
    assert 9 not in [token for uid in range(12) for token in rank.tokens(uid)] and rank.tokens(20) == [9, 9]
    (aborted,) = [message for _, message in rank.notes.taken if isinstance(message, Abort)]
    assert set(aborted.uids) == set(range(12))


def test_messages_are_carried_out_in_their_order_and_answered_by_their_ids() -> None:
    rank = Rank()
    rank.say(
        StopProfile(1), FlushCache(2), UpdateWeights(3, "8", version="v"), UpdateWeights(4, "9"), StartProfile(5, "x")
    )
    rank.say(StartProfile(6, "x"), StopProfile(7), submit(1, max_tokens=1))
    rank.finish()
    assert rank.done() == [
        ControlReply(1, error="no profile runs"),
        ControlReply(2),
        ControlReply(3, "3 of 3 tensors replaced", replaced_all=True),
        ControlReply(4, "1 of 3 tensors replaced"),
        ControlReply(5, "CPU"),
        ControlReply(6, error="a profile runs already"),
        ControlReply(7, "trace"),
    ]
    assert rank.tokens(1) == [9]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_profile_of_some_steps_ends_by_itself(depth: int, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(depth)
    rank.say(submit(1, max_tokens=5), StartProfile(1, "x", steps=3))
    rank.turn(2)
    assert "started" in rank.shop.log
    rank.turn()
    assert "started" not in rank.shop.log, "after three steps, although nothing else comes"
    assert len(rank.tokens(1)) == 3, "what they made is told at once"
    rank.finish()
    assert len(rank.tokens(1)) == 5
    rank.say(StartProfile(2, "x", steps=1), StopProfile(3), submit(2, max_tokens=2))
    rank.finish()
    rank.say(StartProfile(4, "x"), submit(3, max_tokens=2))
    rank.finish()
    lost = [record for record in caplog.records if record.levelno > logging.INFO]
    assert not lost and "started" in rank.shop.log, "the steps of a profile that was stopped do not count for the next"


def test_long_control_work_keeps_the_watchdog_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("thalweg.engine.loop.time.time", lambda: now[0])
    rank = Rank()
    for _ in range(10):
        now[0] += 0.1
        rank.loop.alive()
    assert len(rank.channel.outbox) == 4 and all(
        isinstance(one, StepUpdate) and one.stats for one in rank.channel.outbox
    )


def test_an_engine_without_admin_operations_refuses_them() -> None:
    rank = Rank()
    rank.loop.admin = None
    rank.say(UpdateWeights(1, "9"))
    rank.turn()
    assert rank.done() == [ControlReply(1, error="weight updates and profiles are not available in this engine")]
