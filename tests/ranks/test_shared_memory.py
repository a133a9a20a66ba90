"""Shared memory between processes: wake pipes, the plan channel of a rank, and the step_records of data-parallel ranks."""

from __future__ import annotations

import multiprocessing
import random
import select
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from thalweg.core.agreement import RankStep
from thalweg.core.errors import RankLost
from thalweg.engine.coordination import DataParallelSteps
from thalweg.engine.worker import Worker
from thalweg.parallel.plan_channel import PlanChannel, PlanReader, PlanWriter
from thalweg.parallel.shared_memory import SharedMemory, WakePipe
from thalweg.parallel.step_records import RECORD, StepExchange, StepRecords

SPAWN = multiprocessing.get_context("spawn")
PATIENCE = 20.0


def channel(followers: int, ring: int = 4096) -> PlanChannel:
    names = ["leader", *(f"follower {i}" for i in range(followers))]
    return PlanChannel([WakePipe() for _ in names], names, ring)


def messages(seed: int, count: int, longest: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.choice((0, 1, 30, rng.randrange(longest)))) for _ in range(count)]


def _read_all(shared: PlanChannel, follower: int, count: int, results: Any) -> None:
    reader = PlanReader(shared, follower)
    for _ in range(count):
        results.put(reader.read())
        reader.done()


def test_followers_in_other_processes_read_every_message_in_order() -> None:
    """Messages longer than the ring go through it in parts."""
    shared, sent = channel(2), messages(1, 200, 20_000)
    queues = [SPAWN.Queue() for _ in range(2)]
    readers = [
        SPAWN.Process(target=_read_all, args=(shared, i, len(sent), queue), daemon=True)
        for i, queue in enumerate(queues)
    ]
    for reader in readers:
        reader.start()
    writer = PlanWriter(shared, PATIENCE)
    for message in sent:
        writer.write(message)
    for queue, reader in zip(queues, readers, strict=True):
        assert [queue.get(timeout=PATIENCE) for _ in sent] == sent
        reader.join(PATIENCE)
    assert [shared.carried_out(follower) for follower in range(2)] == [200, 200]


def test_a_follower_that_reads_nothing_is_named() -> None:
    shared = channel(2)
    writer, reader = PlanWriter(shared, 0.2), PlanReader(shared, 0)
    writer.write(b"x" * 4000)
    assert reader.read() == b"x" * 4000
    with pytest.raises(RankLost, match=r"follower 1 has taken no step for 0\.2 s"):
        writer.write(b"y" * 4000)


def test_an_idle_follower_sleeps_until_it_is_rung() -> None:
    shared, got = channel(1), list[bytes]()
    reader = threading.Thread(target=lambda: got.append(PlanReader(shared, 0).read()))
    reader.start()
    time.sleep(0.1)
    cpu = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - cpu < 0.1, "it must not poll"
    begun = time.monotonic()
    PlanWriter(shared, PATIENCE).write(b"go")
    reader.join(PATIENCE)
    assert got == [b"go"] and time.monotonic() - begun < 0.5


def test_rings_before_a_wait_are_kept() -> None:
    wake_pipe, is_ready = WakePipe(), [False, True]
    for _ in range(100_000):  # more than a pipe holds
        wake_pipe.wake()
    assert wake_pipe.wait(lambda: is_ready.pop(0), time.monotonic() + 5)
    assert not wake_pipe.wait(lambda: False, time.monotonic() + 0.05)


def test_a_process_that_polls_is_not_called() -> None:
    """Nothing is written to its pipe while it looks for itself; before and after that, a call is kept."""
    wake_pipe, readable = WakePipe(), list[bool]()

    def looks() -> bool:
        wake_pipe.wake()
        readable.append(bool(select.select([wake_pipe.receives], [], [], 0)[0]))
        return True

    assert wake_pipe.wait(looks, time.monotonic() + 5) and readable == [False]
    wake_pipe.wake()
    assert select.select([wake_pipe.receives], [], [], 0)[0]


def step_of(step: int, rank: int) -> RankStep:
    return RankStep(step, rows=rank, tokens=70_000 + rank, sampled_rows=3, num_drafts=rank, is_verify=rank == 1)


def on_board(ranks: int, work: Callable[[StepExchange], None], step_records: StepRecords) -> None:
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            work(StepExchange(step_records, rank))
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def board_of(ranks: int, timeout: float = PATIENCE) -> StepRecords:
    return StepRecords([WakePipe() for _ in range(ranks)], [f"rank {i}" for i in range(ranks)], timeout)


def exchange_many(exchange: StepExchange) -> None:
    """Ranks of different pace; every one sees the same records in every round."""
    rng = random.Random(exchange.rank)
    for step in range(300):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.002)
        got = exchange.exchange(step_of(step, exchange.rank))
        assert got == [step_of(step, rank) for rank in range(len(got))], f"rank {exchange.rank}, step {step}"


def test_all_ranks_read_the_same_records() -> None:
    on_board(4, exchange_many, board_of(4))


@pytest.mark.parametrize("bug", ["one record a rank", "any record will do"])
def test_planted_bugs_of_the_board_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "one record a rank":
        monkeypatch.setattr(StepExchange, "_place", lambda self, rank: 2 * rank * RECORD)
    else:

        def read(self: StepExchange, rank: int) -> RankStep | None:
            at = self._place(rank)
            return RankStep.unpack(bytes(self.step_records.memory.bytes[at : at + RECORD]))

        monkeypatch.setattr(StepExchange, "_read", read)
    with pytest.raises((AssertionError, RankLost)):
        on_board(4, exchange_many, board_of(4, timeout=1.0))


def test_a_rank_that_writes_no_record_is_named() -> None:
    step_records = board_of(3, timeout=0.2)
    late = StepExchange(step_records, 2)
    late.publish(step_of(1, 2))
    with pytest.raises(RankLost, match=r"rank 1: no part in step 1 for 0\.2 s"):
        StepExchange(step_records, 0).exchange(step_of(1, 0))


def test_a_rank_that_has_ended_is_named_at_once() -> None:
    step_records = board_of(2)
    threading.Timer(0.1, lambda: step_records.mark_lost(1)).start()
    with pytest.raises(RankLost, match="rank 1 has ended"):
        StepExchange(step_records, 0).exchange(step_of(1, 0))


def test_an_idle_rank_hears_the_first_that_wakes() -> None:
    step_records = board_of(2)
    first, second = StepExchange(step_records, 0), StepExchange(step_records, 1)
    assert not second.is_called
    thread = threading.Thread(target=lambda: first.exchange(step_of(0, 0)))
    thread.start()
    second.wake_pipe.sleep(PATIENCE)
    assert second.is_called
    assert second.exchange(step_of(0, 1))[0].tokens == 70_000
    thread.join()
    assert not second.is_called


def test_a_ring_that_was_heard_too_early_is_not_lost() -> None:
    """Rank 0 goes on to the next round while rank 1 still sleeps in this one, and wakes it once for both."""
    step_records = board_of(2)
    first, second = StepExchange(step_records, 0), StepExchange(step_records, 1)
    steps = DataParallelSteps(cast(Worker, None), second, 2)
    second.publish(step_of(0, 1))
    first.exchange(step_of(0, 0))
    first.publish(step_of(0, 0))
    step_records.wake_pipes[1].wake()
    second.wake_pipe.clear()
    second.exchange(step_of(0, 1))
    assert steps.is_busy, "it must not sleep now"


def test_a_record_fits_64_bytes_with_its_stamp() -> None:
    largest = RankStep(2**40, 2**32 - 1, 65535, 2**32 - 1, 65535, 255, True, False, 65535, 255, True, *[2**32 - 1] * 4)
    packed = largest._replace(control=2**32 - 1, has_ended=True).pack()
    assert len(packed) == RECORD - 8
    assert RankStep.unpack(packed) == largest._replace(control=2**32 - 1, has_ended=True)


def test_memory_has_no_name_and_is_zero() -> None:
    memory = SharedMemory(64)
    assert bytes(memory.bytes) == bytes(64)
    memory.words[3] = -7
    assert memory.bytes[24:32] == (-7).to_bytes(8, "little", signed=True)
