"""A hundred streams on the bundled model, more than its slots, while clients disconnect: nothing is lost or mixed up."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import pytest

from tests.cpu.fakes import DEEPSEEK_V32, FakeFront
from thalweg.bench.backends import BACKENDS, RequestOptions, send_request
from thalweg.bench.datasets import SampleRequest, vocabulary_of
from thalweg.bench.errors import BenchError
from thalweg.bench.http_client import HttpClient
from thalweg.bench.load import LoadedServer, main
from thalweg.bench.load_checks import (
    LoadRound,
    LoadSample,
    LoadTest,
    PairedTexts,
    StepRate,
    as_json,
    checks,
    margin_at,
    step_rate,
)
from thalweg.bench.metrics import Record
from thalweg.bench.server_process import ProcessUsage, ServerProcess, engine_processes, raise_file_limit, usage
from thalweg.bench.statistics import common_length
from thalweg.config.server import ServerOptions
from thalweg.core.messages import Stats
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import EngineClient
from thalweg.server.context import STARTS_PER_TURN, AppContext

MODEL = Path(__file__).resolve().parents[2] / "models" / "tiny"
FLAGS = ("--max-running-requests", "48", "--max-total-tokens", "8192", "--context-length", "256", "--threads", "1")
ROUTES = ("openai", "sglang", "openai-chat")
STREAMS, LEAVERS = 100, 30


def prompts(count: int, seed: int) -> list[SampleRequest]:
    """Of lengths that end at both sides of a page."""
    vocabulary, rng = vocabulary_of(MODEL), Random(seed)
    sizes = [rng.choice((3, 30, 60, 63, 64, 65)) for _ in range(count)]
    return [
        SampleRequest(rng.randint(4, 40), ids=vocabulary.draw(rng, size), input_len=size, decode=vocabulary.decode)
        for size in sizes
    ]


async def answer(client: HttpClient, route: str, prompt: SampleRequest, stream: bool) -> Record:
    record = Record()
    await send_request(client, BACKENDS[route], prompt, RequestOptions("tiny", stream=stream, timeout=60), record)
    return record


async def leave(client: HttpClient, prompt: SampleRequest, rng: Random) -> bool:
    """Reads some tokens of a stream, none perhaps, and hangs up; whether that was before its end."""
    record = Record()
    body = replace(prompt, output_len=150)
    asked = asyncio.create_task(send_request(client, BACKENDS["openai"], body, RequestOptions("tiny"), record))
    enough, patience = rng.randint(1, 20), rng.uniform(0.1, 3.0)
    deadline = asyncio.get_running_loop().time() + patience
    while len(record.itl) < enough and asyncio.get_running_loop().time() < deadline and not asked.done():
        await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.wait({asked})
    return not record.done


async def counter(client: HttpClient, name: str) -> float:
    page = (await client.request("GET", "/metrics")).text
    found = re.search(rf"^thalweg_{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
    assert found, f"/metrics has no thalweg_{name}"
    return float(found[1])


def check_texts(streams: Sequence[Record], twins: Sequence[Record], asked: Sequence[SampleRequest]) -> None:
    for stream, twin, prompt in zip(streams, twins, asked, strict=True):
        assert not stream.error and not twin.error
        assert stream.output_tokens == twin.output_tokens == prompt.output_len
        assert stream.text == twin.text


def test_streams_equal_unstreamed_requests_while_others_disconnect() -> None:
    async def body() -> None:
        rng = Random(5)
        async with ServerProcess((str(MODEL), *FLAGS)) as server:
            loaded = LoadedServer(server, "tiny")
            client, control = loaded.client, loaded.control
            await answer(client, "openai", prompts(1, 0)[0], True)
            before = (await loaded.settled()).stats
            mine, files = prompts(STREAMS, 1), usage(server.pid).files
            kinds = [ROUTES[i % len(ROUTES)] for i in range(STREAMS)]
            leaving = [asyncio.create_task(leave(client, p, rng)) for p in prompts(LEAVERS, 2)]
            streams = await asyncio.gather(*(answer(client, k, p, True) for k, p in zip(kinds, mine, strict=True)))
            left = sum(await asyncio.gather(*leaving))
            twins = await asyncio.gather(*(answer(client, k, p, False) for k, p in zip(kinds, mine, strict=True)))
            plain = [i for i, kind in enumerate(kinds) if kind != "openai-chat"]
            verdict = PairedTexts()
            rounds = [LoadRound([rows[i] for i in plain], 0.0, [], 0.0, None) for rows in (streams, twins)]
            await loaded.compare([mine[i] for i in plain], rounds[0], rounds[1], verdict)
            after = (await loaded.settled()).stats
            assert verdict.compared == len(plain) and not verdict.wrong
            assert verdict.excused <= 1, "near-ties are rarer than that"
            chats = [i for i, kind in enumerate(kinds) if kind == "openai-chat"]
            check_texts([streams[i] for i in chats], [twins[i] for i in chats], [mine[i] for i in chats])
            assert [r.output_tokens for r in (*streams, *twins)] == [p.output_len for p in (*mine, *mine)]
            assert len({r.text for r in streams}) == STREAMS, "the prompts have to have answers of their own"

            assert (after.running, after.waiting, after.pages_used) == (0, 0, 0)
            gone = await counter(control, "disconnects_total")
            assert LEAVERS // 2 <= gone <= left, "who leaves before its request was read is not counted"
            asked = verdict.compared - verdict.equal
            assert after.finished - before.finished == 2 * STREAMS + asked + LEAVERS - left, "a request was lost"
            assert after.aborted - before.aborted <= left
            told = sum(r.output_tokens for r in (*streams, *twins))
            assert after.decode_tokens - before.decode_tokens >= told
            client.close()
            for _ in range(100):
                if usage(server.pid).files <= files:
                    break
                await asyncio.sleep(0.05)
            assert usage(server.pid).files <= files, "connections stay open"

    asyncio.run(asyncio.wait_for(body(), 120))


def test_a_burst_begins_a_few_at_a_time_and_in_order() -> None:
    """Other work gets its turn between them; a request that is cancelled meanwhile blocks nobody."""

    async def body() -> None:
        begun: list[int] = []

        async def come(n: int) -> None:
            await context.next_turn()
            begun.append(n)

        context = AppContext(cast(EngineClient, FakeFront()), ServerOptions(), DEEPSEEK_V32, "", SamplingParams())
        for burst in range(2):  # the second finds it as the first did
            begun.clear()
            tasks = [asyncio.create_task(come(n)) for n in range(40)]
            seen, most = 0, 0
            for turn in range(120):
                await asyncio.sleep(0)
                if turn == 3:
                    tasks[8].cancel()
                most, seen = max(most, len(begun) - seen), len(begun)
            await asyncio.gather(*tasks, return_exceptions=True)
            assert begun == [n for n in range(40) if n != 8], f"burst {burst}"
            assert most == STARTS_PER_TURN

    asyncio.run(asyncio.wait_for(body(), 10))


def test_a_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    async def body() -> None:
        server = ServerProcess((str(MODEL), "--max-running-requests", "0"))
        with pytest.raises(BenchError, match="did not start.*max_running_requests|max-running-requests"):
            async with server:
                pass
        with pytest.raises(BenchError, match="is gone"):
            usage(server.pid)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_usage_counts_the_time_and_memory_of_a_process() -> None:
    code = (
        "import sys,time\nx=bytearray(64<<20)\nwhile time.process_time()<0.5: pass\nprint('up',flush=True);"
        " sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdin is not None and child.stdout.readline()
        seen = usage(child.pid)
        assert 0.4 < seen.cpu < 5 and 64 << 20 < seen.rss < 1 << 30 and seen.files >= 3
        assert engine_processes(child.pid) == []
        child.stdin.close()


def test_a_file_limit_that_cannot_be_raised_is_told() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 100))\n"
        "from thalweg.bench.server_process import BenchError, raise_file_limit\n"
        "raise_file_limit(80); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "try: raise_file_limit(1128)\nexcept BenchError as error: print(error)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert (
        told[0] == "80" and "1128 open files are needed and this user may have 100" in told[1] and "ulimit" in told[1]
    )
    raise_file_limit(1)  # never lowers it


def test_the_first_difference_of_two_texts_and_its_margin() -> None:
    assert (common_length("same", "sand"), common_length("ab", "abc"), common_length("x", "y")) == (2, 2, 0)
    log = {
        "text_offset": [0, 2, 2, 4],
        "top_logprobs": [{"a": -0.5, "b": -3.0}, {"c": -1.0, "d": -1.0001}, {"e": 0.0, "f": -9.0}, None],
    }
    page = {"text": "abcdef", "logprobs": log}
    assert margin_at(page, 0) == 2.5
    assert margin_at(page, 3) == pytest.approx(0.0001), "the nearest of the tokens that make these characters"
    assert margin_at(page, 5) == float("inf") and margin_at(page, 7) == float("inf")


def look(at: float, steps: int, running: int = 4, prefill: int = 9, cpu: float = 0.0) -> LoadSample:
    stats = Stats(running=running, steps=steps, decode_tokens=4 * steps, prefill_tokens=prefill)
    return LoadSample(at, ProcessUsage(cpu / 2, 1, 1), ProcessUsage(cpu, 1, 1), stats)


def test_the_step_rate_counts_full_batches_only() -> None:
    filling, ending = look(0.0, 2, running=3), look(9.0, 95, running=2)
    prompts_yet = look(0.5, 4, prefill=8)
    full = [look(1.0, 10, cpu=1.0), look(2.0, 20, cpu=1.5), look(3.0, 30, cpu=2.0)]
    assert step_rate([filling, prompts_yet, *full, ending], 4) == StepRate(10.0, 1e6 / 80, 20)
    assert step_rate([filling, full[0], ending], 4) is None
    records = [Record(output_tokens=40, done=True) for _ in range(4)]
    one = LoadRound(records, 9.0, [filling, *full, look(9.0, 95, running=0, cpu=3.2)], 0.08, None)
    assert one.cpu_us["server"] == pytest.approx(1e4) and one.as_json()["client_cpu_us_per_token"] == pytest.approx(500)
    assert one.as_json()["engine_step_rate"] == msgspec.to_builtins(StepRate(10.0, 1e6 / 80, 20))


def whole(**changes: Any) -> tuple[LoadTest, tuple[StepRate, StepRate]]:
    """A run without a flaw: 4 streams, 2 of the smaller load, 10 tokens each; then with `changes`."""

    def one(n: int, first: int) -> LoadRound:
        looks = [
            LoadSample(first + t, ProcessUsage(first + 1e-5 * n * t, 1 << 20, 9), ProcessUsage(0, 1 << 20, 1), stats)
            for t, stats in enumerate(Stats(running=n, steps=5 * t, decode_tokens=5 * n * t) for t in range(3))
        ]
        return LoadRound(
            [Record(output_tokens=10, done=True, start=1.0, latency=1.0) for _ in range(n)], 2.0, looks, 0.0, None
        )

    before = LoadSample(0.0, ProcessUsage(0, 1 << 20, 9), ProcessUsage(0, 1 << 20, 1), Stats(decode_tokens=3))
    seen = LoadTest(
        before=before,
        rounds=[one(4, 0), one(4, 10)],
        pairs=one(4, 20),
        few=one(2, 30),
        chat=one(2, 40),
        texts=PairedTexts(compared=8, equal=7, excused=1, asked_tokens=10),
        after=before._replace(stats=Stats(decode_tokens=3 + 160 + 10)),
    )
    return seen._replace(**changes), (StepRate(5.0, 100.0, 10), StepRate(5.0, 100.0, 10))


def missed(seen: LoadTest, paces: tuple[StepRate, StepRate], **args: float) -> list[str]:
    told = {
        "streams": 4,
        "few": 2,
        "max_running_requests": 0,
        "cpu_limit": 60.0,
        "memory_limit": 1.0,
        "step_rate_limit": 0.8,
    }
    return [check.name for check in checks(seen, paces, Namespace(**told | args)) if not check.ok]


def test_every_broken_promise_is_reported() -> None:
    good, paces = whole()
    assert missed(good, paces) == [] and as_json(good, paces, [])["ok"]
    stats = good.after.stats
    lost = whole(after=good.after._replace(stats=msgspec.structs.replace(stats, decode_tokens=stats.decode_tokens + 1)))
    assert missed(*lost) == ["sampled tokens that the answers have"]
    assert missed(*whole(texts=PairedTexts(compared=4, equal=3, wrong=["x"], asked_tokens=10))) == [
        "streams whose text is that of the unstreamed answer"
    ]
    held = good.after._replace(stats=msgspec.structs.replace(stats, pages_used=1), server=ProcessUsage(0, 1 << 20, 12))
    assert missed(*whole(after=held)) == [
        "requests and pages left at the end",
        "open files of the server, after - before",
    ]
    good.rounds[1].records[0].error = "HTTP 500"
    assert missed(good, paces) == ["requests that failed"]
    good.rounds[1].records[0].error = ""
    grown = good.pairs.samples[-1]._replace(engine=ProcessUsage(0, 3 << 20, 1))
    assert missed(good._replace(pairs=good.pairs._replace(samples=[grown])), paces) == [
        "memory of the engine, growth after round 1"
    ]
    assert missed(good, paces, cpu_limit=0.5) == [
        f"server CPU a token, {name}" for name in ("4 streams", "2 streams", "2 streams, chat")
    ]
    assert missed(good, (StepRate(6.3, 100.0, 10), paces[1])) == [
        "engine step rate, 4 streams, of that without a server"
    ]
    assert missed(good, (StepRate(6.3, 100.0, 10), paces[1]), max_running_requests=2) == []


def test_a_run_that_cannot_start_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--model", str(tmp_path)]) == 1
    assert "no tokenizer.json there; give the folder of a checkpoint" in capsys.readouterr().err
