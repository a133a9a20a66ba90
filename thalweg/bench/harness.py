"""lm-evaluation-harness through the OpenAI API: starts or targets a server, runs the installed `lm_eval`, and reads its
results.

The harness is no dependency: `pip install 'lm_eval[api]'` brings it. It runs as a process of its own and sees nothing
but HTTP, so its tasks (what they download, how they prompt) and its numbers are its own; shares get our interval.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from thalweg.bench.client import Client
from thalweg.bench.errors import ResultError
from thalweg.bench.eval_run import Row
from thalweg.bench.in_process import folder_name, positive
from thalweg.bench.own_server import OwnServer
from thalweg.bench.results import provenance, write
from thalweg.bench.statistics import Share
from thalweg.config.args import OptionsParser
from thalweg.config.options import Options
from thalweg.config.tree import non_defaults, settings
from thalweg.core.errors import UnsupportedConfig

MODELS = {"completions": "local-completions", "chat": "local-chat-completions"}
SHARES = ("acc", "acc_norm", "exact_match", "em", "pass@1")  # metrics that are means over documents of right or wrong
STDERR = 2  # the file descriptor: what the harness prints is no result
INSTALL = "pip install 'lm_eval[api]'"


def flags(parser: OptionsParser) -> None:
    """Adds the harness's own flags."""
    add = parser.add_argument_group("lm-evaluation-harness").add_argument
    add("--harness", nargs="+", default=[], metavar="TASK", help=f"its tasks by name, over HTTP ({INSTALL})")
    add(
        "--harness-api",
        choices=tuple(MODELS),
        default="completions",
        help="chat gives no log-probabilities: no multiple choice (default: completions)",
    )
    add("--harness-include", default="", metavar="DIR", help="folder with task files of your own")
    add(
        "--harness-shots",
        type=int,
        default=None,
        metavar="N",
        help="worked examples before each question (default: the task's)",
    )
    add("--harness-limit", type=positive, default=None, metavar="N", help="documents of a task (default: all)")


def run(config: Options, args: argparse.Namespace, argv: Sequence[str]) -> list[Row]:
    """Evaluates and prints. Raises UnsupportedConfig, ServerError or ResultError."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UnsupportedConfig(
            f"--harness {' '.join(args.harness)}: lm-evaluation-harness is not installed here; {INSTALL}"
        )
    folder = Path(config.model.model)
    if not (folder / "tokenizer.json").is_file():
        raise UnsupportedConfig(
            f"--model {folder}: the harness counts tokens itself, so it must be a folder with tokenizer.json"
        )
    rows, configured = asyncio.run(_evaluate(config, args, folder))
    Console().print(table(rows))
    if args.output_file:
        told = [word for word in argv if not args.api_key or args.api_key not in word]
        asked = {
            "harness": args.harness,
            "api": args.harness_api,
            "shots": args.harness_shots,
            "limit": args.harness_limit,
            "lm_eval": _version(),
        }
        head = {"checkpoint": folder_name(folder), "evaluation": asked}
        write(Path(args.output_file), {**head, "results": rows, **provenance("eval", told, configured)})
    return rows


def _version() -> str:
    """The harness's, "" where it was not installed as a package."""
    try:
        return metadata.version("lm_eval")
    except metadata.PackageNotFoundError:
        return ""


async def _evaluate(config: Options, args: argparse.Namespace, folder: Path) -> tuple[list[Row], Mapping[str, object]]:
    """On the server that was named, else on one of our own."""
    if args.base_url:
        name = args.served_model_name or config.model.model
        return await asyncio.to_thread(_ask, args, folder, args.base_url, name), {"server": args.base_url}
    async with OwnServer(_words(config)) as server:
        client = Client(server.url)
        told = json.loads((await client.request("GET", "/server_info")).body)
        client.close()
        rows = await asyncio.to_thread(_ask, args, folder, server.url, folder_name(folder))
        return rows, told


def _words(config: Options) -> list[str]:
    """The command line of these settings."""
    words = [config.model.model]
    for name, value in non_defaults(config).items():
        one = settings()[name]
        if name == "model":
            continue
        if one.kind is bool:
            words.append(one.flag if value else f"--no-{one.flag[2:]}")
        else:
            for entry in value if one.many else (value,):
                words += [one.flag, str(entry)]
    return words


def command(args: argparse.Namespace, folder: Path, base_url: str, name: str, results: Path) -> list[str]:
    """How the harness is run."""
    path = "/v1/chat/completions" if args.harness_api == "chat" else "/v1/completions"
    model = {
        "model": name,
        "base_url": base_url.rstrip("/") + path,
        "tokenizer": folder.resolve(),
        "tokenizer_backend": "huggingface",
        "num_concurrent": args.concurrency,
        "max_retries": 1,
    }
    words = [sys.executable, "-m", "lm_eval", "run", "--model", MODELS[args.harness_api]]
    words += ["--model_args", ",".join(f"{key}={value}" for key, value in model.items())]
    words += ["--tasks", ",".join(args.harness), "--output_path", str(results)]
    words += ["--apply_chat_template"] if args.harness_api == "chat" else []
    words += ["--include_path", args.harness_include] if args.harness_include else []
    words += ["--num_fewshot", str(args.harness_shots)] if args.harness_shots is not None else []
    words += ["--limit", str(args.harness_limit)] if args.harness_limit is not None else []
    return words


def _ask(args: argparse.Namespace, folder: Path, base_url: str, name: str) -> list[Row]:
    begin = time.perf_counter()
    with TemporaryDirectory(prefix="thalweg-harness-") as place:
        words = command(args, folder, base_url, name, Path(place))
        key = {"OPENAI_API_KEY": args.api_key} if args.api_key else {}
        done = subprocess.run(words, stdout=STDERR, env={**os.environ, **key}, check=False)
        found = sorted(Path(place).rglob("results_*.json"))
        if done.returncode != 0 or not found:
            raise ResultError(
                f"lm_eval ended with status {done.returncode} and {len(found)} results; what it said stands above"
            )
        rows = list(rows_of(json.loads(found[-1].read_text(encoding="utf-8"))))
    seconds = time.perf_counter() - begin
    return [row | {"seconds": seconds} for row in rows]


def rows_of(result: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of the harness's own result: "results" by task and "metric,filter", "n-samples" by task.

    A mean of right and wrong answers becomes a share with our interval; other metrics stand with the harness's standard
    error.
    """
    for task, values in result["results"].items():
        total = int(result.get("n-samples", {}).get(task, {}).get("effective", 0))
        for key, value in values.items():
            metric, _, how = key.partition(",")
            if not how or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            row: Row = {"task": f"{task}: {metric}" + ("" if how == "none" else f" ({how})"), "total": total}
            hits = value * total
            if metric in SHARES and total and abs(hits - round(hits)) < 1e-6 * total:
                yield row | Share(round(hits), total).as_json()
            else:
                error = values.get(f"{metric}_stderr,{how}")
                yield row | {"value": value, "stderr": error if isinstance(error, (int, float)) else None}


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="lm-evaluation-harness", title_justify="left")
    shown.add_column("task", no_wrap=True)
    for head in ("documents", "result", "95 % interval", "s"):
        shown.add_column(head, justify="right")
    for row in rows:
        if "share" in row:
            result, interval = f"{row['share']:.1%}", f"{row['low_95']:.1%} – {row['high_95']:.1%}"
        else:
            result, interval = (
                f"{row['value']:.4g}",
                "" if row["stderr"] is None else f"standard error {row['stderr']:.2g}",
            )
        shown.add_row(str(row["task"]), str(row["total"]), result, interval, f"{row['seconds']:.0f}")
    return shown
