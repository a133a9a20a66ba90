"""`thalweg bench load`: a server under many streams at once, the client in a process of its own, the engine on one
core.

It checks four things: each stream has the text of the same request, not streamed, the CPU time of the
server's process for each token, the growth of its memory, and the step rate that the engine keeps beside the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import msgspec

from thalweg.bench.backends import BACKENDS, RequestOptions
from thalweg.bench.command import OUTPUT, CommandParser, add_flags, command
from thalweg.bench.datasets import SampleRequest, random_prompts, vocabulary_of
from thalweg.bench.errors import BenchError, HttpError
from thalweg.bench.http_client import HttpClient
from thalweg.bench.in_process import EngineStep, exactly, generate
from thalweg.bench.load_checks import (
    LoadRound,
    LoadSample,
    LoadTest,
    PairedTexts,
    StepRate,
    as_json,
    checks,
    margin_at,
)
from thalweg.bench.load_driver import LoadRun, interruptible, no_garbage_collection
from thalweg.bench.results import provenance, write
from thalweg.bench.server_info import ServerInfo, overhead
from thalweg.bench.server_process import ServerProcess, pin, raise_file_limit, usage
from thalweg.bench.statistics import common_length
from thalweg.config.tree import command_line, options_of
from thalweg.core.messages import Stats
from thalweg.core.plan import PAGE
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve

SPARE_FILES = 128  # beside one for each stream: logs, pipes, libraries
PREFILL_BUDGET = 512  # prompt tokens of a step beside one token of each stream
SETTLE_SECONDS = 10.0  # until pages and descriptors must be returned
SAMPLE_SECONDS = 0.25
NEAR_TIE = 1e-3  # in logits: the rounding of another batch
FLAGS = f"""
--model           model=models/tiny  folder of the checkpoint
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
--step-rate-limit  number=0.8  least step rate of the engine beside a server, as a share of its rate without one
--seed            whole=1     of the prompts
{OUTPUT}
"""

Log = Callable[[str], None]
Settings = dict[str, str | int]  # of the engine, with a server or alone


def make_loads(args: argparse.Namespace) -> tuple[list[SampleRequest], list[SampleRequest], Settings]:
    """Prompts of the streams, prompts of the smaller load with its longer outputs, and the engine's settings. Raises
    BenchError.
    """
    model = Path(args.model)
    if not (model / "tokenizer.json").is_file():
        raise BenchError(f"--model {args.model}: no tokenizer.json there; give the folder of a checkpoint")
    slots = args.max_running_requests or args.streams
    pages, few_pages = (-(-(args.input_len + out + 1) // PAGE) for out in (args.output_len, args.few_output_len))
    settings: Settings = {
        "model": args.model,
        "threads": 1,
        "context_length": max(pages, few_pages) * PAGE,
        "max_running_requests": slots,
        "max_total_tokens": max(slots * (pages + 1), args.few * few_pages) * PAGE,
        "chunked_prefill_size": slots + PREFILL_BUDGET,
    }
    many, few = (
        random_prompts(vocabulary_of(model), count, args.input_len, output_len, 1.0, args.seed)
        for count, output_len in ((args.streams, args.output_len), (args.few, args.few_output_len))
    )
    return many, few, settings


class LoadedServer:
    """A server under loads."""

    def __init__(self, server: ServerProcess, model: str) -> None:
        self.server, self.engine, self.model = server, server.engine, model
        self.client, self.control = HttpClient(server.url), HttpClient(server.url)
        self.info = ServerInfo(self.control)

    async def sample(self) -> LoadSample:
        """Raises BenchError."""
        states = (await self.info.settings()).get("internal_states")
        if not states:
            raise HttpError("/server_info has no internal_states: the server's engine does not answer")
        stats = msgspec.convert(states[0]["stats"], Stats)
        return LoadSample(time.perf_counter(), usage(self.server.pid), usage(self.engine), stats)

    async def settled(self) -> LoadSample:
        """A sample as soon as nothing runs and no page is used, or after SETTLE_SECONDS."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while any((sample := await self.sample()).left) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return sample

    async def _watch(self, samples: list[LoadSample]) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            samples.append(await self.sample())

    async def round(self, prompts: Sequence[SampleRequest], backend: str = "openai", stream: bool = True) -> LoadRound:
        """All prompts at once. Raises BenchError, and KeyboardInterrupt on Ctrl-C."""
        load = LoadRun(self.client, BACKENDS[backend], RequestOptions(self.model, stream=stream), prompts)
        before, samples, stop = await self.info.counters(), [await self.sample()], asyncio.Event()
        with interruptible(stop), no_garbage_collection():
            cpu, watching = time.process_time(), asyncio.create_task(self._watch(samples))
            await load.run((), 0, stop)
            cpu = time.process_time() - cpu
            watching.cancel()
        samples.append(await self.sample())
        if stop.is_set():
            raise KeyboardInterrupt
        new = (await self.info.counters()).since(before)
        return LoadRound(load.records, load.duration, samples, cpu, overhead(new))

    async def compare(
        self, prompts: Sequence[SampleRequest], streams: LoadRound, pairs: LoadRound, into: PairedTexts
    ) -> None:
        """Compares each stream's text with its pair's: a lost, doubled or reordered token would change it. Where they
        differ, the model is asked for log-probabilities, because a near-tie explains it. Failed ones are left out.
        """
        options = RequestOptions(self.model)
        for i, (prompt, stream, pair) in enumerate(zip(prompts, streams.records, pairs.records, strict=True)):
            if not (stream.ok and pair.ok):
                continue
            into.compared += 1
            if stream.text == pair.text:
                into.equal += 1
                continue
            place, sampling = common_length(stream.text, pair.text), options.sampling(prompt, "max_tokens")
            body = {"model": self.model, "prompt": prompt.as_ids_or_text(), "logprobs": 2, **sampling}
            reply = await self.control.request("POST", "/v1/completions", msgspec.json.encode(body))
            margin = margin_at(json.loads(reply.body)["choices"][0], place) if reply.status == 200 else math.inf
            into.asked_tokens += prompt.output_len
            if margin < NEAR_TIE:
                into.excused += 1
            else:
                shown = f"{stream.text[place : place + 24]!r}, its pair {pair.text[place : place + 24]!r}"
                into.wrong.append(f"stream {i} has at character {place} {shown}; the choice led by {margin:.3g}")

    async def run(self, many: Sequence[SampleRequest], few: Sequence[SampleRequest], rounds: int, log: Log) -> LoadTest:
        """All loads of a run."""
        log("warm-up")
        warm_up = (await self.round(few[:1])).records[0]
        if not warm_up.ok:
            raise BenchError(f"the warm-up request failed, so the run was not started: {warm_up.error}")
        before, loads, texts = await self.settled(), [], PairedTexts()
        for i in range(rounds):
            log(f"{len(many)} streams, round {i + 1} of {rounds}")
            loads.append(await self.round(many))
        log(f"the same {len(many)} requests, not streamed")
        pairs = await self.round(many, stream=False)
        log(f"{len(few)} streams, completions and chat")
        fewer, chat = await self.round(few), await self.round(few, "openai-chat")
        log("comparing")
        for load in loads:
            await self.compare(many, load, pairs, texts)
        self.client.close()
        return LoadTest(before, loads, pairs, fewer, chat, texts, await self.settled())


def rate_alone(settings: Settings, core: int, prompts: Sequence[Sequence[int]], output_len: int) -> StepRate:
    """The rate of an engine alone in this process, on one core. Raises ThalwegError."""
    os.sched_setaffinity(0, {core})
    engine = LocalEngine(resolve(options_of(**settings), progress=False).engine)
    requests = [exactly(prompt, output_len) for prompt in prompts]
    cpu, full = 0.0, list[EngineStep]()
    with closing(generate(engine, requests)) as steps:
        for step in steps:
            if step.started < len(requests):
                cpu = time.process_time()
            elif step.running == len(requests):
                full.append(step)
            else:
                break
        cpu = time.process_time() - cpu
    tokens = sum(step.tokens for step in full)
    return StepRate(len(full) / (full[-1].end - full[0].begin), 1e6 * cpu / max(tokens, 1), len(full))


async def run(args: argparse.Namespace, argv: list[str], log: Log) -> dict[str, object]:
    """The whole run: prints its checks, returns its result. Raises BenchError."""
    raise_file_limit(args.streams + SPARE_FILES)
    many, few, settings = make_loads(args)
    core, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise BenchError(
            "this process may use one core only, and the engine takes that: allow it two or more (taskset)"
        )
    log("the engine alone, on its core")
    rates = []
    for prompts in (many, few):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            task = pool.submit(rate_alone, settings, core, [prompt.ids for prompt in prompts], prompts[0].output_len)
            rates.append(task.result())
    alone = rates[0], rates[1]
    log("starting the server")
    async with ServerProcess(command_line(settings) + shlex.split(args.server_args)) as server:
        pin(server.engine, {core})
        for pid in (server.pid, os.getpid()):
            pin(pid, others)
        loaded = LoadedServer(server, Path(args.model).resolve().name)
        test = await loaded.run(many, few, args.rounds, log)
        info = await loaded.info.settings()
        loaded.control.close()
    checked = list(checks(test, alone, args))
    print("\n".join(check.line for check in checked))
    cores = {"engine_cores": [core], "server_and_client_cores": others}
    configuration = {"client": vars(args), "engine": settings, **cores, "server": info}
    return as_json(test, alone, checked) | provenance("bench load", argv, configuration)


@command("thalweg bench load")
def main(argv: list[str]) -> int:
    """0: all checks passed; 1: one did not, or the run failed; 2: wrong flags; 130: Ctrl-C."""
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
