"""What comes from other nodes: plans for processes of this one, and the errors of theirs."""

from __future__ import annotations

import time

import pytest

from thalweg.core.errors import RankLost
from thalweg.engine.nodes import NodeClocks
from thalweg.parallel.plan_channel import PlanChannel, PlanReader
from thalweg.parallel.relay import HEAD, PLAN, Mirrors, Relay
from thalweg.parallel.shared_memory import WakePipe

PATIENCE = 20.0


def test_what_waits_for_a_follower_of_another_node_holds_up_nobody_else() -> None:
    """A plan that is longer than the ring waits for a follower; the plans of another leader go on, and then it."""
    (blocked, free), failures = (PlanChannel([WakePipe(), WakePipe()], ["leader", "f"], 1024) for _ in range(2)), []
    mirrors = Mirrors(received={0: blocked, 1: free})
    relay = Relay(mirrors, 1, (), PATIENCE, failures.append)
    long, short = bytes(range(250)) * 20, [bytes([i]) * 50 for i in range(8)]
    for count, message in enumerate([long, *short[:2]]):
        relay.receive(HEAD.pack(1, 0, PLAN, count) + message)
    begun, reader = time.monotonic(), PlanReader(free, 0)
    for count, message in enumerate(short):
        relay.receive(HEAD.pack(1, 1, PLAN, count) + message)
        assert reader.read() == message
    assert time.monotonic() - begun < PATIENCE / 4
    late = PlanReader(blocked, 0)
    assert [late.read() for _ in range(3)] == [long, *short[:2]]
    relay.receive(HEAD.pack(1, 0, PLAN, 3) + short[3])
    assert late.read() == short[3] and not failures
    with pytest.raises(RankLost, match="plans 4 to 9 were lost"):
        relay.receive(HEAD.pack(1, 0, PLAN, 9) + short[3])
    relay.close()


def test_a_follower_that_takes_no_plan_ends_the_start() -> None:
    stuck, failures = PlanChannel([WakePipe(), WakePipe()], ["leader", "follower 7"], 1024), []
    relay = Relay(Mirrors(received={0: stuck}), 1, (), 0.2, failures.append)
    relay.receive(HEAD.pack(1, 0, PLAN, 0) + bytes(2000))
    deadline = time.monotonic() + PATIENCE
    while not failures and time.monotonic() < deadline:
        time.sleep(0.01)
    assert failures == ["follower 7 has taken no step for 0.2 s"]
    relay.close()


def test_an_error_of_a_node_whose_clock_is_ahead_comes_before_what_it_causes() -> None:
    """Node 1 is 100 s ahead and 2 ms away. Its process fails at 10.0 s by the client's clock, and the client's own
    processes miss it 3 ms later.
    """
    clocks = NodeClocks()
    for sent, way in ((5.0, 0.009), (6.0, 0.002), (7.0, 0.004)):
        clocks.hear(1, 100.0 + sent, sent + way)
    assert 10.0 < clocks.here(1, 110.0) < 10.003 == clocks.here(0, 10.003)
    for sent in range(40):  # it has been set
        clocks.hear(1, float(sent), sent + 0.002)
    assert clocks.here(1, 50.0) == pytest.approx(50.002)
