"""Thalweg beside other engines: their servers on one checkpoint, under the same loads of `thalweg bench serve`.

    python benchmarks/gpu/peers.py CHECKPOINT --engines thalweg vllm sglang --cells table staggered --out peers.jsonl
    python benchmarks/gpu/peers.py --out peers.jsonl --table peers.md

The output file gets a line for each engine, round and cell. The same command measures what is missing. Prompts go to
/v1/completions as random token ids; outputs are greedy and have exactly the requested length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from peer_loads import LONG_FIELDS, RUNNING, Cell, cells_of

from thalweg.bench import serve
from thalweg.bench.command import CommandParser, add_flags, command
from thalweg.bench.display import field_table, fields
from thalweg.bench.errors import BenchError
from thalweg.bench.results import hide_home
from thalweg.core.errors import ThalwegError

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 10.0  # for a server to end, within the time limit
LEAST_SECONDS = 5.0  # of a cell that no engine has measured
LOG_LINES = 15  # of a server that did not start
COLUMNS = fields("""
load            load
engine          engine
requests/s      request_throughput
out tok/s       output_throughput
goodput         goodput
TPOT p50 ms     median_tpot_ms
ITL p50 ms      median_itl_ms
ITL p99         p99_itl_ms
ITL max         max_itl_ms
TTFT p50 ms     median_ttft_ms
accept length   accept_length
share of floor  share_of_floor
requests        completed
rounds          rounds
""")
FLAGS = """
--engines     name...      in this order; default: those of --engine, else all three
--engine      text...      further ones, NAME=COMMAND with {model}, {port}, {context} and {running}, or a variant of a
                           known one, NAME=[VARIABLE=VALUE ...] ENGINE FLAGS: "full=thalweg --cuda-graph-mode full"
--cells       text...=table  table, staggered, long, grid, qps, traces, outputs32k; or CONCURRENCY:INPUT/OUTPUT with
                           :staggered after it, such as 32:1024/256 or 8:256/1024:staggered. A number after either sets
                           the requests, or the seconds of a rate, after one warm-up request: grid:32, qps:8
--trace       file...      recordings of the cells "traces"
--setup       path         shell file that vllm's and sglang's shells read first, with the engine's name as its argument
--rounds      count=1      of every cell
--interleave  switch       one round of each engine in turn; else all rounds of one engine after the other
--together    switch       start all engines first and keep them: each cell is measured with one engine after the other,
                           while the others are idle; give each of them a share of the GPU's memory
--keep-cache  switch       prefix caches in all cells, so that traces need no start of their own
--time-limit  number=560   seconds of this command; a cell that would not end within them is left out
--machine     name         the GPU, such as h200, for the share of the floor; default: this machine's
--out         path=peers.jsonl  results; a cell that it has is not measured again
--table       path         write the results as Markdown
"""
Line = dict[str, Any]


class Engine(NamedTuple):
    """A server. {model}, {port}, {context} and {running} are filled in; {python} is this Python."""

    command: str
    uncached: str = ""  # flags without a prefix cache, in which random prompts would find nothing
    health: str = "/health"  # answers 200 when the server is ready
    package: str = ""  # distribution whose version is recorded
    is_foreign: bool = False  # its shell reads --setup first
    environment: tuple[tuple[str, str], ...] = ()

    def with_cache(self, is_cached: bool) -> Engine:
        return self if is_cached or not self.uncached else self._replace(command=f"{self.command} {self.uncached}")


ENGINES = {
    "thalweg": Engine(
        "{python} -m thalweg serve {model} --served-model-name m --host 127.0.0.1 --port {port}"
        " --context-length {context} --max-running-requests {running}",
        "--no-radix-cache",
        "/ready",
        environment=(("PYTHONPATH", f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"),),
    ),
    "vllm": Engine(
        "python3 -m vllm.entrypoints.cli.main serve {model} --served-model-name m --host 127.0.0.1 --port {port}"
        " --max-model-len {context} --max-num-seqs {running}",
        "--no-enable-prefix-caching",
        package="vllm",
        is_foreign=True,
    ),
    "sglang": Engine(
        "python3 -m sglang.launch_server --model-path {model} --served-model-name m --host 127.0.0.1 --port {port}"
        " --context-length {context} --max-running-requests {running} --mm-feature-transport cpu",
        "--disable-radix-cache",
        package="sglang",
        is_foreign=True,
    ),
}


def engines_of(args: argparse.Namespace) -> dict[str, Engine]:
    """Those of --engines in its order, else those of --engine. Raises BenchError."""
    own = dict[str, Engine]()
    for name, _, words in (text.partition("=") for text in args.engine):
        variables, base, more = re.findall(r"^((?:\w+=\S* )*)(\S*)(.*)", words)[0]
        known = ENGINES.get(base, Engine(base))
        own[name] = known._replace(command=f"{f'env {variables}' if variables else ''}{known.command}{more}")
    known_names, names = ENGINES | own, args.engines or own or ENGINES
    if unknown := [name for name in names if name not in known_names]:
        raise BenchError(f"--engines {unknown[0]}: there is {', '.join(known_names)}; --engine NAME=COMMAND adds one")
    return {name: known_names[name] for name in names}


class Server(NamedTuple):
    """A running server."""

    url: str
    command: str
    version: str  # "" where it is unknown
    start_seconds: float
    name: str = ""


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


class Launch(NamedTuple):
    """A server that may not be ready yet."""

    process: subprocess.Popen[bytes]
    log: Path
    server: Server  # its start's seconds are the clock's when it began
    health: str


@contextmanager
def launched(name: str, engine: Engine, context: int, args: argparse.Namespace) -> Iterator[Launch]:
    """A server within the block; its process group ends with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch, paths = engine.command, {"python": sys.executable, "model": args.checkpoint.resolve()}
    values = {field: shlex.quote(str(path)) for field, path in paths.items()}
    for field, value in (values | {"port": port, "running": RUNNING, "context": context}).items():
        launch = launch.replace(f"{{{field}}}", str(value))  # flags may have other braces
    setup = f". {shlex.quote(str(args.setup.resolve()))} {name}; " if engine.is_foreign and args.setup else ""
    options: dict[str, Any] = {"env": os.environ | dict(engine.environment)}
    ask = f"{setup}python3 -c 'import importlib.metadata as m; print(m.version(\"{engine.package}\"))'"
    asked = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, **options) if engine.package else None
    log, begun = args.out.with_name(f"{args.out.stem}.{name}.log"), time.monotonic()
    with log.open("wb") as output, tempfile.TemporaryDirectory() as folder:
        options |= {"stdout": output, "stderr": output, "cwd": folder, "start_new_session": True}
        process = subprocess.Popen(["bash", "-c", f"{setup}exec {launch}"], **options)
        try:
            server = Server(f"http://127.0.0.1:{port}", launch, asked.stdout.strip() if asked else "", begun, name)
            yield Launch(process, log, server, engine.health)
        finally:
            end(process)


def until_ready(launches: Sequence[Launch], args: argparse.Namespace) -> Iterator[tuple[str, Server]]:
    """The servers that get ready; of the others, prints what they said."""
    waiting = list(launches)
    while waiting:
        for launch in list(waiting):
            server, is_late = launch.server, time.monotonic() > args.deadline
            if is_ready(server.url + launch.health):
                seconds = round(time.monotonic() - server.start_seconds, 1)
                print(f"{server.name} {server.version}: ready after {seconds} s", flush=True)
                yield server.name, server._replace(start_seconds=seconds)
            elif launch.process.poll() is None and not is_late:
                continue
            else:
                lines = launch.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                print("\n".join([f"{server.name} did not get ready: {server.command}", *lines]), file=sys.stderr)
            waiting.remove(launch)
        time.sleep(0.2)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process group: SIGTERM, and SIGKILL for what is left of it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOP_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def read(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def key(model: str, name: str, engine: Engine, turn: int, cell: Cell) -> Line:
    """What identifies a line."""
    section, load = cell.name
    about = {"model": model, "engine": name, "template": hide_home(engine.command), "round": turn}
    return about | {"section": section, "load": load}


def is_of(line: Line, wanted: Line) -> bool:
    return all(line[name] == value for name, value in wanted.items())


def measure(server: Server, cell: Cell, turn: int, same: Sequence[Line], args: argparse.Namespace) -> Line | None:
    """One cell; None where it failed or the time was short. same: lines of its section, whichever engine's. Engines get
    the same tokens, each cell and round its own, which no prefix cache has.

    Raises KeyboardInterrupt.
    """
    section, load = cell.name
    capacity = next((line["result"]["request_throughput"] for line in same if line["cell"]["concurrency"]), 0.0)
    left, begun = args.deadline - time.monotonic(), time.monotonic()
    need = max((line["wall_seconds"] for line in same if line["load"] == load), default=LEAST_SECONDS)
    if left < need or (cell.share and not capacity):
        print(f"  {section}, {load}: left out, {left:.0f} of {need:.0f} s left, capacity {capacity:g}", flush=True)
        return None
    words = ["--backend", "openai", "--base-url", server.url, "--model", "m", "--tokenizer", str(args.checkpoint)]
    words += [*cell.flags(capacity), "--machine", args.machine, "--disable-tqdm"]
    words += ["--seed", str(zlib.crc32(f"{section}, {load}, {turn}".encode()))]
    try:
        result = asyncio.run(asyncio.wait_for(serve.run(serve.parse(words), words), left))
    except (ThalwegError, TimeoutError) as error:
        print(f"  {section}, {load}: {error or 'no time was left'}", flush=True)
        return None
    if result["interrupted"]:
        raise KeyboardInterrupt
    numbers = f"{result['output_throughput']:.0f} tok/s, ITL p99 {result['p99_itl_ms']:.1f} ms"
    print(f"  {server.name}, {section}, {load}: {numbers} {result['failures'] or ''}{result['ended']}", flush=True)
    kept = {name: value for name, value in result.items() if name not in (*LONG_FIELDS, "configuration")}
    line = {"cell": vars(cell), "wall_seconds": round(time.monotonic() - begun, 1), "result": kept}
    return None if result["failed"] or result["partial"] else line


def at_once(engines: dict[str, Engine]) -> list[list[str]]:
    """Engines that start at the same time. Ours time their steps while they start, so each starts alone, at the end."""
    foreign = [name for name, engine in engines.items() if engine.is_foreign]
    return [foreign, *([name] for name in engines if name not in foreign)]


def has_time(name: str, lines: Sequence[Line], args: argparse.Namespace) -> bool:
    """Whether the engine can start as slowly as it ever has; otherwise, prints that it is not started."""
    start = max((line["server"]["start_seconds"] for line in lines if line["engine"] == name), default=0.0)
    if (left := args.deadline - time.monotonic()) < start:
        print(f"{name} is not started: {left:.0f} s are left, and a start took {start:.0f} s", file=sys.stderr)
    return left >= start


def run(args: argparse.Namespace) -> int:
    """Measures what is missing; the number of cells that are missing then. Raises BenchError, KeyboardInterrupt."""
    engines, cells, lines = engines_of(args), cells_of(args.cells, args.trace), read(args.out)
    model = args.checkpoint.resolve().name
    turns = list(product(range(args.rounds), engines))
    if not args.interleave:
        turns.sort(key=lambda turn: list(engines).index(turn[1]))

    def has_cache(cell: Cell) -> bool:
        return args.keep_cache or bool(cell.trace)

    jobs = [
        (name, cell, key(model, name, engines[name].with_cache(has_cache(cell)), turn, cell))
        for turn, name in turns
        for cell in cells
    ]
    if args.together:
        jobs.sort(key=lambda job: (cells.index(job[1]), job[2]["round"]))
    todo = [job for job in jobs if not any(is_of(line, job[2]) for line in lines)]
    missing, context = len(todo), max(sum(cell.longest) for cell in cells) + 16
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for (_, is_cached), some in groupby(todo, lambda job: (args.together or job[0], has_cache(job[1]))):
        group = list(some)
        with ExitStack() as running:
            of_group = {name: engines[name] for name in dict.fromkeys(job[0] for job in group)}
            servers = dict[str, Server]()
            for names in at_once(of_group):
                begun = [
                    running.enter_context(launched(name, engine.with_cache(is_cached), context, args))
                    for name, engine in of_group.items()
                    if name in names and has_time(name, lines, args)
                ]
                servers |= until_ready(begun, args)
            for name, cell, wanted in (job for job in group if job[0] in servers):
                same = [line for line in lines if is_of(line, {"model": model, "section": wanted["section"]})]
                if (line := measure(servers[name], cell, wanted["round"], same, args)) is not None:
                    lines.append(wanted | {"server": hide_home(servers[name]._asdict())} | line)
                    missing -= 1
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(lines[-1]) + "\n")
    print(f"{missing} of {len(jobs)} cells are missing" + (": the same command goes on" if missing else ""))
    return missing


def rows_of(lines: Sequence[Line]) -> list[Line]:
    """A row for each load and engine, medians over the rounds; the best engine of each load is bold."""
    rows = list[Line]()
    for load in dict.fromkeys(line["load"] for line in lines):
        own = list[Line]()
        for name in dict.fromkeys(line["engine"] for line in lines if line["load"] == load):
            results = [line["result"] for line in lines if (line["load"], line["engine"]) == (load, name)]
            row: Line = {"load": load, "engine": name, "rounds": len(results) if len(results) > 1 else None}
            for field in list(COLUMNS.values())[2:-1]:
                values = [result[field] for result in results if result.get(field) is not None]
                row[field] = median(values) if values else None
            own.append(row)
        best = max(own, key=lambda row: (row["goodput"] or 0.0, row["output_throughput"]))
        best["engine"] = f"**{best['engine']}**" if len(own) > 1 else best["engine"]
        rows += own
    return rows


def sections(lines: Sequence[Line]) -> Iterator[tuple[str, list[Line]]]:
    """A model's lines by section; sections with a single load are one, the last."""
    single = list[Line]()
    for section in dict.fromkeys(line["section"] for line in lines):
        some = [line for line in lines if line["section"] == section]
        if len({line["load"] for line in some}) > 1 or len(some) == len(lines):
            yield section, some
        else:
            single += [line | {"load": f"{section}, {line['load']}"} for line in some]
    if single:
        yield "other loads", single


def commit_of(line: Line) -> str:
    """Of our own engine; "" for others."""
    return f"at {line['result']['commit'][:12]}" if "-m thalweg " in line["server"]["command"] else ""


def table(lines: Sequence[Line]) -> str:
    """A page in Markdown."""
    page = ["# Engines beside each other", "", "Written by `benchmarks/gpu/peers.py`: see docs/benchmarks.md.", ""]
    for model in dict.fromkeys(line["model"] for line in lines):
        of_model = [line for line in lines if line["model"] == model]
        page += [f"## {model}", ""]
        for title, some in sections(of_model):
            page += [f"### {title}", "", *field_table(rows_of(some), COLUMNS), ""]
        for last in {(line["engine"], line["template"], commit_of(line)): line for line in of_model}.values():
            result, device = last["result"], last["result"]["device"]
            where = ", ".join(device["gpus"]) or device["cpu"]
            version = last["server"]["version"] or commit_of(last) or "of an unknown version"
            page += [f"- {last['engine']} {version}, {where}, {result['date'][:10]}: `{last['server']['command']}`"]
        page += [""]
    return "\n".join(page)


@command("peers.py")
def main(argv: list[str]) -> int:
    """0: all cells are measured; 1: some are missing, or an error; 130: Ctrl-C."""
    parser = CommandParser(prog="peers.py", description="Measures servers of several engines on one checkpoint.")
    parser.add_argument("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT", help="none: only --table")
    add_flags(parser, "", FLAGS)
    args = parser.parse_args(argv)
    args.deadline = time.monotonic() + args.time_limit - STOP_SECONDS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the server's block
    missing = run(args) if args.checkpoint else 0
    if args.table:
        args.table.write_text(table(read(args.out)), encoding="utf-8")
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
