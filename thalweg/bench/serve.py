"""`thalweg bench serve`: a load generator for any OpenAI-compatible server, with the flags, labels and JSON keys of
SGLang's.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice, product, starmap
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from thalweg.bench.backends import BACKENDS, RequestOptions
from thalweg.bench.command import OUTPUT, CommandParser, add_flags, command
from thalweg.bench.dataset_flags import add_dataset_flags, check_dataset, load_prompts, shortening_flags
from thalweg.bench.datasets import OrdinaryTokens, SampleRequest, possible_hits, schedule, staggered, vocabulary_of
from thalweg.bench.display import field_table, fields, progress_bar
from thalweg.bench.errors import BenchError, HttpError
from thalweg.bench.http_client import HttpClient
from thalweg.bench.load_driver import LoadRun, interruptible, no_garbage_collection
from thalweg.bench.metrics import (
    LIMITS,
    SERVED,
    Record,
    by_turn,
    failures,
    goodput,
    measure,
    render,
    samples,
    tokens_by_second,
)
from thalweg.bench.results import provenance, write
from thalweg.bench.server_info import Counters, ServerInfo, accept_length, cache_hits, overhead
from thalweg.bench.server_process import raise_file_limit
from thalweg.config.machine import Machine
from thalweg.config.machines import hardware, hardware_of
from thalweg.launch.hub import cached_folder

REFUSED = 3  # refused connections in a row: the server is gone, and the rest of the load would only count that
# fields of a result that are the same for all points of a sweep
SOURCE = ("command", "date", "device", "versions", "commit", "configuration")
LATE_MS = 20.0  # of the send delay (p99): users would have felt something else than what was measured
SPARE_FILES = 64  # beside connections: logs, pipes, libraries
INTERRUPTED = "Ctrl-C"
TOO_LONG = ("HTTP 400", "HTTP 413", "HTTP 422")  # what servers answer to a prompt that is too long, among others
SERVER_FLAGS = """
--backend         backend=thalweg  the API
--base-url        url              the server, e.g. http://10.0.0.7:30000; overrides --host and --port
--host            name=127.0.0.1   of the server
--port            whole=30000      of the server
--api-key         text             sent as a bearer token
--header          header...        further request headers, NAME=VALUE
--model           name             name in the request body; default: the server's first model
--served-model-name  name          name in the request body where --model is the folder of the tokenizer
--tokenizer       folder           of tokenizer.json; default: --model, or what a server on this machine names
--request-timeout  seconds=21600   until a request counts as failed
--machine         name             the server's, such as h200, for share_of_floor; default: this one
"""
TIMING_FLAGS = """
--request-rate     positive...=inf  requests a second, a Poisson process; inf: all at once. Several are measured one
                                  after another
--burstiness       positive=1       gaps between requests are Gamma of this shape: 1 is Poisson, 0.5 comes in bursts, 4
                                  is more regular
--max-concurrency  whole...=0     most requests (conversations) under way; later ones wait. 0: no limit. Several are
                                  measured one after another
--repeat           count=1        measure everything so often, with other random tokens each time, so that `bench
                                  compare` knows the noise
--use-trace-timestamps  switch    send each request of a trace at its recorded time
--warmup-requests  whole=1        requests before the clock starts, all at once, as long as the first of the load
--stagger         switch          send the first --max-concurrency requests evenly over the mean duration of the
                                  warm-up's, so that they do not run in lockstep
--flush-cache      switch         empty the server's prefix cache after the warm-up; Thalweg needs its --admin-api-key
                                  as --api-key for that
"""
REQUEST_FLAGS = """
--temperature          number=0.0  0 is greedy
--top-p                number      default: the server's
--cache-report         switch      no effect: always reported
--tokenize-prompt      switch      no effect: prompts go as token ids wherever the API takes them
--apply-chat-template  switch      no effect: a chat backend has the server do it
--ignore-eos           switch      no effect: lengths are kept unless --disable-ignore-eos is given
--disable-ignore-eos   switch      let the model end early; lengths are then upper limits
--disable-stream       switch      whole answers: the time to the first token is then the whole latency
--extra-request-body   json={}     fields of every request
"""
RESULT_FLAGS = f"""
{OUTPUT}
--output-details --save-detailed  switch   put every request's times, lengths, text and error into the result
--profile         switch   have the server profile the load (/start_profile, /stop_profile)
--profile-output-dir  folder  where the server writes the profile; default: its own choice
--profile-steps   whole=0  end the profile after so many steps; 0: with the load
--goodput         limit...  count requests that keep all these limits: ttft, tpot, itl (longest gap), e2el in ms, such
                           as ttft:500 tpot:50
--tag             name     a name in the result
--disable-tqdm --no-progress  switch  no progress bar
"""


def _json_object(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        message = f'expected a JSON object such as {{"top_p": 0.9}}, got {text} ({error})'
        raise argparse.ArgumentTypeError(message) from error


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name.strip(), value


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in LIMITS or not re.fullmatch(r"\d*\.?\d+", value):
        names = ", ".join(LIMITS)
        raise argparse.ArgumentTypeError(
            f"expected NAME:MILLISECONDS with a name of {names}, such as ttft:500, got {text!r}"
        )
    return name, float(value)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags, checked against each other. Exits with status 2 as argparse does."""
    text = "Measures any OpenAI-compatible server: throughput, and the time to, between and after tokens."
    parser = CommandParser(prog="thalweg bench serve", description=text)
    add_flags(parser, "Server", SERVER_FLAGS, backend=tuple(BACKENDS), header=_header)
    add_dataset_flags(parser, "Data set")
    add_flags(parser, "Arrival times", TIMING_FLAGS)
    add_flags(parser, "Requests", REQUEST_FLAGS, json=_json_object)
    add_flags(parser, "Result", RESULT_FLAGS, limit=_limit)
    args = parser.parse_args(argv)
    check_dataset(parser, args)
    if args.use_trace_timestamps and args.dataset_name != "trace":
        parser.error("--use-trace-timestamps needs --dataset-name trace")
    if args.use_trace_timestamps and args.request_rate != [float("inf")]:
        parser.error("--use-trace-timestamps and --request-rate both set when to send: leave one out")
    if args.stagger and not (all(args.max_concurrency) and args.warmup_requests):
        parser.error("--stagger needs --max-concurrency and --warmup-requests of at least 1")
    args.goodput = dict(args.goodput)
    if args.top_p is not None:
        if args.backend == "sglang":
            parser.error("--top-p is not for --backend sglang: use sglang-oai")
        args.extra_request_body = {"top_p": args.top_p} | args.extra_request_body
    return args


class SweepPoint(NamedTuple):
    """One measurement of a sweep."""

    rate: float
    concurrency: int
    repeat: int  # of those with these settings


def points(args: argparse.Namespace) -> list[SweepPoint]:
    """Every rate with every concurrency, each `--repeat` times in a row."""
    return list(starmap(SweepPoint, product(args.request_rate, args.max_concurrency, range(args.repeat))))


def _folders(args: argparse.Namespace, info: Mapping[str, object], file: str) -> list[Path]:
    """The folders with this file: of --tokenizer, of --model, of those that a server on this machine names; each a
    folder, or a model in the hub's cache.
    """
    names = args.tokenizer, args.model, info.get("tokenizer_path"), info.get("model_path")
    folders = [cached_folder(str(name)) for name in names if name]
    return [folder for folder in folders if (folder / file).is_file()]


def _vocabulary(args: argparse.Namespace, info: Mapping[str, object]) -> OrdinaryTokens | None:
    folders = [cached_folder(args.tokenizer)] if args.tokenizer else _folders(args, info, "tokenizer.json")
    return vocabulary_of(folders[0]) if folders else None


def warm_up_prompts(
    prompts: Sequence[SampleRequest], vocabulary: OrdinaryTokens | None, count: int, seed: int
) -> list[SampleRequest]:
    """As long as the first prompts of the load, of other tokens, which the load does not find in the cache. Prompts
    without token ids: the first one of the load, again and again.
    """
    first = [prompt for prompt in prompts if prompt.ids and prompt.after < 0]
    if vocabulary is None or not first:
        return [prompts[0]] * count
    rng, lengths = Random(f"warm-up {seed}"), islice(cycle(first), count)
    return [replace(prompt, ids=vocabulary.draw(rng, len(prompt.ids))) for prompt in lengths]


async def warm_up(load: LoadRun, advice: str) -> float:
    """Sends all prompts of a load at once. Returns the mean seconds of an answer; 0.0 of none. advice: the flags that
    make prompts shorter.

    Raises BenchError with the server's message when one fails.
    """
    await load.run((), 0, asyncio.Event())
    for prompt, record in zip(load.prompts, load.records, strict=True):
        if error := record.error:
            lengths = f"it had {prompt.input_len} tokens and asked for {prompt.output_len}"
            shorter = f"; {lengths}: {advice} make it shorter" if error.startswith(TOO_LONG) else ""
            raise BenchError(f"the warm-up request failed, so the run was not started: {error}{shorter}")
    return sum(record.latency for record in load.records) / max(len(load.records), 1)


async def drive(load: LoadRun, due: Sequence[float], concurrency: int, label: str, quiet: bool) -> str:
    """Runs the load behind a progress bar. The reason it ended early ("": none): Ctrl-C, or a server that is gone."""
    stop, reason, counts = asyncio.Event(), "", Counter[str]()
    with progress_bar(label, len(load.prompts), not quiet) as bar:

        def on_done(record: Record) -> None:
            nonlocal reason
            counts.update(failed=bool(record.error), tokens=record.output_tokens)
            counts["refused"] = counts["refused"] + 1 if record.refused else 0
            if counts["refused"] == REFUSED and not stop.is_set():
                reason = f"the server is gone: {record.error}"
                stop.set()
            failed = f", [red]{counts['failed']} failed[/]" if counts["failed"] else ""
            bar.advance(note=f"{counts['tokens']} tokens{failed}")

        with interruptible(stop), no_garbage_collection():
            await load.run(due, concurrency, stop, on_done)
    return reason or (INTERRUPTED if stop.is_set() else "")


# names in SGLang's results, and fields of a record
DETAILS = fields("""
input_lens       prompt_tokens
output_lens      output_tokens
cached_lens      cached_tokens
start_times      start
send_delays      send_delay
latencies        latency
ttfts            ttft
itls             itl
turns            turn
generated_texts  text
errors           error
""")


class ServingBenchmark:
    """One server, measured at the points of a sweep."""

    def __init__(self, args: argparse.Namespace) -> None:
        headers = dict(args.header) | ({"Authorization": f"Bearer {args.api_key}"} if args.api_key else {})
        self.args = args
        self.client = HttpClient(args.base_url or f"http://{args.host}:{args.port}", headers)
        self.server, self.backend = ServerInfo(self.client), BACKENDS[args.backend]
        self.hardware = hardware(args.machine) if args.machine else hardware_of(Machine.here())
        self.info: dict[str, object] = {}  # the server's settings
        self.rows: list[dict[str, Any]] = []  # the points that were measured
        self.ended = ""  # why it ended early

    async def run(self) -> None:
        """Raises BenchError before anything was measured; later errors are in `ended`."""
        args = self.args
        self.info = await self.server.settings()
        vocabulary = _vocabulary(args, self.info)
        self.options = RequestOptions(
            args.served_model_name or args.model or await self.server.model(),
            args.temperature,
            not args.disable_ignore_eos,
            not args.disable_stream,
            args.request_timeout,
            args.extra_request_body,
        )
        sweep = points(args)
        for number, point in enumerate(sweep):
            try:
                load, due = self._load(vocabulary, point, args.seed + 1000 * number)
                first = warm_up_prompts(load.prompts, vocabulary, args.warmup_requests, args.seed)
                warm = LoadRun(self.client, self.backend, self.options, first)
                seconds = await warm_up(warm, shortening_flags(args))
                if args.stagger:
                    due = staggered(due, point.concurrency, seconds)
                if args.flush_cache:
                    await self.server.post("/flush_cache", "--flush-cache")
                before = await self.server.counters()
                if args.profile:
                    wishes = {"output_dir": args.profile_output_dir, "num_steps": args.profile_steps}
                    given = {name: wish for name, wish in wishes.items() if wish}
                    await self.server.post("/start_profile", "--profile", given)
            except (BenchError, asyncio.CancelledError) as error:
                if not self.rows:
                    raise
                self.ended = str(error) or INTERRUPTED
                break
            label = f"{number + 1}/{len(sweep)}: rate {point.rate:g}, concurrency {point.concurrency or 'any'}"
            self.ended = await drive(load, due, point.concurrency, label, args.disable_tqdm)
            after = await self._counters_after()
            self.rows.append(self._row(point, load, after.since(before)))
            if self.ended:
                break
        self.client.close()

    def _load(self, vocabulary: OrdinaryTokens | None, point: SweepPoint, seed: int) -> tuple[LoadRun, list[float]]:
        """The point's own prompts: the server's cache would have the tokens of earlier ones."""
        args = self.args
        prompts = load_prompts(args, vocabulary, seed)
        raise_file_limit(max(point.concurrency or len(prompts), args.warmup_requests) + SPARE_FILES, required=False)
        for prompt in {(bool(prompt.ids), bool(prompt.text)): prompt for prompt in prompts}.values():
            self.backend.body(prompt, self.options)  # one of each kind, for its errors
        due = schedule(prompts, point.rate, args.use_trace_timestamps, seed, args.burstiness)
        return LoadRun(self.client, self.backend, self.options, prompts), due

    async def _counters_after(self) -> Counters:
        """A server that died has none; what was measured is still reported."""
        try:
            if self.args.profile and not self.args.profile_steps:
                print(await self.server.stop_profile(), file=sys.stderr)
            self.info = await self.server.settings()
            return await self.server.counters()
        except HttpError as error:
            self.ended = self.ended or f"the server is gone: {error}"
            return Counters()

    def _row(self, point: SweepPoint, load: LoadRun, new: Counters) -> dict[str, Any]:
        args = self.args
        sent = [record for record in load.records if record.done or record.error]
        numbers, turns = measure(sent, load.duration), by_turn(sent)
        names = ("tag", "backend", "dataset_name", "random_input_len", "random_output_len", "random_range_ratio")
        row: dict[str, Any] = {
            **{name: getattr(args, name) for name in names},
            "request_rate": "trace" if args.use_trace_timestamps else str(point.rate),
            "max_concurrency": point.concurrency or None,
            "repeat": point.repeat,
            "requests": len(load.prompts),
            **numbers,
            **cache_hits(numbers["total_cached_tokens"], numbers["total_input_tokens"], new),
            "cache_hit_possible": possible_hits(load.sent),
            **goodput(sent, load.duration, args.goodput),
            "accept_length": accept_length(self.info, new),
            "server_overhead_ms": overhead(new),
            "share_of_floor": self._share_of_floor(numbers),
            **_ending(self.ended),
            "failures": failures(sent),
            "samples": samples(sent),
            "tokens_by_second": tokens_by_second(sent, min((record.start for record in sent), default=0.0)),
            **({"by_turn": turns} if turns else {}),
        }
        if args.output_details:
            row |= {name: [getattr(record, field) for record in sent] for name, field in DETAILS.items()}
        return row

    def _share_of_floor(self, numbers: Mapping[str, Any]) -> float | None:
        """None where the checkpoint or the GPU is unknown."""
        folders = _folders(self.args, self.info, "config.json")
        if self.hardware is None or not folders:
            return None
        from thalweg.bench.floor import ServedModel, share_of_floor  # load torch: not while the server is measured

        names = ("completed", "total_input_tokens", "total_output_tokens", "concurrency", "duration")
        model = ServedModel.of_server(folders[-1], self.info)
        return share_of_floor(model, self.hardware, *(numbers[name] for name in names))


def _ending(ended: str) -> dict[str, object]:
    return {"partial": bool(ended), "ended": ended, "interrupted": ended == INTERRUPTED}


def _source(args: argparse.Namespace, argv: Sequence[str], info: Mapping[str, object]) -> dict[str, object]:
    """The provenance, without secrets. Infinities are not JSON numbers, so they go as text."""
    client = {name: value for name, value in vars(args).items() if name not in ("api_key", "header")}
    client["request_rate"] = "trace" if args.use_trace_timestamps else [str(rate) for rate in args.request_rate]
    client["trace_end"] = str(args.trace_end)
    secrets = [args.api_key, *(value for _, value in args.header)]
    return provenance("bench serve", list(argv), {"client": client, "server": dict(info)}, secrets)


async def run(args: argparse.Namespace, argv: list[str]) -> dict[str, Any]:
    """One run from the flags to its result: SGLang's keys for a single point, else `points`, a list of such objects.
    Raises BenchError before the first load starts.
    """
    bench = ServingBenchmark(args)
    await bench.run()
    source = _source(args, argv, bench.info)
    if (wanted := len(points(args))) == 1:
        return bench.rows[0] | source
    return {"tag": args.tag, "points": bench.rows, "wanted": wanted, **_ending(bench.ended), **source}


def show(result: Mapping[str, Any]) -> str:
    """SGLang's block for each point; a table where there are several."""
    rows, shown = result.get("points", [result]), list[str]()
    for row in rows:
        shown.append(render(row))
        late = row["p99_send_delay_ms"]
        if row["request_rate"] != "inf" and not row["max_concurrency"] and late > LATE_MS:
            shown.append(
                f"NOTE: 1 % of the requests were sent more than {late:.0f} ms late: this machine is too busy for the"
                " load"
            )
        if reasons := row["failures"]:
            shown.append("Failures:\n" + "\n".join(f"{count:7} × {reason}" for reason, count in reasons.items()))
    if len(rows) > 1:
        shown += field_table(rows, SERVED)
    if result["partial"]:
        shown.append(f"PARTIAL: {result['ended']}; the numbers are of what was measured until then")
    return "\n".join(shown)


def _save(path: Path, result: Mapping[str, Any]) -> None:
    """A line of a `.jsonl` is a point, as in SGLang's tools, each with its provenance."""
    if path.suffix != ".jsonl" or "points" not in result:
        write(path, result)
        return
    source = {name: result[name] for name in SOURCE}
    for row in result["points"]:
        write(path, row | source)


@command("thalweg bench serve")
def main(argv: list[str]) -> int:
    """0: done; 1: the run could not start, ended early, or no request succeeded; 2: wrong flags; 130: Ctrl-C. What was
    measured is printed and written.
    """
    args = parse(argv)
    result = asyncio.run(run(args, argv))
    print("\n" + show(result))
    if args.output_file:
        _save(Path(args.output_file), result)
    if result["interrupted"]:
        return 130
    return 1 if result["partial"] or not any(row["completed"] for row in result.get("points", [result])) else 0
