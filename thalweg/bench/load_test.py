"""`thalweg bench load`: a server under many streams at once, the client in a process of its own, the engine on one
core.

It checks four things: each stream has the text of its pair (the same request, not streamed), the CPU time of the
server's process for each token, the growth of its memory, and the step rate that the engine keeps beside the server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from thalweg.bench.backends import RequestOptions, make_backend
from thalweg.bench.command import OUTPUT, CommandParser, add_flags, exit_status
from thalweg.bench.datasets import Prompt, random_prompts, vocabulary_of
from thalweg.bench.errors import BenchError, HttpError
from thalweg.bench.http_client import HttpClient
from thalweg.bench.load import ServerLoad, interruptible, no_garbage_collection
from thalweg.bench.load_checks import LoadRound, LoadSample, LoadTest, as_json, checks
from thalweg.bench.paired_requests import compare
from thalweg.bench.pinned_engine import PinnedTask, StepRate
from thalweg.bench.results import provenance, write
from thalweg.bench.server_info import ServerInfo, overhead
from thalweg.bench.server_process import ServerProcess, pin, raise_file_limit, usage
from thalweg.core.messages import Stats
from thalweg.core.plan import PAGE

SPARE_FILES = 128  # beside one for each stream: logs, pipes, libraries
PREFILL_BUDGET = 512  # prompt tokens of a step beside one token of each stream
SETTLE_SECONDS = 10.0  # until pages and descriptors must be returned
SAMPLE_SECONDS = 0.25
FLAGS = f"""
--model           folder=models/tiny  of the checkpoint
--streams         count=1000  streams at once
--rounds          count=3     repetitions, to see whether memory grows
--input-len       count=32    tokens of a prompt
--output-len      count=64    tokens of a stream
--few             count=64    streams of the smaller load
--few-output-len  count=512   tokens of each of those
--max-running-requests  whole=0  the engine's slots; 0: one for each stream
--server-args     text        further flags of `thalweg serve`, as one word
--cpu-limit       number=60   us of the server's CPU a token
--memory-limit    number=64   MiB that a process may grow after round 1
--pace-limit      number=0.8  share of its step rate alone that the engine keeps
--seed            whole=1     of the prompts
{OUTPUT}
"""

Log = Callable[[str], None]


class _State(msgspec.Struct):
    stats: Stats


class _Info(msgspec.Struct):
    internal_states: list[_State]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The loads of a run and the place of each process."""

    prompts: list[Prompt]  # of the streams that run at once
    few: list[Prompt]  # of the smaller load, with longer outputs
    settings: dict[str, str | int]  # of the engine, with a server or alone
    engine_core: int
    other_cores: set[int]

    def server_flags(self, more: str) -> list[str]:
        flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in self.settings.items()]
        return [word for flag in flags for word in flag] + shlex.split(more)


def make_plan(args: argparse.Namespace) -> LoadPlan:
    """Raises BenchError."""
    model, cores = Path(args.model), sorted(os.sched_getaffinity(0))
    if not (model / "tokenizer.json").is_file():
        raise BenchError(f"--model {args.model}: no tokenizer.json there; give the folder of a checkpoint")
    if len(cores) < 2:
        raise BenchError(
            "this process may use one core only, and the engine takes that: allow it two or more (taskset)"
        )
    vocabulary, slots = vocabulary_of(model), args.max_running_requests or args.streams
    pages, few_pages = (-(-(args.input_len + out + 1) // PAGE) for out in (args.output_len, args.few_output_len))
    settings: dict[str, str | int] = {
        "model": args.model,
        "threads": 1,
        "context_length": max(pages, few_pages) * PAGE,
        "max_running_requests": slots,
        "max_total_tokens": max(slots * (pages + 1), args.few * few_pages) * PAGE,
        "chunked_prefill_size": slots + PREFILL_BUDGET,
    }
    many, few = (
        random_prompts(vocabulary, count, args.input_len, output_len, 1.0, args.seed)
        for count, output_len in ((args.streams, args.output_len), (args.few, args.few_output_len))
    )
    return LoadPlan(many, few, settings, cores[0], set(cores[1:]))


class ServerWatcher:
    """`async with watcher as samples:` takes a sample every SAMPLE_SECONDS; `sample()` takes one now."""

    def __init__(self, server: ServerProcess, client: HttpClient) -> None:
        self.server, self.client, self.engine = server, client, server.engine
        self._decode = msgspec.json.Decoder(_Info).decode

    async def sample(self) -> LoadSample:
        """Raises BenchError."""
        reply = await self.client.request("GET", "/server_info")
        if reply.status != 200:
            raise HttpError(f"/server_info answered HTTP {reply.status}: {reply.text.strip()[:200]}")
        stats = self._decode(reply.body).internal_states[0].stats
        return LoadSample(time.perf_counter(), usage(self.server.pid), usage(self.engine), stats)

    async def settled(self) -> LoadSample:
        """Once nothing runs and no page is used, or after SETTLE_SECONDS."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            sample = await self.sample()
            if (
                not (sample.stats.running or sample.stats.waiting or sample.stats.pages_used)
                or time.monotonic() > deadline
            ):
                return sample
            await asyncio.sleep(0.1)

    async def __aenter__(self) -> list[LoadSample]:
        samples: list[LoadSample] = []
        self._task = asyncio.create_task(self._run(samples))
        return samples

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self, samples: list[LoadSample]) -> None:
        while True:
            samples.append(await self.sample())
            await asyncio.sleep(SAMPLE_SECONDS)


class LoadBenchmark:
    """One server, and its loads."""

    def __init__(self, server: ServerProcess, model: str) -> None:
        self.model = model
        self.client, self.control = HttpClient(server.url), HttpClient(server.url)
        self.watcher = ServerWatcher(server, self.control)

    async def round(self, prompts: Sequence[Prompt], backend: str, stream: bool = True) -> LoadRound:
        """All prompts at once. Raises BenchError, and KeyboardInterrupt on Ctrl-C."""
        load = ServerLoad(self.client, make_backend(backend), RequestOptions(self.model, stream=stream), prompts)
        info, stop = ServerInfo(self.control), asyncio.Event()
        before, first, cpu = await info.counters(), await self.watcher.sample(), time.process_time()
        with interruptible(stop), no_garbage_collection():
            async with self.watcher as samples:
                await load.run([0.0] * len(prompts), 0, stop)
        cpu, last = time.process_time() - cpu, await self.watcher.sample()
        if stop.is_set():
            raise KeyboardInterrupt
        spent = overhead(before, await info.counters())
        return LoadRound(load.records, load.duration, [first, *samples, last], cpu, spent)

    async def run(self, args: argparse.Namespace, plan: LoadPlan, log: Log) -> LoadTest:
        """All loads of a run."""
        log("warm-up")
        warm_up = (await self.round(plan.few[:1], "openai")).records[0]
        if not warm_up.ok:
            raise BenchError(f"the warm-up request failed, so the run was not started: {warm_up.error}")
        before, rounds = await self.watcher.settled(), []
        for i in range(args.rounds):
            log(f"{args.streams} streams, round {i + 1} of {args.rounds}")
            rounds.append(await self.round(plan.prompts, "openai"))
        log(f"the same {args.streams} requests, not streamed")
        pairs = await self.round(plan.prompts, "openai", stream=False)
        log(f"{args.few} streams, completions and chat")
        few, chat = await self.round(plan.few, "openai"), await self.round(plan.few, "openai-chat")
        log("comparing")
        options = RequestOptions(self.model, stream=False)
        texts = [await compare(self.control, options, plan.prompts, one.records, pairs.records) for one in rounds]
        self.client.close()
        return LoadTest(before, rounds, pairs, few, chat, texts, await self.watcher.settled())


async def engine_alone(plan: LoadPlan, prompts: Sequence[Prompt]) -> StepRate:
    """The engine's rate with the prompts in a process of its own, on its core, while nothing else runs. Raises
    BenchError.
    """
    task = PinnedTask([list(prompt.ids) for prompt in prompts], prompts[0].output_len, plan.engine_core, plan.settings)
    pipe = asyncio.subprocess.PIPE
    words = (sys.executable, "-m", "thalweg.bench.pinned_engine")
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate(msgspec.json.encode(task))
    if process.returncode:
        raise BenchError(f"the engine alone failed: {errors.decode(errors='replace').strip()[-600:]}")
    return msgspec.json.decode(output, type=StepRate)


async def run(args: argparse.Namespace, argv: list[str], log: Log) -> dict[str, object]:
    """The whole run: prints its checks, returns its result. Raises BenchError."""
    raise_file_limit(args.streams + SPARE_FILES)
    plan = make_plan(args)
    log("the engine alone, on its core")
    alone = await engine_alone(plan, plan.prompts), await engine_alone(plan, plan.few)
    log("starting the server")
    async with ServerProcess(plan.server_flags(args.server_args)) as server:
        pin(server.engine, {plan.engine_core})
        for pid in (server.pid, os.getpid()):
            pin(pid, plan.other_cores)
        bench = LoadBenchmark(server, Path(args.model).resolve().name)
        test = await bench.run(args, plan, log)
        info = await ServerInfo(bench.control).settings()
        bench.control.close()
    checked = list(checks(test, alone, args))
    print("\n".join(check.line for check in checked))
    cores = {"engine_cores": [plan.engine_core], "server_and_client_cores": sorted(plan.other_cores)}
    configuration = {"client": vars(args), "engine": plan.settings, **cores, "server": info}
    return as_json(test, alone, checked) | provenance("bench load", argv, configuration)


def _run(argv: list[str]) -> int:
    text = (
        "Starts a server with its engine on one core, puts it under many streams at once, and checks texts, CPU time of"
        " a token, memory, and the engine's step rate."
    )
    parser = CommandParser(prog="thalweg bench load", description=text)
    add_flags(parser, "", FLAGS)
    args, began = parser.parse_args(argv), time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    result = asyncio.run(run(args, argv, log))
    if args.output_file:
        write(Path(args.output_file), result)
    return 0 if result["ok"] else 1


def main(argv: Sequence[str] | None = None) -> int:
    """0: all checks passed; 1: one did not, or the run failed; 2: wrong flags; 130: Ctrl-C."""
    return exit_status("thalweg bench load", _run, argv)
