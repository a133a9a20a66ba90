"""`thalweg bench serve`: a load generator for any OpenAI-compatible server, with the flags, labels and JSON keys of
SGLang's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thalweg.bench.backends import Options, ask, make_backend
from thalweg.bench.client import Client
from thalweg.bench.data_args import load_prompts, shorter
from thalweg.bench.datasets import Vocabulary, schedule, vocabulary_of
from thalweg.bench.errors import DatasetError, HttpError, ResultError
from thalweg.bench.load import Load, allow_files, interruptible, no_collection
from thalweg.bench.metrics import Record, failures, measure, render, sweep_table
from thalweg.bench.per_request import Slo, by_turn, goodput, samples, tokens_by_second
from thalweg.bench.remote import BenchError, Counters, Server, accept_length, cache_hits, overhead
from thalweg.bench.results import provenance, write
from thalweg.bench.serve_args import parse
from thalweg.bench.sharing import possible_hits

REFUSED = 3  # connections refused one after another: the server is gone, and the rest of the load would only count that
LATE_MS = 20.0  # of the send delay (p99): what a user would have felt is then not what was measured
INTERRUPTED = "Ctrl-C"
TOO_LONG = ("HTTP 400", "HTTP 413", "HTTP 422")  # what servers say of a prompt that is, among others


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement of a sweep. number: of all of them, from 0; repeat: of those with these settings."""

    rate: float
    concurrency: int
    repeat: int
    number: int


def points(args: argparse.Namespace) -> list[Point]:
    """Every rate with every concurrency, each `--repeat` times in a row."""
    found: list[Point] = []
    for rate in args.request_rate:
        for concurrency in args.max_concurrency:
            for repeat in range(args.repeat):
                found.append(Point(rate, concurrency, repeat, len(found)))
    return found


def _vocabulary(args: argparse.Namespace, info: Mapping[str, object]) -> Vocabulary | None:
    """From --tokenizer, else a --model that is a folder, else the folder that a server on this machine names."""
    if args.tokenizer:
        return vocabulary_of(Path(args.tokenizer))
    for place in (args.model, info.get("tokenizer_path"), info.get("model_path")):
        if place and (Path(str(place)) / "tokenizer.json").is_file():
            return vocabulary_of(Path(str(place)))
    return None


async def warm_up(load: Load, words: Vocabulary | None, count: int, shorten: str) -> None:
    """Sends a prompt like the first one, of other tokens where it has tokens, `count` times at once: the load finds
    nothing of it in the cache. shorten: the flags that do. Raises BenchError with the server's words when one fails.
    """
    records, prompt = [Record() for _ in range(count)], load.prompts[0]
    if prompt.ids and words is not None:
        prompt = replace(prompt, ids=words.draw(Random("warm-up"), len(prompt.ids)))
    await asyncio.gather(*(ask(load.client, load.backend, prompt, load.options, record) for record in records))
    for record in records:
        if record.error:
            refused = record.error.startswith(TOO_LONG)
            long = f"; it had {prompt.input_len} tokens and asked for {prompt.output_len}: {shorten} make it shorter"
            raise BenchError(
                f"the warm-up request failed, so the run was not started: {record.error}{long if refused else ''}"
            )


async def drive(load: Load, due: Sequence[float], concurrency: int, label: str, quiet: bool) -> str:
    """Runs the load behind a progress bar. Why it ended early, "" where it did not: Ctrl-C, or a server that is
    gone.
    """
    stop, reason = asyncio.Event(), [""]
    console = Console(stderr=True)
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tail = (TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    quiet = quiet or not console.is_terminal
    with Progress(*columns, *tail, console=console, disable=quiet, refresh_per_second=4) as progress:
        task = progress.add_task(label, total=len(load.prompts), note="")
        seen = {"failed": 0, "tokens": 0, "refused": 0}

        def on_done(record: Record) -> None:
            seen["failed"] += bool(record.error)
            seen["tokens"] += record.output_tokens
            seen["refused"] = seen["refused"] + 1 if record.refused else 0
            if seen["refused"] == REFUSED and not stop.is_set():
                reason[0] = f"the server is gone: {record.error}"
                stop.set()
            note = f"{seen['tokens']} tokens" + (f", [red]{seen['failed']} failed[/]" if seen["failed"] else "")
            progress.update(task, advance=1, note=note)

        with interruptible(stop), no_collection():
            await load.run(due, concurrency, stop, on_done)
    return reason[0] or (INTERRUPTED if stop.is_set() else "")


def _details(records: Sequence[Record]) -> dict[str, object]:
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "cached_lens": [r.cached_tokens for r in records],
        "start_times": [r.start for r in records],
        "send_delays": [r.sent - r.due if r.sent else 0.0 for r in records],
        "latencies": [r.latency for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [r.itl for r in records],
        "turns": [r.turn for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }


class Bench:
    """One server, and the points that it is measured at. `rows` has those that were measured, `ended` why it stopped
    early.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        headers = dict(args.header)
        if args.api_key:
            headers["Authorization"] = f"Bearer {args.api_key}"
        self.args = args
        self.client = Client(args.base_url or f"http://{args.host}:{args.port}", headers)
        self.server, self.backend = Server(self.client), make_backend(args.backend)
        self.info: dict[str, object] = {}
        self.rows: list[dict[str, object]] = []
        self.ended = ""

    async def run(self) -> None:
        """Raises BenchError, DatasetError and HttpError before anything was measured, never after: then it is in
        `ended`.
        """
        args = self.args
        self.info = await self.server.settings()
        words = _vocabulary(args, self.info)
        self.options = Options(
            model=args.served_model_name or args.model or await self.server.model(),
            temperature=args.temperature,
            ignore_eos=not args.disable_ignore_eos,
            stream=not args.disable_stream,
            timeout=args.request_timeout,
            extra=args.extra_request_body,
        )
        for point in points(args):
            try:
                load, due = self._load(words, point)
                await warm_up(load, words, args.warmup_requests, shorter(args))
                if args.flush_cache:
                    await self.server.flush_cache()
                before = await self.server.counters()
                if args.profile:
                    await self.server.start_profile(args.profile_output_dir, args.profile_steps)
            except (BenchError, DatasetError, HttpError) as error:
                if not self.rows:
                    raise
                self.ended = str(error)
                break
            except asyncio.CancelledError:  # Ctrl-C between two loads
                if not self.rows:
                    raise
                self.ended = INTERRUPTED
                break
            self.ended = await drive(load, due, point.concurrency, self._label(point), args.disable_tqdm)
            after = await self._look()
            self.rows.append(self._row(point, load, before, after))
            if self.ended:
                break
        self.client.close()

    def _load(self, words: Vocabulary | None, point: Point) -> tuple[Load, list[float]]:
        """The point's own prompts: random tokens that an earlier one sent would be found in the server's cache."""
        args = self.args
        seed = args.seed + 1000 * point.number
        prompts = load_prompts(args, words, seed)
        allow_files(point.concurrency or len(prompts))
        load = Load(self.client, self.backend, self.options, prompts)
        for prompt in {(bool(p.ids), bool(p.text)): p for p in prompts}.values():  # one of each kind
            load.backend.body(prompt, self.options)
        return load, schedule(prompts, point.rate, args.use_trace_timestamps, seed, args.burstiness)

    def _label(self, point: Point) -> str:
        total = len(points(self.args))
        if total == 1:
            return "requests"
        return f"{point.number + 1}/{total}: rate {point.rate:g}, concurrency {point.concurrency or 'any'}"

    async def _look(self) -> Counters:
        """The counters after a load. A server that died half-way has none; what was measured is still told."""
        try:
            if self.args.profile and not self.args.profile_steps:
                print(await self.server.stop_profile(), file=sys.stderr)
            self.info, after = await self.server.settings(), await self.server.counters()
        except HttpError as error:
            self.ended = self.ended or f"the server is gone: {error}"
            return Counters()
        return after

    def _row(self, point: Point, load: Load, before: Counters, after: Counters) -> dict[str, object]:
        args = self.args
        sent = [r for r in load.records if r.done or r.error]
        numbers = measure(sent, load.duration)
        start = min((r.start for r in sent), default=0.0)
        row: dict[str, object] = {
            "tag": args.tag,
            "backend": args.backend,
            "dataset_name": args.dataset_name,
            "request_rate": "trace" if args.use_trace_timestamps else str(point.rate),
            "max_concurrency": point.concurrency or None,
            "repeat": point.repeat,
            "random_input_len": args.random_input_len,
            "random_output_len": args.random_output_len,
            "random_range_ratio": args.random_range_ratio,
            "requests": len(load.prompts),
            **numbers,
            **cache_hits(numbers["total_cached_tokens"], numbers["total_input_tokens"], before, after),
            "cache_hit_possible": possible_hits(load.asked),
            **goodput(sent, load.duration, Slo(args.goodput)),
            "accept_length": accept_length(self.info, before, after),
            "server_overhead_ms": overhead(before.emit, after.emit),
            "partial": bool(self.ended),
            "ended": self.ended,
            "interrupted": self.ended == INTERRUPTED,
            "failures": failures(sent),
            "samples": samples(sent),
            "tokens_by_second": tokens_by_second(sent, start),
        }
        if turns := by_turn(sent):
            row["by_turn"] = turns
        return row | (_details(sent) if args.output_details else {})


def _without_secrets(args: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    secrets = [secret for secret in (args.api_key, *(value for _, value in args.header)) if secret]
    return [word if not any(secret in word for secret in secrets) else "***" for word in argv]


def _told(args: argparse.Namespace, argv: Sequence[str], info: Mapping[str, object]) -> dict[str, object]:
    """Where the numbers come from. Infinities are no JSON numbers, so they go as text."""
    shown = {name: value for name, value in vars(args).items() if name not in ("api_key", "header")}
    shown["request_rate"] = "trace" if args.use_trace_timestamps else [str(rate) for rate in args.request_rate]
    shown["trace_end"] = str(args.trace_end)
    return provenance("bench serve", _without_secrets(args, argv), {"client": shown, "server": dict(info)})


async def run(args: argparse.Namespace, argv: list[str]) -> dict[str, object]:
    """One run from the flags to its result: the keys of SGLang's where one point was asked for, else `points`, a list
    of such objects.

    Raises BenchError, DatasetError and HttpError before the first load starts, never after.
    """
    bench = Bench(args)
    await bench.run()
    told = _told(args, argv, bench.info)
    if len(points(args)) == 1:
        return bench.rows[0] | told
    return {
        "tag": args.tag,
        "points": bench.rows,
        "wanted": len(points(args)),
        "partial": bool(bench.ended),
        "ended": bench.ended,
        "interrupted": bench.ended == INTERRUPTED,
        **told,
    }


def rows_of(result: Mapping[str, object]) -> list[dict[str, object]]:
    """The points of a result, one or several."""
    found = result.get("points")
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else [dict(result)]


def show(result: Mapping[str, object]) -> str:
    """SGLang's block for each point; a table where there are several."""
    rows, shown = rows_of(result), list[str]()
    for row in rows:
        shown.append(render(row))
        late = row["p99_send_delay_ms"]
        if row["request_rate"] != "inf" and not row["max_concurrency"] and isinstance(late, float) and late > LATE_MS:
            shown.append(
                f"NOTE: 1 % of the requests left more than {late:.0f} ms after their time: this machine is too busy for"
                " this load"
            )
        reasons = row["failures"]
        if isinstance(reasons, dict) and reasons:
            shown.append("Failures:\n" + "\n".join(f"{count:7} × {reason}" for reason, count in reasons.items()))
    if len(rows) > 1:
        shown.append(sweep_table(rows))
    if result["partial"]:
        shown.append(f"PARTIAL: {result['ended']}; the numbers are of what was measured until then")
    return "\n".join(shown)


def _save(path: Path, result: Mapping[str, object]) -> None:
    """A line of a `.jsonl` is a point, as SGLang's tools write it, each with where it comes from."""
    if path.suffix != ".jsonl" or "points" not in result:
        write(path, result)
        return
    common = {
        name: value
        for name, value in result.items()
        if name in ("command", "date", "device", "versions", "commit", "configuration")
    }
    for row in rows_of(result):
        write(path, row | common)


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: the run could not start, ended early, or not one request succeeded; 130: Ctrl-C. What was measured is
    told and written.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    try:
        result = asyncio.run(run(args, words))
        print("\n" + show(result))
        if args.output_file:
            _save(Path(args.output_file), result)
    except (BenchError, DatasetError, HttpError, ResultError) as error:
        print(f"thalweg bench serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if result["interrupted"]:
        return 130
    return 1 if result["partial"] or not any(row["completed"] for row in rows_of(result)) else 0
