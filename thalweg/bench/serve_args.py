"""The flags of `thalweg bench serve`: SGLang's names and meanings, so that its command lines work as they are."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from thalweg.bench.backends import BACKENDS
from thalweg.bench.data_args import add_data, check_data
from thalweg.bench.data_args import whole as _count
from thalweg.bench.per_request import LIMITS
from thalweg.bench.usage import Parser

# flags of SGLang's tool that change nothing here
HABITS = {
    "cache-report": "always told",
    "tokenize-prompt": "prompts go as token ids wherever the API takes them",
    "apply-chat-template": "a chat backend has the server do it",
}


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


def _limit(text: str) -> tuple[str, float]:
    name, sign, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if not sign or name not in LIMITS or not 0 < limit < float("inf"):
        raise argparse.ArgumentTypeError(
            f"expected NAME:MILLISECONDS with a name of {', '.join(LIMITS)}, such as ttft:500, got {text!r}"
        )
    return name, limit


def _parser() -> Parser:
    parser = Parser(
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
    add_data(parser.add_argument_group("what is sent"))
    _add_pace(parser.add_argument_group("when it is sent"))
    _add_request(parser.add_argument_group("the requests"))
    _add_output(parser.add_argument_group("the result"))
    return parser


def _add_pace(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--request-rate",
        type=float,
        nargs="+",
        default=[float("inf")],
        metavar="R",
        help="requests a second, a Poisson process; inf: all at once (default). Several are measured one after another",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="K",
        help=(
            "gaps between requests are Gamma of this shape: 1 is Poisson (default), 0.5 comes in bursts, 4 is more"
            " regular"
        ),
    )
    add(
        "--max-concurrency",
        type=_count,
        nargs="+",
        default=[0],
        metavar="N",
        help=(
            "most requests (conversations) under way; later ones wait their turn. 0: no limit (default). Several are"
            " measured one after another"
        ),
    )
    add(
        "--repeat",
        type=_count,
        default=1,
        metavar="N",
        help=(
            "measure everything so often, with other random tokens each time: `bench compare` then knows the noise"
            " (default: 1)"
        ),
    )
    add("--use-trace-timestamps", action="store_true", help="send each request of a trace at its recorded time")
    add("--warmup-requests", type=_count, default=1, help="requests before the clock starts (default: %(default)s)")
    add(
        "--flush-cache",
        action="store_true",
        help=(
            "empty the server's prefix cache after the warm-up; Thalweg wants its --admin-api-key as --api-key for that"
        ),
    )


def _add_request(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--top-p", type=float, default=None, help="default: the server's")
    for habit, note in HABITS.items():
        add(f"--{habit}", action="store_true", help=note)
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
    add("--profile", action="store_true", help="have the server profile the load (/start_profile, /stop_profile)")
    add(
        "--profile-output-dir",
        default="",
        metavar="FOLDER",
        help="where it writes the profile; default: its own choice",
    )
    add(
        "--profile-steps",
        type=_count,
        default=0,
        metavar="N",
        help="end the profile after so many steps; 0: with the load",
    )
    add(
        "--goodput",
        type=_limit,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests that keep all these limits: ttft, tpot, itl (longest gap), e2el, such as ttft:500 tpot:50",
    )
    add("--tag", default="", help="a name that goes into the result")
    add("--disable-tqdm", "--no-progress", action="store_true", help="no progress bar")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags, checked against each other. Exits with a message (status 2) as argparse does."""
    parser = _parser()
    args = parser.parse_args(argv)
    check_data(parser, args)
    if args.use_trace_timestamps and args.dataset_name != "trace":
        parser.error("--use-trace-timestamps needs --dataset-name trace")
    if args.use_trace_timestamps and args.request_rate != [float("inf")]:
        parser.error("--use-trace-timestamps and --request-rate both say when to send: leave one out")
    if any(not rate > 0 for rate in args.request_rate):
        parser.error("--request-rate must be above 0 (or inf)")
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    args.goodput = dict(args.goodput)
    if args.top_p is not None and args.backend == "sglang":
        parser.error("--top-p is not for --backend sglang: use sglang-oai")
    if args.top_p is not None:
        args.extra_request_body = {"top_p": args.top_p} | args.extra_request_body
    return args
