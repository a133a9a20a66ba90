"""`thalweg bench offline`: a whole data set through an engine in this process, as `LLM.generate` does it, detokenizing
included.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thalweg.bench.data_args import add_data, check_data, load_prompts
from thalweg.bench.datasets import Vocabulary, vocabulary_of
from thalweg.bench.errors import DatasetError
from thalweg.bench.in_process import configuration, positive
from thalweg.bench.prompt_files import ids_of
from thalweg.bench.results import provenance, write
from thalweg.bench.usage import status, unless
from thalweg.config.args import OptionsParser, options_parser, parse_options
from thalweg.config.tree import non_defaults
from thalweg.core.request import check_request
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Assembler
from thalweg.llm import LLM

WIDTH = 50
COLUMNS = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}")  # fmt: skip
WARM_UP = 8  # sequences, and tokens of each


@dataclass(frozen=True, slots=True)
class Request:
    ids: tuple[int, ...]
    output_len: int


@dataclass(slots=True)
class Run:
    """One pass. seconds: from the first to the last token's step, submitting included; cpu: seconds of this process's
    processor time, all threads. by_second: output tokens in each second. accept_length: tokens of a verification, None
    without any. done, inputs, outputs: sequences that ended, their prompt tokens, and all tokens written.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    done: int = 0
    inputs: int = 0
    outputs: int = 0
    cached: int = 0
    by_second: list[int] = field(default_factory=list)
    accept_length: float | None = None


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted in here, for a look between two steps: a step that is torn leaves an engine that cannot go on. A
    second one ends the program as usual.
    """
    asked: list[bool] = []

    def on_signal(*_: object) -> None:
        asked.append(True)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def requests(args: argparse.Namespace, words: Vocabulary, seed: int) -> list[Request]:
    """The data set as token ids. Raises DatasetError."""
    prompts = load_prompts(args, words, seed)
    ids = ids_of(prompts, words)
    return [Request(tuple(each), prompt.output_len) for each, prompt in zip(ids, prompts, strict=True)]


def _owners(llm: LLM, wanted: Sequence[Request], ignore_eos: bool) -> dict[int, tuple[Request, Assembler]]:
    owners: dict[int, tuple[Request, Assembler]] = {}
    for one in wanted:
        params = SamplingParams(temperature=0.0, max_tokens=one.output_len, ignore_eos=ignore_eos)
        check_request(one.ids, params, llm.engine.context, llm.engine.vocab)
        (uid,) = llm.engine.submit(one.ids, params)
        owners[uid] = one, Assembler(0, one.ids, params, llm.texts.tokenizer)
    return owners


def measure(
    llm: LLM, wanted: Sequence[Request], ignore_eos: bool, stopped: Callable[[], bool], progress: Progress
) -> Run:
    """All sequences at once, to their ends or until `stopped`. Raises InvalidRequest for what the engine refuses."""
    task = progress.add_task("sequences", total=len(wanted), note="")
    run, engine = Run(), llm.engine
    begin, cpu, before = time.perf_counter(), time.process_time(), engine.loop.stats().acceptance
    owners = _owners(llm, wanted, ignore_eos)
    while owners and not stopped():
        deltas = engine.step()
        second = int(time.perf_counter() - begin)
        run.by_second += [0] * (second + 1 - len(run.by_second))
        for delta in deltas:
            if (owner := owners.get(delta.uid)) is None:
                continue
            request, assembler = owner
            piece = assembler.feed(delta, 0.0)
            run.by_second[second] += len(piece.ids)
            run.cached += piece.cached_tokens if delta.finish else 0
            if assembler.ended:
                del owners[delta.uid]
                run.done, run.inputs = run.done + 1, run.inputs + len(request.ids)
                progress.update(task, advance=1, note=f"{sum(run.by_second)} tokens")
    run.seconds, run.cpu = time.perf_counter() - begin, time.process_time() - cpu
    run.outputs, run.accept_length = sum(run.by_second), engine.loop.stats().acceptance.since(before).mean_length
    engine.abort(tuple(owners))
    while not engine.idle:
        engine.step()
    progress.remove_task(task)
    return run


def row(run: Run, repeat: int) -> dict[str, object]:
    """A pass under the keys of SGLang's `bench_offline_throughput`."""
    seconds = max(run.seconds, 1e-9)
    return {
        "backend": "engine",
        "repeat": repeat,
        "successful_requests": run.done,
        "total_latency": run.seconds,
        "total_input_tokens": run.inputs,
        "total_output_tokens": run.outputs,
        "total_cached_tokens": run.cached,
        "last_gen_throughput": float(run.by_second[-2] if len(run.by_second) > 1 else run.outputs / seconds),
        "request_throughput": run.done / seconds,
        "input_throughput": run.inputs / seconds,
        "output_throughput": run.outputs / seconds,
        "total_throughput": (run.inputs + run.outputs) / seconds,
        "cpu_seconds": run.cpu,
        "cpu_us_per_output_token": 1e6 * run.cpu / max(run.outputs, 1),
        "tokens_by_second": run.by_second,
        "accept_length": run.accept_length,
    }


LABELS = (
    ("Backend:", "backend"),
    ("Successful requests:", "successful_requests"),
    ("Benchmark duration (s):", "total_latency"),
    ("Total input tokens:", "total_input_tokens"),
    ("Total generated tokens:", "total_output_tokens"),
    ("Last generation throughput (tok/s):", "last_gen_throughput"),
    ("Request throughput (req/s):", "request_throughput"),
    ("Input token throughput (tok/s):", "input_throughput"),
    ("Output token throughput (tok/s):", "output_throughput"),
    ("Total token throughput (tok/s):", "total_throughput"),
    ("CPU time an output token (us):", "cpu_us_per_output_token"),
    ("Accept length:", "accept_length"),
)


def render(one: dict[str, object]) -> str:
    """SGLang's block, label for label, and the CPU time."""
    values = ((label, one[key]) for label, key in LABELS if one[key] is not None)
    shown = (
        f"{label:<40} {value:.2f}" if isinstance(value, float) else f"{label:<40} {value}" for label, value in values
    )
    return "\n".join((f"{' Offline Throughput Benchmark Result ':=^{WIDTH}}", *shown, "=" * WIDTH))


def _parser() -> OptionsParser:
    parser = options_parser(
        "thalweg bench offline",
        "Throughput of a whole data set in this process, without HTTP: all prompts are queued at once, as"
        " `LLM.generate` does.",
        only=("model", "load", "memory", "schedule", "speculative"),
    )
    add_data(parser.add_argument_group("What is computed"))
    add = parser.add_argument_group("How").add_argument
    add("--repeat", type=positive, default=1, metavar="N", help="passes, each with other random tokens (default: 1)")
    add("--disable-ignore-eos", action="store_true", help="let the model end early; lengths are then upper limits")
    add("--skip-warmup", action="store_true", help="no short pass before the clock starts")
    add(
        "--result-filename",
        "--output-file",
        default="",
        metavar="FILE",
        help="write the result; .jsonl gets one line more",
    )
    add("--tag", default="", help="a name that goes into the result")
    return parser


def run(argv: list[str]) -> dict[str, object]:
    """Measures and prints each pass; Ctrl-C ends the pass that runs and keeps what it had. Raises ThalwegError,
    DatasetError, ResultError.
    """
    parser = _parser()
    parsed = parse_options(parser, argv)
    args: argparse.Namespace = parsed.args
    check_data(parser, args)
    if args.dataset_name == "conversations" or args.gsp_num_turns > 1:
        raise DatasetError("later turns wait for answers: measure conversations with `thalweg bench serve`")
    console = Console(stderr=True)
    llm = LLM(progress=console.is_terminal, **non_defaults(parsed.options) | {"allow_simulated_acceptance": True})
    words = vocabulary_of(llm.texts.resolved.path)
    passes = [requests(args, words, args.seed + 1000 * number) for number in range(args.repeat)]
    rows: list[dict[str, object]] = []
    with interruptible() as stopped, Progress(*COLUMNS, console=console, disable=not console.is_terminal) as bar:
        if not args.skip_warmup:
            short = [
                Request(one.ids, min(one.output_len, WARM_UP)) for one in requests(args, words, args.seed - 1)[:WARM_UP]
            ]
            measure(llm, short, True, stopped, bar)
        for number, wanted in enumerate(passes):
            if stopped():
                break
            rows.append(row(measure(llm, wanted, not args.disable_ignore_eos, stopped, bar), number))
            print(render(rows[-1]))
        partial = stopped()
    shown = {
        name: str(value) if name == "trace_end" else value
        for name, value in vars(args).items()
        if name not in ("given", "notices")
    }
    told = provenance("bench offline", argv, {"client": shown, **configuration(llm.texts.resolved)})
    result = {"tag": args.tag, "points": rows, "partial": partial, "ended": "Ctrl-C" if partial else "", **told}
    if args.result_filename:
        write(Path(args.result_filename), result)
    return result


def _status(words: list[str]) -> int:
    result = run(words)
    return unless(result["partial"], int(not result["points"]), "the numbers are of what was computed until then")


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: it could not start or nothing was measured; 2: it was asked for wrongly; 130: Ctrl-C, what was
    measured is told and written.
    """
    return status("thalweg bench offline", _status, argv)
