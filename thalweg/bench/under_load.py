"""`thalweg bench load`: a server of our own under many streams at once, the client in a process of its own, the engine
on one core.

It answers four questions: is each stream's text that of its twin that was not streamed, what does a token cost the
server's process, does the memory stay where it is, and how much of its pace does the engine lose to the server beside
it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from thalweg.bench.backends import Options, make_backend
from thalweg.bench.client import Client
from thalweg.bench.datasets import Prompt, random_prompts, vocabulary_of
from thalweg.bench.errors import DatasetError, HttpError, ResultError
from thalweg.bench.load import Load, interruptible, no_collection
from thalweg.bench.load_report import Check, Round, Seen, judge, tell
from thalweg.bench.own_server import OwnServer, ServerError, pin, raise_file_limit
from thalweg.bench.pace import Pace, Task
from thalweg.bench.remote import Server, overhead
from thalweg.bench.results import provenance, write
from thalweg.bench.twins import compare
from thalweg.bench.usage import Parser
from thalweg.bench.watch import Sample, Watcher
from thalweg.core.plan import PAGE

SPARE_FILES = 128  # beside one for each stream: logs, pipes, libraries
BUDGET = 512  # prompt tokens that a step has room for beside one token of each stream
SETTLE_SECONDS = 10.0  # in which pages and descriptors must have come home

Say = Callable[[str], None]


class LoadError(Exception):
    """The run cannot start or cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """prompts: of the streams that run at once. few: of the smaller load, longer outputs. settings: of the engine, with
    a server or alone.
    """

    prompts: list[Prompt]
    few: list[Prompt]
    settings: dict[str, str | int]
    engine_cores: set[int]
    other_cores: set[int]

    def words(self, more: str) -> list[str]:
        """The server's command line. more: further flags."""
        flags = [(f"--{name.replace('_', '-')}", str(value)) for name, value in self.settings.items()]
        return [word for flag in flags for word in flag] + shlex.split(more)


def make_plan(args: argparse.Namespace) -> Plan:
    """Raises LoadError, DatasetError."""
    model = Path(args.model)
    if not (model / "tokenizer.json").is_file():
        raise LoadError(f"--model {args.model}: no tokenizer.json there; give the folder of a checkpoint")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise LoadError("this process may use one core only, and the engine takes that: allow it two or more (taskset)")
    vocabulary = vocabulary_of(model)
    pages, few_pages = (-(-(args.input_len + out + 1) // PAGE) for out in (args.output_len, args.few_output_len))
    slots = args.max_running_requests or args.streams
    settings: dict[str, str | int] = {
        "model": args.model,
        "threads": 1,
        "context_length": max(pages, few_pages) * PAGE,
        "max_running_requests": slots,
        "max_total_tokens": max(slots * (pages + 1), args.few * few_pages) * PAGE,
        "chunked_prefill_size": slots + BUDGET,
    }

    def prompts(count: int, output_len: int) -> list[Prompt]:
        return random_prompts(vocabulary, count, args.input_len, output_len, 1.0, args.seed)

    many, few = prompts(args.streams, args.output_len), prompts(args.few, args.few_output_len)
    return Plan(many, few, settings, set(cores[:1]), set(cores[1:]))


class Bench:
    """One server, and the loads that it is put under."""

    def __init__(self, server: OwnServer, model: str) -> None:
        self.model = model
        self.loads, self.control = Client(server.url), Client(server.url)
        self.watcher = Watcher(server, self.control)

    async def round(self, prompts: Sequence[Prompt], backend: str, stream: bool = True) -> Round:
        """All prompts at once. Raises HttpError, ServerError, and KeyboardInterrupt on Ctrl-C."""
        load = Load(self.loads, make_backend(backend), Options(model=self.model, stream=stream), prompts)
        ask, stop = Server(self.control), asyncio.Event()
        emitted = (await ask.counters()).emit
        first, own = await self.watcher.sample(), time.process_time()
        with interruptible(stop), no_collection():
            async with self.watcher as samples:
                await load.run([0.0] * len(prompts), 0, stop, lambda record: None)
        own, last = time.process_time() - own, await self.watcher.sample()
        if stop.is_set():
            raise KeyboardInterrupt
        spent = overhead(emitted, (await ask.counters()).emit)
        return Round(load.records, load.duration, [first, *samples, last], own, spent)

    async def settled(self) -> Sample:
        """The state once nothing runs and no page is held, or after SETTLE_SECONDS whatever it is."""
        self.loads.close()
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            sample = await self.watcher.sample()
            held = sample.stats.running + sample.stats.waiting + sample.stats.pages_used
            if not held or time.monotonic() > deadline:
                return sample
            await asyncio.sleep(0.1)


async def alone(plan: Plan, prompts: Sequence[Prompt]) -> Pace:
    """What the engine does with the prompts in a process of its own, on its core, while nothing else runs. Raises
    LoadError.
    """
    task = Task([list(p.ids) for p in prompts], prompts[0].output_len, min(plan.engine_cores), plan.settings)
    pipe = asyncio.subprocess.PIPE
    words = (sys.executable, "-m", "thalweg.bench.pinned")
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
    told, said = await process.communicate(msgspec.json.encode(task))
    if process.returncode:
        raise LoadError(f"the engine alone failed: {said.decode(errors='replace').strip()[-600:]}")
    return msgspec.json.decode(told, type=Pace)


async def load(args: argparse.Namespace, bench: Bench, plan: Plan, say: Say) -> Seen:
    """Puts a server under all loads of a run."""
    say("a warm-up")
    warm = (await bench.round(plan.few[:1], "openai")).records[0]
    if not warm.ok:
        raise LoadError(f"the warm-up request failed, so the run was not started: {warm.error}")
    before = await bench.settled()
    rounds = []
    for i in range(args.rounds):
        say(f"{args.streams} streams, round {i + 1} of {args.rounds}")
        rounds.append(await bench.round(plan.prompts, "openai"))
    say(f"their {args.streams} twins, not streamed")
    twins = await bench.round(plan.prompts, "openai", stream=False)
    say(f"{args.few} streams, completions and chat")
    few, chat = await bench.round(plan.few, "openai"), await bench.round(plan.few, "openai-chat")
    options = Options(model=bench.model, stream=False)
    say("comparing")
    verdicts = [await compare(bench.control, options, plan.prompts, one.records, twins.records) for one in rounds]
    return Seen(before, rounds, twins, few, chat, verdicts, await bench.settled())


async def run(args: argparse.Namespace, argv: list[str], say: Say) -> tuple[dict[str, object], list[Check]]:
    """The whole run: its result and its checks. Raises LoadError, ServerError, DatasetError, HttpError."""
    raise_file_limit(args.streams + SPARE_FILES)
    plan = make_plan(args)
    say("the engine alone, on its core")
    paces = (await alone(plan, plan.prompts), await alone(plan, plan.few))
    say("starting the server")
    async with OwnServer(plan.words(args.server_args)) as server:
        pin(server.engine, plan.engine_cores)
        for pid in (server.pid, os.getpid()):
            pin(pid, plan.other_cores)
        bench = Bench(server, Path(args.model).resolve().name)
        seen = await load(args, bench, plan, say)
        info = await Server(bench.control).info()
        bench.control.close()
    checks = judge(seen, paces, args)
    placed = {"engine_cores": sorted(plan.engine_cores), "server_and_client_cores": sorted(plan.other_cores)}
    configuration = {"client": vars(args), "engine": plan.settings, **placed, "server": info}
    return tell(seen, paces, checks) | provenance("bench load", argv, configuration), checks


def _parser() -> Parser:
    parser = Parser(
        prog="thalweg bench load",
        description=(
            "Starts a server with its engine on one core, puts it under many streams at once, and checks what it does:"
            " texts, CPU time of a token, memory, and the engine's pace."
        ),
    )
    add = parser.add_argument
    add("--model", default="models/tiny", help="folder of the checkpoint (default: %(default)s)")
    add("--streams", type=_count, default=1000, help="streams at once (default: %(default)s)")
    add("--rounds", type=_count, default=3, help="how often, to see whether memory grows (default: %(default)s)")
    add("--input-len", type=_count, default=32, help="tokens of a prompt (default: %(default)s)")
    add("--output-len", type=_count, default=64, help="tokens of a stream (default: %(default)s)")
    add("--few", type=_count, default=64, help="streams of the smaller load (default: %(default)s)")
    add("--few-output-len", type=_count, default=512, help="tokens of each of those (default: %(default)s)")
    add("--max-running-requests", type=int, default=0, help="the engine's slots; 0: one for each stream (default)")
    add("--server-args", default="", metavar="FLAGS", help="further flags of `thalweg serve`, as one word")
    add("--cpu-limit", type=float, default=60.0, help="us of the server's CPU a token (default: %(default)s)")
    add(
        "--memory-limit",
        type=float,
        default=64.0,
        help="MiB that a process may grow after round 1 (default: %(default)s)",
    )
    add(
        "--pace-limit",
        type=float,
        default=0.8,
        help="share of its pace alone that the engine keeps (default: %(default)s)",
    )
    add("--seed", type=int, default=1, help="of the prompts (default: %(default)s)")
    add("--output-file", default="", help="write the result: .jsonl gets one line more, another name is written anew")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """0: all checks hold; 1: one does not, or the run could not be made; 130: Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", file=sys.stderr, flush=True)

    try:
        result, checks = asyncio.run(run(args, words, say))
        for check in checks:
            print(check.line)
        if args.output_file:
            write(Path(args.output_file), result)
    except (LoadError, ServerError, DatasetError, HttpError, ResultError) as error:
        print(f"thalweg bench load: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
