"""lm-evaluation-harness through the OpenAI API: starts or uses a server, runs the installed `lm_eval`, and reads its
results.

The harness is not a dependency: `pip install 'lm_eval[api]'` installs it. It runs as a process of its own and uses HTTP
only, so its tasks (their downloads, their prompts) and its numbers are its own; shares get our interval.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from thalweg.bench.errors import BenchError
from thalweg.bench.http_client import HttpClient
from thalweg.bench.server_info import ServerInfo
from thalweg.bench.server_process import ServerProcess
from thalweg.bench.statistics import Share
from thalweg.config.options import Options
from thalweg.config.tree import command_line, non_defaults
from thalweg.core.errors import UnsupportedConfig

MODELS = {"completions": "local-completions", "chat": "local-chat-completions"}
SHARES = ("acc", "acc_norm", "exact_match", "em", "pass@1")  # metrics that are means over documents of right or wrong
STDERR = 2  # file descriptor: the harness's output is not the result
INSTALL = "pip install 'lm_eval[api]'"
FLAGS = f"""
--harness          name...          its tasks by name, over HTTP ({INSTALL})
--harness-api      api=completions  chat has no log-probabilities: no multiple choice
--harness-include  folder           with task files of your own
--harness-shots    whole            worked examples before each question; default: the task's
--harness-limit    count            documents of a task; default: all
"""

Row = dict[str, Any]


def run(options: Options, args: Any) -> tuple[list[Row], Row, Mapping[str, object]]:
    """The rows, what was evaluated, and the configuration. Raises UnsupportedConfig or BenchError."""
    folder = Path(options.model.model)
    if importlib.util.find_spec("lm_eval") is None:
        tasks = " ".join(args.harness)
        raise UnsupportedConfig(f"--harness {tasks}: lm-evaluation-harness is not installed here; {INSTALL}")
    if not (folder / "tokenizer.json").is_file():
        raise UnsupportedConfig(
            f"--model {folder}: the harness counts tokens itself: give a folder with tokenizer.json"
        )
    evaluated = {name: getattr(args, f"harness_{name}") for name in ("api", "shots", "limit")}
    with suppress(metadata.PackageNotFoundError):
        evaluated["lm_eval"] = metadata.version("lm_eval")
    rows, configured = asyncio.run(_evaluate(options, args, folder))
    return rows, {"harness": args.harness, **evaluated}, configured


async def _evaluate(options: Options, args: Any, folder: Path) -> tuple[list[Row], Mapping[str, object]]:
    """On the server of --base-url, else on one of our own."""
    if args.base_url:
        name = args.served_model_name or options.model.model
        return await asyncio.to_thread(_run_harness, args, folder, args.base_url, name), {"server": args.base_url}
    async with ServerProcess(command_line(non_defaults(options))) as server:
        client = HttpClient(server.url)
        info = await ServerInfo(client).settings()
        client.close()
        return await asyncio.to_thread(_run_harness, args, folder, server.url, folder.resolve().name), info


def _run_harness(args: Any, folder: Path, base_url: str, name: str) -> list[Row]:
    begin, is_chat = time.perf_counter(), args.harness_api == "chat"
    model = {
        "model": name,
        "base_url": base_url.rstrip("/") + ("/v1/chat/completions" if is_chat else "/v1/completions"),
        "tokenizer": folder.resolve(),
        "tokenizer_backend": "huggingface",
        "num_concurrent": args.concurrency,
        "max_retries": 1,
    }
    flags = {
        "--model": MODELS[args.harness_api],
        "--model_args": ",".join(f"{key}={value}" for key, value in model.items()),
        "--tasks": ",".join(args.harness),
        "--include_path": args.harness_include or None,
        "--num_fewshot": args.harness_shots,
        "--limit": args.harness_limit,
    }
    with TemporaryDirectory(prefix="thalweg-harness-") as out:
        words = [sys.executable, "-m", "lm_eval", "run"]
        words += [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
        words += ["--output_path", out, *(["--apply_chat_template"] if is_chat else [])]
        key = {"OPENAI_API_KEY": args.api_key} if args.api_key else {}
        done = subprocess.run(words, stdout=STDERR, env={**os.environ, **key}, check=False)
        files = sorted(Path(out).rglob("results_*.json"))
        if done.returncode != 0 or not files:
            raise BenchError(
                f"lm_eval ended with status {done.returncode} and {len(files)} results; see its output above"
            )
        rows = list(rows_of(json.loads(files[-1].read_text(encoding="utf-8"))))
    return [row | {"seconds": time.perf_counter() - begin} for row in rows]


def rows_of(result: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of the harness's own result: "results" by task and "metric,filter", "n-samples" by task.

    A mean of right and wrong answers becomes a share with our interval; others keep the harness's standard error.
    """
    for task, values in result["results"].items():
        total = int(result.get("n-samples", {}).get(task, {}).get("effective", 0))
        for key, value in values.items():
            metric, _, how = key.partition(",")
            if not how or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            row: Row = {"task": f"{task}: {metric}" + ("" if how == "none" else f" ({how})"), "total": total}
            hits = value * total
            if metric in SHARES and total and abs(hits - round(hits)) < 1e-6 * total:
                yield row | Share(round(hits), total).as_json()
            else:
                error = values.get(f"{metric}_stderr,{how}")
                yield row | {"value": value, "stderr": error if isinstance(error, int | float) else None}
