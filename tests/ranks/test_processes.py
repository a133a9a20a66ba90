"""The processes of an engine: how they are started, named, controlled and lost. With the bundled model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.compose.matrix import MODEL, settings
from tests.ranks.faults import shared_memory
from tests.ranks.group import SPAWN
from thalweg.core.errors import EngineDead, InvalidRequest
from thalweg.core.messages import DumpExperts, Fatal, FlushCache, StartProfile, UpdateWeights
from thalweg.core.sampling import SamplingParams
from thalweg.engine.child import EngineProcess
from thalweg.engine.client import EngineClient
from thalweg.engine.group import Member, members_of, rank_name
from thalweg.engine.local import LocalEngine
from thalweg.engine.processes import EngineProcesses
from thalweg.layers.moe import ExpertStacks
from thalweg.text.tokenizer import Tokenizer

TP2: dict[str, Any] = {"tp_size": 2, "moe_dense_tp_size": 2}
DP2: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "ep_size": 2}
COPIES: dict[str, Any] = {"dp_size": 2}
PP2: dict[str, Any] = {"pp_size": 2}
PROMPT = list(range(20, 90))
LIMIT_S = 15.0  # in which the loss of a process must be an answer


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def config(**fields: Any) -> Any:
    return settings(num_pages=40, max_running_requests=4, **fields)


@asynccontextmanager
async def serving(**fields: Any) -> AsyncIterator[EngineClient]:
    front = EngineClient(config(**fields), Tokenizer(Path(MODEL)))
    await front.start()
    try:
        yield front
    finally:
        await front.close()


async def collect(front: EngineClient, prompt: list[int], tokens: int) -> list[int]:
    return [token async for piece in front.stream(prompt, greedy(tokens)) for token in piece.ids]


async def eventually(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 120)

    asyncio.run(limited())


def pids(front: EngineClient) -> list[int]:
    assert front._processes is not None
    return [child.pid or 0 for child in front._processes.children]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.fixture(scope="module")
def want() -> list[int]:
    """The tokens of one rank."""
    engine, tokens = LocalEngine(config()), list[int]()
    engine.submit(PROMPT, greedy(24))
    while not engine.idle:
        tokens += [token for delta in engine.step() for token in delta.tokens]
    return tokens


def test_processes_have_names() -> None:
    made = config(tp_size=4, dp_size=2, enable_dp_attention=True)
    assert rank_name(made, 0, 3) == "rank 3 (DP 1, TP 1)"
    assert [member.name for member in members_of(config(**TP2), Path())] == ["rank 0 (TP 0)", "rank 1 (TP 1)"]
    copies = members_of(config(tp_size=2, dp_size=2, moe_dense_tp_size=2), Path())
    assert [(member.rank, member.device) for member in copies] == [(0, 0), (1, 1), (0, 2), (1, 3)]
    assert copies[2].name == "rank 2 (copy 1, TP 0)" and copies[2].rendezvous != copies[0].rendezvous
    stages = members_of(config(**DP2, pp_size=2), Path())
    places = "PP 1, DP 0, TP 0", "PP 1, DP 1, TP 0", "PP 0, DP 0, TP 0", "PP 0, DP 1, TP 0"
    assert [member.name for member in stages] == [f"rank {i} ({place})" for i, place in enumerate(places)]
    assert stages[1].plans is stages[3].plans is not stages[0].plans


@pytest.mark.parametrize("layout", [TP2, DP2, PP2], ids=["tp2", "dp2", "pp2"])
def test_a_killed_process_is_named_and_the_group_restarts(layout: dict[str, Any], want: list[int]) -> None:
    """Control messages before, a kill in the middle of a step, and nothing left behind."""

    async def test() -> None:
        before = shared_memory()
        async with serving(**layout) as front:
            assert await collect(front, PROMPT, 24) == want
            await front.control(FlushCache(0))
            assert "tensors replaced" in await front.control(UpdateWeights(0, MODEL))
            with pytest.raises(InvalidRequest, match="nothing was changed"):
                await front.control(UpdateWeights(0, "/nowhere"))
            assert await asyncio.gather(*(collect(front, PROMPT, 24) for _ in range(3))) == [want] * 3
            await eventually(lambda: front.stats.finished >= 4)
            old = pids(front)
            stream = front.stream(PROMPT, greedy(300))
            await anext(stream)
            os.kill(old[-1], signal.SIGKILL)
            begun = time.monotonic()
            last = "DP 1, TP 0" if "dp_size" in layout else "PP 0" if "pp_size" in layout else "TP 1"
            with pytest.raises(EngineDead, match=rf"rank 1 \({last}\) ended with exit code -9"):
                async for _ in stream:
                    pass
            assert time.monotonic() - begun < LIMIT_S
            assert not any(map(is_running, old)), "the others end, too"
            await eventually(lambda: front.state == "ready")
            assert await collect(front, PROMPT, 24) == want and front.restarts == 1
            new = pids(front)
        assert not any(map(is_running, new)), "no process stays"
        assert shared_memory() <= before

    run(test)


@pytest.mark.parametrize(
    "flags", [{"watchdog_timeout": 2.0, "watchdog_action": "restart"}, {}], ids=["asked", "default"]
)
def test_a_stopped_process_is_named_by_the_watchdog(flags: dict[str, Any]) -> None:
    async def test() -> None:
        async with serving(**TP2, **flags) as front:
            stream = front.stream(PROMPT, greedy(300))
            await anext(stream)
            assert front.rank_states == {"rank 0 (TP 0)": "ready", "rank 1 (TP 1)": "ready"}
            os.kill(pids(front)[1], signal.SIGSTOP)
            await eventually(lambda: front.rank_states["rank 1 (TP 1)"] == "stopped")
            begun = time.monotonic()
            with pytest.raises(EngineDead, match=r"rank 1 \(TP 1\)"):
                async for _ in stream:
                    pass
            assert time.monotonic() - begun < LIMIT_S

    run(test)


def test_an_error_of_another_rank_names_a_stopped_process() -> None:
    """A rank that waited for it in vain says so before the watchdog does."""

    async def test() -> None:
        async with serving(**TP2, watchdog_timeout=60.0) as front:
            stream = front.stream(PROMPT, greedy(300))
            await anext(stream)
            os.kill(pids(front)[1], signal.SIGSTOP)
            await eventually(lambda: front.rank_states["rank 1 (TP 1)"] == "stopped")
            front._handle(Fatal("rank 0 (TP 0): rank 1 (TP 1): no part in step 3 for 60 s"), 0)
            with pytest.raises(EngineDead, match=r"rank 1 \(TP 1\): stopped by a signal"):
                async for _ in stream:
                    pass

    run(test)


def test_the_first_error_is_the_reason_whichever_comes_first() -> None:
    async def test() -> None:
        async with serving(**TP2) as front:
            stream = front.stream(PROMPT, greedy(300))
            await anext(stream)
            assert front._processes is not None
            front._processes.fatals += [
                (2.0, "rank 0 (TP 0): connection closed"),
                (1.0, "rank 1 (TP 1): out of memory"),
            ]
            front._handle(Fatal("rank 0 (TP 0): connection closed"), 0)
            with pytest.raises(EngineDead, match=r"rank 1 \(TP 1\): out of memory"):
                async for _ in stream:
                    pass

    run(test)


def test_copies_share_nothing_and_the_load(want: list[int]) -> None:
    async def test() -> None:
        async with serving(**COPIES) as front:
            answers = await asyncio.gather(*(collect(front, PROMPT[i:], 24) for i in range(4)))
            assert answers[0] == want
            await eventually(lambda: len(front._stats) == 2 and front.stats.finished == 4)
            assert [stats.finished for stats in front.of_ranks.values()] == [2, 2]
            assert front.ready is not None and front.ready.slots == 8

    run(test)


def test_a_stopped_process_is_the_cause_of_what_others_report() -> None:
    """Other ranks wait for it in vain, and may say so first."""
    processes = object.__new__(EngineProcesses)
    processes.members, processes.own = [Member(i, i, f"rank {i}") for i in range(2)], 0
    processes.spawned = [object.__new__(EngineProcess) for _ in range(2)]
    for spawned in processes.spawned:
        spawned.child = SPAWN.Process(target=time.sleep, args=(60,))
        spawned.child.start()
    try:
        assert processes.killed(or_stopped=True) == ""
        os.kill(processes.children[1].pid or 0, signal.SIGSTOP)
        deadline = time.monotonic() + LIMIT_S
        while not (cause := processes.killed(or_stopped=True)) and time.monotonic() < deadline:
            pass
        assert cause == "rank 1: stopped by a signal"
    finally:
        for child in processes.children:
            child.kill()
            child.join()


def test_a_stopped_copy_is_noticed_while_another_works() -> None:
    async def test() -> None:
        async with serving(**COPIES, watchdog_timeout=2.0) as front:
            streams = [front.stream(PROMPT[i:], greedy(300)) for i in range(2)]
            for stream in streams:  # one on each copy
                await anext(stream)
            await streams[0].aclose()
            await eventually(lambda: front._router.ranks[0].work == 0)
            os.kill(pids(front)[1], signal.SIGSTOP)
            try:
                deadline = time.monotonic() + LIMIT_S
                while front.state != "hung" and time.monotonic() < deadline:
                    await collect(front, PROMPT[2:], 4)  # the other copy has less work
                assert front.state == "hung" and "copy 1: stopped by a signal" in front.reason
            finally:
                os.kill(pids(front)[1], signal.SIGCONT)
            await eventually(lambda: front.state == "ready")
            assert len([token async for piece in streams[1] for token in piece.ids]) > 200

    run(test)


def test_a_start_that_fails_says_why() -> None:
    front = EngineClient(msgspec.structs.replace(config(**TP2), model_path="/nowhere"), Tokenizer(Path(MODEL)))

    async def test() -> None:
        with pytest.raises(EngineDead, match="/nowhere"):
            await front.start()

    run(test)


@pytest.mark.parametrize("layout", [TP2, DP2, COPIES, PP2], ids=["tp2", "dp2", "copies", "pp2"])
def test_an_engine_in_the_callers_process(layout: dict[str, Any], want: list[int], tmp_path: Path) -> None:
    engine = LocalEngine(config(**layout))
    try:
        uids = [engine.submit(PROMPT, greedy(24))[0] for _ in range(3)]
        tokens: dict[int, list[int]] = {uid: [] for uid in uids}
        while not engine.idle:
            for delta in engine.step():
                tokens[delta.uid] += delta.tokens
        assert list(tokens.values()) == [want] * 3
        assert "tensors replaced" in engine.control(UpdateWeights(0, MODEL))
        engine.control(StartProfile(0, str(tmp_path), steps=1))
        engine.submit(PROMPT, greedy(300))
        for _ in range(5):
            engine.step()
        ranks = set[str]() if layout is COPIES else {"rank0", "rank1"}  # one copy has the request
        asyncio.run(eventually(lambda: len(list(tmp_path.glob("*.trace.json.gz"))) == max(len(ranks), 1)))
        assert {path.name.split("-")[1] for path in tmp_path.glob("*-rank*")} == ranks
        os.kill(engine.others._processes.children[0].pid, signal.SIGKILL)  # type: ignore[union-attr]
        begun = time.monotonic()
        with pytest.raises(EngineDead, match="ended with exit code -9"):
            while True:
                engine.step()
        assert time.monotonic() - begun < LIMIT_S
    finally:
        engine.close()


def test_a_stopped_process_ends_an_engine_in_the_callers_process() -> None:
    engine = LocalEngine(config(**TP2))
    try:
        engine.submit(PROMPT, greedy(300))
        for _ in range(5):
            engine.step()
        os.kill(engine.others._processes.children[0].pid, signal.SIGSTOP)  # type: ignore[union-attr]
        begun = time.monotonic()
        with pytest.raises(EngineDead, match=r"rank 1 \(TP 1\): stopped by a signal"):
            while True:
                engine.step()
        assert time.monotonic() - begun < LIMIT_S
    finally:
        engine.close()


def test_a_drafter_reads_streams_of_other_stages(want: list[int]) -> None:
    """EAGLE-3 reads the residual stream before layers of the first stage; its drafts are those of one process."""
    head, counts = str(Path(MODEL).parent / "tiny-eagle3"), list[tuple[int, int]]()
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": head, "num_drafts": 3}
    for layout in ({}, PP2):
        engine = LocalEngine(config(**layout, **drafts))
        try:
            assert generated(engine) == want
            counts.append((engine.loop.stats().accepted_tokens, engine.loop.stats().drafted_tokens))
        finally:
            engine.close()
    assert counts[0] == counts[1] and counts[0][0] > 0


@pytest.mark.parametrize("stages", [1, 2])
def test_experts_that_moved_are_updated_and_written_to_a_file(stages: int, want: list[int], tmp_path: Path) -> None:
    """New weights go where the experts are now; an engine that starts from the file has them there. A stage writes for
    all, and the first layer is dense.
    """
    layout = DP2 | {"pp_size": stages, "overlap_schedule": False}
    moving = {"enable_eplb": True, "eplb_rebalance_num_iterations": 8, "ep_num_redundant_experts": 2}
    engine = LocalEngine(config(**layout, **moving))
    try:
        for _ in range(2):
            assert generated(engine) == want
            assert "tensors replaced" in engine.control(UpdateWeights(0, MODEL))
        assert engine.loop.stats().expert_moves > 10
        path = Path(engine.control(DumpExperts(0, str(tmp_path))))
    finally:
        engine.close()
    record, placed = json.loads(path.read_text()), {"ep_num_redundant_experts": 2, "init_expert_location": str(path)}
    assert [any(counts) for counts in record["logical_count"]] == [False, True, True, True]
    engine = LocalEngine(config(**layout, **placed))
    try:
        assert generated(engine) == want
        layers = [module for module in engine.runner.model.modules() if isinstance(module, ExpertStacks)]
        placements = [layer.placement for layer in layers if layer.placement is not None]
        rows = [record["physical_to_logical_map"][placement.layer] for placement in placements]
        assert [placement.by_slot for placement in placements] == rows
        with pytest.raises(InvalidRequest, match="--enable-eplb"):
            engine.control(DumpExperts(0, str(tmp_path)))
    finally:
        engine.close()


def generated(engine: LocalEngine) -> list[int]:
    uids, tokens = engine.submit(PROMPT, greedy(24)), list[int]()
    while not engine.idle:
        tokens += [token for delta in engine.step() if delta.uid in uids for token in delta.tokens]
    return tokens


def test_an_idle_engine_waits_for_no_step(want: list[int]) -> None:
    """The other leaders take part in one more round after the last step with rows; the caller may pause behind it."""
    engine = LocalEngine(config(**DP2, overlap_schedule=False, watchdog_timeout=3.0))
    try:
        for _ in range(2):
            uids, tokens = engine.submit(PROMPT, greedy(8)), list[int]()
            while not engine.idle:
                tokens += [token for delta in engine.step() if delta.uid in uids for token in delta.tokens]
            assert tokens == want[:8]
            time.sleep(4.0)  # longer than a rank may take
    finally:
        engine.close()


def test_a_refused_request_of_another_process_leaves_nothing() -> None:
    engine = LocalEngine(config(**COPIES))
    try:
        for _ in range(2):  # one for each copy
            engine.submit(list(range(5)) * 9999, greedy(1))
        refused, deadline = 0, time.monotonic() + 30
        while not engine.idle and time.monotonic() < deadline:
            try:
                engine.step()
            except InvalidRequest:
                refused += 1
        assert engine.idle and refused == 2
    finally:
        engine.close()
