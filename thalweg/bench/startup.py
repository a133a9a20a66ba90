"""`thalweg bench startup`: from the command to the first token, phase by phase, in fresh processes; cold and warm."""

from __future__ import annotations

import asyncio
import os
import re
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from thalweg.bench.backends import BACKENDS, RequestOptions, send_request
from thalweg.bench.command import OUTPUT, CommandParser, PartialRun, add_flags, command
from thalweg.bench.datasets import SampleRequest
from thalweg.bench.display import progress_bar
from thalweg.bench.errors import BenchError
from thalweg.bench.http_client import HttpClient
from thalweg.bench.metrics import Record
from thalweg.bench.results import save
from thalweg.bench.server_process import ServerProcess

# of the engine's line "started: model 0.0 s, weights 0.1 s, …; 2.3 s in all"
PHASE = re.compile(r"([a-z][\w -]*?) (\d+(?:\.\d+)?) s[,;]")
TEXT = "Once upon a time"
FLAGS = f"""
--model --model-path  model=models/tiny  folder of the checkpoint
--cold                whole=1             cold starts, first
--warm                whole=3             warm starts, after them
--start-timeout       seconds=1800        of one start
{OUTPUT}
--tag                 name                a name in the result
"""
LINE = (
    "{start}: ready after {ready_seconds:.2f} s, first token after {first_token_seconds:.2f} s ({names}),"
    " {cpu_seconds:.2f} s of CPU"
)

Row = dict[str, Any]


def drop_file_cache(folder: Path) -> None:
    """Makes the kernel drop the checkpoint's files from memory, so that the next start reads the disk."""
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def phases_of(marks: Mapping[str, float], line: str, first_token: float) -> dict[str, float]:
    """Seconds of the parts of a start, which add up to `first_token`. marks: seconds of the server's lines "resolved",
    "started" and "ready"; line: "started", which has the engine's phases.
    """
    inner = {name: float(seconds) for name, seconds in PHASE.findall(line.partition(":")[2])}
    engine = marks["started"] - marks["resolved"]
    return {
        "imports, settings": marks["resolved"],
        "engine process": max(engine - sum(inner.values()), 0.0),
        **inner,
        "serving": marks["ready"] - marks["started"],
        "first token": first_token - marks["ready"],
    }


async def measure(kind: str, flags: Sequence[str], timeout: float) -> tuple[Row, object]:
    """One start: its row, and the server's settings. Raises BenchError."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    async with ServerProcess(flags, timeout) as server:
        if missing := {"resolved", "started"} - server.marks.keys():
            raise BenchError(f"the server did not log {', '.join(sorted(missing))}: leave --log-level at info")
        client, record = HttpClient(server.url), Record()
        options = RequestOptions(str(server.records["ready"].get("model", "")))
        await send_request(client, BACKENDS["thalweg"], SampleRequest(1, text=TEXT), options, record)
        client.close()
        if record.error or record.ttft < 0:
            raise BenchError(f"the server started and its first request failed: {record.error or 'no token came'}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    first_token = record.start + record.ttft - server.began
    phases = phases_of(server.marks, str(server.records["started"]["message"]), first_token)
    return {
        "start": kind,
        "phases": [{"name": name, "seconds": seconds} for name, seconds in phases.items()],
        "ready_seconds": server.marks["ready"],
        "first_token_seconds": first_token,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }, server.records["resolved"].get("resolved")


@command("thalweg bench startup")
def main(argv: list[str]) -> int:
    """0: done; 1: a server did not start; 2: wrong flags; 130: Ctrl-C. Results are printed and written."""
    text = (
        "Starts `thalweg serve` so many times and measures each until its first token. A cold start reads the"
        " checkpoint from the disk and finds no compiled kernels; a warm one finds those of the last cold one. Unknown"
        " flags go to the server."
    )
    parser = CommandParser(prog="thalweg bench startup", description=text)
    add_flags(parser, "", FLAGS)
    args, server_flags = parser.parse_known_args(argv)
    kinds = ["cold"] * args.cold + ["warm"] * args.warm
    if not kinds:
        parser.error("--cold 0 and --warm 0: there is nothing to start")
    if not Path(args.model, "config.json").is_file():
        raise BenchError(f"{args.model} has no config.json: give --model, the folder of a checkpoint")
    rows, resolved = list[Row](), None
    with (
        PartialRun() as run,
        TemporaryDirectory(prefix="thalweg-startup-") as folder,
        progress_bar("starts", len(kinds)) as bar,
    ):
        for number, kind in enumerate(kinds):
            if kind == "cold":
                drop_file_cache(Path(args.model))
            caches = Path(folder) / str(min(number, max(args.cold - 1, 0)))  # a warm start uses the last cold one's
            flags = [args.model, "--cache-dir", str(caches), *server_flags]
            row, resolved = asyncio.run(measure(kind, flags, args.start_timeout))
            rows.append(row)
            names = ", ".join(f"{phase['name']} {phase['seconds']:.2f}" for phase in row["phases"])
            print(LINE.format(names=names, **row), flush=True)
            bar.advance()
    if rows:
        settings = {"client": vars(args), "server": {"flags": server_flags, "resolved": resolved}}
        save(args.output_file, "bench startup", argv, settings, {"tag": args.tag, "starts": rows, **run.as_json()})
    return run.finish()
