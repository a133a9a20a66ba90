"""The cells of `several.py` that go over HTTP: a `thalweg serve` of their own, under loads of `thalweg bench serve`."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peer_loads import LONG_FIELDS, RUNNING, Cell

from thalweg.bench import serve
from thalweg.bench.display import field_table, fields
from thalweg.bench.errors import BenchError
from thalweg.bench.results import write
from thalweg.bench.server_process import STOP_SECONDS, ServerProcess

LOG_LINES = 30  # of a server whose requests failed
COLUMNS = fields("""
cell            cell
load            load
requests        completed
failed          failed
s               duration
requests/s      request_throughput
out tok/s       output_throughput
TTFT p50 ms     median_ttft_ms
TTFT p99        p99_ttft_ms
TPOT p50 ms     median_tpot_ms
ITL p99 ms      p99_itl_ms
accept length   accept_length
share of floor  share_of_floor
KV tokens       kv_tokens
""")
Row = dict[str, Any]


def server_flags(loads: Sequence[Cell]) -> list[str]:
    """Of `thalweg serve`: for the longest request of these loads and as many as run at a time. Random prompts would
    find nothing in a prefix cache.
    """
    context, running = max(sum(load.longest) for load in loads) + 16, max(load.concurrency or RUNNING for load in loads)
    sizes = ["--context-length", str(context), "--max-running-requests", str(running)]
    return sizes if any(load.trace for load in loads) else [*sizes, "--no-radix-cache"]


def turns(loads: Sequence[Cell], least_seconds: float, points: Sequence[Row]) -> Iterator[Cell]:
    """Each load once, and all again until their points have taken `least_seconds`."""
    yield from loads
    while sum(point["duration"] for point in points) < least_seconds:
        yield from loads


async def answer(url: str, load: Cell, number: int) -> Row:
    """The result of one load on a server. Raises BenchError where a request failed, and KeyboardInterrupt."""
    seed = zlib.crc32(f"{load.name}, {number}".encode())
    words = ["--base-url", url, *load.flags(0.0), "--seed", str(seed), "--disable-tqdm"]
    result = await serve.run(serve.parse(words), words)
    if result["interrupted"]:
        raise KeyboardInterrupt
    if result["failed"] or result["partial"]:
        raise BenchError(f"{load.name[1]}: {result['failures'] or ''} {result['ended']}")
    return result


async def measure(flags: Sequence[str], loads: Sequence[Cell], least_seconds: float, seconds: float) -> Row:
    """The result of a cell: a point for each load, as a sweep of `bench serve` has them. Raises BenchError, also where
    it takes longer than so many seconds.
    """
    points, source, until = list[Row](), Row(), asyncio.get_running_loop().time() + seconds
    async with ServerProcess(flags, seconds) as server:
        try:
            async with asyncio.timeout_at(until):
                for load in turns(loads, least_seconds, points):
                    result = await answer(server.url, load, len(points))
                    source = {name: result[name] for name in serve.SOURCE}
                    kept = {name: result[name] for name in result if name not in (*serve.SOURCE, *LONG_FIELDS)}
                    kv_tokens = source["configuration"]["server"]["resolved"]["max_total_tokens"]["value"]
                    points.append({"load": load.name[1], "kv_tokens": kv_tokens, **kept})
        except (BenchError, TimeoutError) as error:
            problem = str(error) or f"{len(points)} loads have ended within {seconds:.0f} s"
            raise BenchError("\n".join([*server.lines[-LOG_LINES:], problem])) from error
    about = {"wanted": len(points), "partial": False, "server_flags": list(flags)}
    return {"points": points, **about, "ready_seconds": server.marks["ready"], **source}


def run(flags: Sequence[str], loads: Sequence[Cell], least_seconds: float, seconds: float, path: Path) -> None:
    """Measures a cell within so many seconds, of which some are for the server's end, and writes its result. Raises
    BenchError.
    """
    write(path, asyncio.run(measure(flags, loads, least_seconds, max(seconds - STOP_SECONDS / 2, 1.0))))


def table(out: Path, names: Sequence[str]) -> list[str]:
    """Markdown of the results of these cells, [] of none."""
    rows = [
        {"cell": name, **point}
        for name in names
        if (path := out / f"{name}.json").is_file()
        for point in json.loads(path.read_text())["points"]
    ]
    return field_table(rows, COLUMNS) if rows else []
