"""`thalweg bench startup`: from the command to the first token, phase by phase, in fresh processes; cold and warm."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from thalweg.bench.backends import Options, ask, make_backend
from thalweg.bench.client import Client
from thalweg.bench.data_args import whole
from thalweg.bench.datasets import Prompt
from thalweg.bench.errors import HttpError, ResultError
from thalweg.bench.metrics import Record
from thalweg.bench.results import provenance, write
from thalweg.bench.usage import Parser

PHASE = re.compile(
    r"([a-z][\w -]*?) (\d+(?:\.\d+)?) s[,;]"
)  # of the engine's line "started: model 0.0 s, weights 0.1 s, …; 2.3 s in all"
TEXT = "Once upon a time"
LAST_WORDS = 6  # lines of a server that did not start
GRACE = 30.0  # seconds that it gets to stop


class StartupError(Exception):
    """The server did not start; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Phase:
    """name: what was done; seconds: of wall time."""

    name: str
    seconds: float


@dataclass(slots=True)
class Start:
    """One start. cold: with empty caches. ready, first_token: seconds from the command on. cpu: seconds of processor
    time of all its processes, from start to stop.
    """

    cold: bool
    phases: list[Phase] = field(default_factory=list)
    ready: float = 0.0
    first_token: float = 0.0
    cpu: float = 0.0
    resolved: object = None

    def as_json(self) -> dict[str, object]:
        return {
            "start": "cold" if self.cold else "warm",
            "phases": [{"name": one.name, "seconds": one.seconds} for one in self.phases],
            "ready_seconds": self.ready,
            "first_token_seconds": self.first_token,
            "cpu_seconds": self.cpu,
        }


def forget(folder: Path) -> None:
    """Has the kernel drop the pages of the checkpoint's files that it keeps in memory, so that the next start reads the
    disk.
    """
    for path in sorted(folder.iterdir()):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def phases_of(marks: dict[str, float], told: str, first_token: float) -> list[Phase]:
    """The parts of a start, which add up to `first_token`. marks: seconds at which the server said "resolved",
    "started" and "ready"; told: its engine's line of what took how long.
    """
    inner = [Phase(name, float(seconds)) for name, seconds in PHASE.findall(told.partition(":")[2])]
    engine = marks["started"] - marks["resolved"]
    return [
        Phase("imports, settings", marks["resolved"]),
        Phase("engine process", max(engine - sum(one.seconds for one in inner), 0.0)),
        *inner,
        Phase("serving", marks["ready"] - marks["started"]),
        Phase("first token", first_token - marks["ready"]),
    ]


class Server:
    """`thalweg serve` in a process of its own, whose log lines are marks on the way."""

    def __init__(self, words: Sequence[str], limit: float) -> None:
        self.words = (sys.executable, "-m", "thalweg", "serve", *words, "--port", "0", "--log-format", "json")
        self.limit, self.said = limit, list[str]()
        self.marks: dict[str, float] = {}
        self.url, self.told, self.model = "", "", ""
        self.resolved: object = None

    async def measure(self, start: Start) -> None:
        """Raises StartupError."""
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        pipe, both = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        process = await asyncio.create_subprocess_exec(*self.words, stdout=pipe, stderr=both, limit=2**24)
        assert process.stdout is not None
        reading = asyncio.create_task(self._read(process.stdout, began))
        try:
            await self._until_ready(reading)
            start.ready = self.marks["ready"]
            start.first_token = await self._first_token() - began
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), GRACE)
            except TimeoutError:
                process.kill()
                await process.wait()
            await reading
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        start.cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        start.phases, start.resolved = phases_of(self.marks, self.told, start.first_token), self.resolved

    async def _read(self, lines: asyncio.StreamReader, began: float) -> None:
        async for line in lines:
            now, text = time.perf_counter() - began, line.decode(errors="replace").rstrip()
            self.said.append(text)
            try:
                record = json.loads(text)
            except ValueError:
                continue
            if isinstance(record, dict):
                self._mark(record, now)

    def _mark(self, record: dict[str, object], now: float) -> None:
        message = str(record.get("message", ""))
        name = message.partition(":")[0]
        if name not in ("resolved", "started", "ready") or name in self.marks:
            return
        self.marks[name] = now
        if name == "resolved":
            self.resolved = record.get("resolved")
        elif name == "started":
            self.told = message
        else:
            self.url, self.model = str(record.get("url", "")), str(record.get("model", ""))

    async def _until_ready(self, reading: asyncio.Task[None]) -> None:
        deadline = time.monotonic() + self.limit
        while "ready" not in self.marks:
            if reading.done() or time.monotonic() > deadline:
                why = "it ended" if reading.done() else f"it took more than {self.limit:g} s (--start-timeout)"
                raise StartupError(f"the server did not start: {why}; it said\n" + "\n".join(self.said[-LAST_WORDS:]))
            await asyncio.sleep(0.005)
        if missing := {"resolved", "started"} - self.marks.keys():
            raise StartupError(f"the server did not log {', '.join(sorted(missing))}: leave --log-level at info")

    async def _first_token(self) -> float:
        """The moment of time.perf_counter() at which it came."""
        client, record = Client(self.url), Record()
        await ask(client, make_backend("thalweg"), Prompt(1, text=TEXT), Options(model=self.model), record)
        client.close()
        if record.error or record.ttft < 0:
            raise StartupError(f"the server started and its first request failed: {record.error or 'no token came'}")
        return record.start + record.ttft


async def run(args: argparse.Namespace, words: Sequence[str], starts: list[Start]) -> None:
    """Fills `starts` one by one, so that what was measured stays when it ends early. Raises StartupError."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        TemporaryDirectory(prefix="thalweg-startup-") as folder,
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("starts", total=args.cold + args.warm)
        for number in range(args.cold + args.warm):
            start = Start(cold=number < args.cold)
            caches = Path(folder) / str(
                min(number, max(args.cold - 1, 0))
            )  # a warm start finds what the last cold one made
            if start.cold:
                forget(Path(args.model))
            bar.update(task, description=f"{'cold' if start.cold else 'warm'} start")
            await Server([args.model, "--cache-dir", str(caches), *words], args.start_timeout).measure(start)
            starts.append(start)
            bar.advance(task)
            print(line(start), flush=True)


def line(start: Start) -> str:
    """A start in one line."""
    parts = ", ".join(f"{one.name} {one.seconds:.2f}" for one in start.phases)
    return (
        f"{'cold' if start.cold else 'warm'}: ready after {start.ready:.2f} s, first token after"
        f" {start.first_token:.2f} s ({parts}), {start.cpu:.2f} s of CPU"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="thalweg bench startup",
        description=(
            "Starts `thalweg serve` so many times and measures each until its first token. A cold start reads the"
            " checkpoint from the disk and finds no compiled kernels; a warm one finds what the cold one left. Flags"
            " that are not known here go to the server."
        ),
    )
    add = parser.add_argument
    add("--model", "--model-path", default="models/tiny", help="folder of the checkpoint (default: %(default)s)")
    add("--cold", type=whole, default=1, metavar="N", help="cold starts, first (default: %(default)s)")
    add("--warm", type=whole, default=3, metavar="N", help="warm starts, after them (default: %(default)s)")
    add("--start-timeout", type=float, default=1800.0, metavar="SECONDS", help="of one start (default: %(default)s)")
    add("--output-file", default="", help="write the result: .jsonl gets one line more, another name is written anew")
    add("--tag", default="", help="a name that goes into the result")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: a server did not start; 130: Ctrl-C. What was measured before is told and written."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    args, words = parser.parse_known_args(given)
    if not args.cold + args.warm:
        parser.error("--cold 0 and --warm 0: there is nothing to start")
    if not Path(args.model, "config.json").is_file():
        print(
            f"thalweg bench startup: {args.model} has no config.json: give --model, the folder of a checkpoint",
            file=sys.stderr,
        )
        return 1
    starts, ended, status = list[Start](), "", 0
    try:
        asyncio.run(run(args, words, starts))
    except (StartupError, HttpError) as error:
        ended, status = str(error), 1
        print(f"thalweg bench startup: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        ended, status = "Ctrl-C", 130
        print("PARTIAL: Ctrl-C; the starts above are kept", file=sys.stderr)
    if not starts or not args.output_file:
        return status
    resolved = starts[-1].resolved
    told = provenance("bench startup", given, {"client": vars(args), "server": {"flags": words, "resolved": resolved}})
    result = {
        "tag": args.tag,
        "starts": [one.as_json() for one in starts],
        "partial": bool(ended),
        "ended": ended,
        **told,
    }
    try:
        write(Path(args.output_file), result)
    except ResultError as error:
        print(f"thalweg bench startup: {error}", file=sys.stderr)
        return 1
    return status
