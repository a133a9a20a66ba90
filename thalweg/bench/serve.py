"""`thalweg bench serve`: a load generator for any OpenAI-compatible server, with the flags, labels and JSON keys of SGLang's."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thalweg.bench.backends import Options, ask, make_backend
from thalweg.bench.client import Client, HttpError, Reply
from thalweg.bench.datasets import (
    DatasetError,
    Prompt,
    TraceLimits,
    Vocabulary,
    file_prompts,
    random_prompts,
    schedule,
    trace_prompts,
    vocabulary_of,
)
from thalweg.bench.load import Load, interruptible, no_collection
from thalweg.bench.metrics import Record, failures, measure, render
from thalweg.bench.prometheus import Histogram, read_histogram
from thalweg.bench.results import ResultError, provenance, write
from thalweg.bench.serve_args import parse

EMIT = "thalweg_emit_seconds"


class BenchError(Exception):
    """The run cannot start or cannot be used; the message says what to do."""


class Server:
    """What the generator asks of the server besides the load itself."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def get(self, path: str) -> Reply | None:
        """The reply, or None where this server has no such route."""
        reply = await self.client.request("GET", path)
        return reply if reply.status == 200 else None

    async def info(self) -> dict[str, object]:
        """What `/server_info` (or SGLang's older `/get_server_info`) says; {} where there is none."""
        for path in ("/server_info", "/get_server_info"):
            if (reply := await self.get(path)) is not None:
                value = _object(reply.text)
                if value:
                    return value
        return {}

    async def model(self) -> str:
        reply = await self.get("/v1/models")
        rows = _object(reply.text).get("data") if reply is not None else None
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return str(rows[0].get("id", ""))
        raise BenchError(f"{self.client.base_url}/v1/models names no model: give --model")

    async def emit_times(self) -> Histogram | None:
        reply = await self.get("/metrics")
        try:
            return read_histogram(reply.text, EMIT) if reply is not None else None
        except ValueError:  # some other server's page, in a format of its own
            return None

    async def flush_cache(self) -> None:
        reply = await self.client.request("POST", "/flush_cache")
        if reply.status != 200:
            raise BenchError(
                f"--flush-cache: the server answered HTTP {reply.status} {reply.reason}: {reply.text.strip()[:200]}"
            )


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def accept_length(info: Mapping[str, object]) -> float | None:
    """Mean tokens a verification gave, where the server speculates and says so."""
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states else {}
    value = first.get("avg_spec_accept_length") if isinstance(first, dict) else None
    return float(value) if isinstance(value, int | float) else None


def overhead(before: Histogram | None, after: Histogram | None) -> dict[str, float] | None:
    """mean, p50 and p99 in ms of what the server took from the engine's step to the socket, or None where it does not tell."""
    if before is None or after is None:
        return None
    new = after.since(before)
    if not new.samples:
        return None
    mean = 1000 * new.total / new.samples
    return {"mean": mean, "p50": 1000 * new.quantile(0.5), "p99": 1000 * new.quantile(0.99), "samples": new.samples}


def _vocabulary(args: argparse.Namespace, info: Mapping[str, object]) -> Vocabulary | None:
    """From --tokenizer, else a --model that is a folder, else the folder that a server on this machine names."""
    if args.tokenizer:
        return vocabulary_of(Path(args.tokenizer))
    for place in (args.model, info.get("tokenizer_path"), info.get("model_path")):
        if place and (Path(str(place)) / "tokenizer.json").is_file():
            return vocabulary_of(Path(str(place)))
    return None


def load_prompts(args: argparse.Namespace, vocabulary: Vocabulary | None) -> list[Prompt]:
    """The prompts that the flags ask for. Raises DatasetError."""
    if args.dataset_name == "file":
        decode = vocabulary.decode if vocabulary else None
        return file_prompts(Path(args.dataset_path), args.num_prompts, args.random_output_len, decode)
    if vocabulary is None:
        raise DatasetError(
            "random tokens need a vocabulary: give --tokenizer, the folder with the model's tokenizer.json"
        )
    if args.dataset_name == "trace":
        limits = TraceLimits(args.trace_max_input_len, args.trace_max_output_len, args.trace_slowdown_factor)
        return trace_prompts(Path(args.dataset_path), vocabulary, args.num_prompts, limits, args.seed)
    return random_prompts(
        vocabulary, args.num_prompts, args.random_input_len, args.random_output_len, args.random_range_ratio, args.seed
    )


async def warm_up(load: Load, count: int) -> None:
    """Sends the first prompt `count` times at once. Raises BenchError with the server's words when one fails."""
    records = [Record() for _ in range(count)]
    await asyncio.gather(*(ask(load.client, load.backend, load.prompts[0], load.options, record) for record in records))
    for record in records:
        if record.error:
            raise BenchError(f"the warm-up request failed, so the run was not started: {record.error}")


async def drive(load: Load, due: Sequence[float], args: argparse.Namespace) -> bool:
    """Runs the load behind a progress bar; True when Ctrl-C ended it early."""
    stop = asyncio.Event()
    console = Console(stderr=True)
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tail = (TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    quiet = args.disable_tqdm or not console.is_terminal
    with Progress(*columns, *tail, console=console, disable=quiet, refresh_per_second=4) as progress:
        task = progress.add_task("requests", total=len(load.prompts), note="")
        seen = {"failed": 0, "tokens": 0}

        def on_done(record: Record) -> None:
            seen["failed"] += bool(record.error)
            seen["tokens"] += record.output_tokens
            note = f"{seen['tokens']} tokens" + (f", [red]{seen['failed']} failed[/]" if seen["failed"] else "")
            progress.update(task, advance=1, note=note)

        with interruptible(stop), no_collection():
            await load.run(due, args.max_concurrency, stop, on_done)
    return stop.is_set()


def _details(records: Sequence[Record]) -> dict[str, object]:
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "cached_lens": [r.cached_tokens for r in records],
        "start_times": [r.start for r in records],
        "send_delays": [r.start - r.due for r in records],
        "latencies": [r.latency for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [r.itl for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }


async def run(args: argparse.Namespace, argv: list[str]) -> dict[str, object]:
    """One run from the flags to its result. Raises BenchError, DatasetError and HttpError before the load starts, never after."""
    headers = dict(args.header)
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    client = Client(args.base_url or f"http://{args.host}:{args.port}", headers)
    server = Server(client)
    info = await server.info()
    prompts = load_prompts(args, _vocabulary(args, info))
    options = Options(
        model=args.served_model_name or args.model or await server.model(),
        temperature=args.temperature,
        ignore_eos=not args.disable_ignore_eos,
        stream=not args.disable_stream,
        timeout=args.request_timeout,
        extra=args.extra_request_body,
    )
    load = Load(client, make_backend(args.backend), options, prompts)
    for prompt in {(bool(p.ids), bool(p.text)): p for p in prompts}.values():  # one of each kind
        load.backend.body(prompt, options)
    due = schedule(prompts, args.request_rate, args.use_trace_timestamps, args.seed)
    await warm_up(load, args.warmup_requests)
    if args.flush_cache:
        await server.flush_cache()
    before = await server.emit_times()
    interrupted = await drive(load, due, args)
    try:
        after, info = await server.emit_times(), await server.info()
    except HttpError as error:  # a server that died half-way: what was measured is still told
        print(f"after the run: {error}", file=sys.stderr)
        after = None
    client.close()
    return _result(args, argv, load, interrupted, info, overhead(before, after))


def _result(
    args: argparse.Namespace,
    argv: list[str],
    load: Load,
    interrupted: bool,
    info: Mapping[str, object],
    overhead_ms: dict[str, float] | None,
) -> dict[str, object]:
    sent = [r for r in load.records if r.done or r.error]
    result: dict[str, object] = {
        "tag": args.tag,
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": "trace" if args.use_trace_timestamps else str(args.request_rate),
        "max_concurrency": args.max_concurrency or None,
        "random_input_len": args.random_input_len,
        "random_output_len": args.random_output_len,
        "random_range_ratio": args.random_range_ratio,
        **measure(sent, load.duration),
        "accept_length": accept_length(info),
        "server_overhead_ms": overhead_ms,
        "interrupted": interrupted,
        "failures": failures(sent),
    }
    if args.output_details:
        result |= _details(sent)
    shown = {name: value for name, value in vars(args).items() if name not in ("api_key", "header")}
    shown["request_rate"] = result["request_rate"]  # inf is no JSON number
    return result | provenance("bench serve", _without_secrets(args, argv), {"client": shown, "server": dict(info)})


def _without_secrets(args: argparse.Namespace, argv: Sequence[str]) -> list[str]:
    secrets = [secret for secret in (args.api_key, *(value for _, value in args.header)) if secret]
    return [word if not any(secret in word for secret in secrets) else "***" for word in argv]


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: the run could not start, or not one request succeeded; 130: Ctrl-C (what was measured is reported)."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    try:
        result = asyncio.run(run(args, words))
        print("\n" + render(result))
        reasons = result["failures"]
        if isinstance(reasons, dict) and reasons:
            print("Failures:\n" + "\n".join(f"{count:7} × {reason}" for reason, count in reasons.items()))
        if args.output_file:
            write(Path(args.output_file), result)
    except (BenchError, DatasetError, HttpError, ResultError) as error:
        print(f"thalweg bench serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if result["interrupted"]:
        return 130
    return 0 if result["completed"] else 1
