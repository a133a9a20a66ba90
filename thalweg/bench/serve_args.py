"""The flags of `thalweg bench serve`: SGLang's names and meanings, so that its command lines work as they are."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from thalweg.bench.backends import BACKENDS
from thalweg.bench.datasets import DATASETS, LATER


def _dataset(name: str) -> str:
    if name in DATASETS:
        return name
    hint = f"{name!r} comes later" if name in LATER else f"unknown data set {name!r}"
    raise argparse.ArgumentTypeError(
        f"{hint}; there is {', '.join(DATASETS)} (a Mooncake or Azure recording is a trace)"
    )


def _body(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'expected a JSON object such as {{"top_p": 0.9}}, got {text}')
    return value


def _header(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name.strip(), value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 on, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="thalweg bench serve",
        description="Measures any OpenAI-compatible server: throughput, and the time to, between and after tokens.",
    )
    add = parser.add_argument
    add("--backend", choices=tuple(BACKENDS), default="thalweg", help="the API to speak (default: %(default)s)")
    add("--base-url", default="", help="the server, e.g. http://10.0.0.7:30000; wins over --host and --port")
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=_count, default=30000, help="default: %(default)s")
    add("--api-key", default="", help="sent as a bearer token")
    add(
        "--header",
        type=_header,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="one more request header; repeatable",
    )
    add("--model", default="", help="name for the request body; default: the server's first model")
    add(
        "--served-model-name", default="", help="name for the request body where --model is the folder of the tokenizer"
    )
    add(
        "--tokenizer",
        default="",
        help="folder of tokenizer.json; default: --model, or what a server on this machine names",
    )
    add(
        "--request-timeout",
        type=float,
        default=21600.0,
        help="seconds until a request counts as failed (default: six hours)",
    )
    _add_data(parser.add_argument_group("what is sent"))
    _add_pace(parser.add_argument_group("when it is sent"))
    _add_request(parser.add_argument_group("the requests"))
    _add_output(parser.add_argument_group("the result"))
    return parser


def _add_data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--dataset-name",
        type=_dataset,
        default="random",
        metavar="{" + ",".join(DATASETS) + "}",
        help="default: %(default)s",
    )
    add("--dataset-path", default="", help="the trace (Mooncake JSONL, Azure CSV; .gz too) or the file of prompts")
    add("--num-prompts", type=_count, default=None, help="how many; default 1000 for random, all of a trace or file")
    add(
        "--random-input-len",
        "--random-input",
        type=_count,
        default=1024,
        help="longest prompt in tokens (default: %(default)s)",
    )
    add(
        "--random-output-len", "--random-output", "--output-len", type=_count, default=1024,
        help="longest output in tokens; for files, where a line names none (default: %(default)s)",
    )  # fmt: skip
    add(
        "--random-range-ratio", type=float, default=0.0, metavar="R",
        help="lengths are uniform in [R x length, length]: 1 is fixed, 0 halves the mean. This is SGLang's meaning; "
        "in vLLM 0 is fixed and R means plus or minus R (default: %(default)s)",
    )  # fmt: skip
    add(
        "--trace-max-input-len",
        type=_count,
        default=0,
        help="cut longer prompts of a trace to this; 0: do not (default)",
    )
    add(
        "--trace-max-output-len",
        type=_count,
        default=0,
        help="cut longer outputs of a trace to this; 0: do not (default)",
    )
    add("--seed", type=int, default=1, help="of tokens, lengths and arrivals (default: %(default)s)")


def _add_pace(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--request-rate",
        type=float,
        default=float("inf"),
        help="requests a second, a Poisson process; inf: all at once (default)",
    )
    add(
        "--max-concurrency",
        type=_count,
        default=0,
        help="most requests under way; later ones wait their turn. 0: no limit (default)",
    )
    add("--use-trace-timestamps", action="store_true", help="send each request of a trace at its recorded time")
    add(
        "--trace-slowdown-factor", "--mooncake-slowdown-factor", type=float, default=1.0, metavar="F",
        help="multiply a trace's times: 2 is half its speed, 0.1 ten times its speed (default: %(default)s)",
    )  # fmt: skip
    add("--warmup-requests", type=_count, default=1, help="requests before the clock starts (default: %(default)s)")
    add(
        "--flush-cache",
        action="store_true",
        help="empty the server's prefix cache after the warm-up; Thalweg wants its --admin-api-key as --api-key for that",
    )


def _add_request(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--disable-ignore-eos", action="store_true", help="let the model end early; lengths are then upper limits")
    add("--disable-stream", action="store_true", help="whole answers: time to first token is then the whole latency")
    add(
        "--extra-request-body", type=_body, default={}, metavar="JSON", help="fields put into every request as they are"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--output-file", default="", help="write the result: .jsonl gets one line more, another name is written anew")
    add(
        "--output-details",
        action="store_true",
        help="put every request's times, lengths, text and error into the result",
    )
    add("--tag", default="", help="a name that goes into the result")
    add("--disable-tqdm", "--no-progress", action="store_true", help="no progress bar")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags, checked against each other. Exits with a message (status 2) as argparse does."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.dataset_name == "random":
        args.num_prompts = 1000 if args.num_prompts is None else args.num_prompts
        if args.num_prompts < 1:
            parser.error("--num-prompts must be at least 1")
    elif not args.dataset_path:
        parser.error(f"--dataset-name {args.dataset_name} needs --dataset-path")
    if args.use_trace_timestamps and args.dataset_name != "trace":
        parser.error("--use-trace-timestamps needs --dataset-name trace")
    if args.use_trace_timestamps and args.request_rate != float("inf"):
        parser.error("--use-trace-timestamps and --request-rate both say when to send: leave one out")
    args.num_prompts = args.num_prompts or 0
    return args
