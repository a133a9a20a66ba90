"""One cell of an ablation, measured in a process of its own (`python -m thalweg.bench.ablation_cell ORDER NEWS`) with a
time limit. The engine is in that process and HTTP is not measured, so a column shows its effect on the engine.

ORDER is a JSON file (`CellOrder`). NEWS gets a JSON line as soon as something is known, so that a cell that is ended
keeps what it has: {"started": seconds}, {"single": ...}, {"batch": ...}, {"accuracy": row}, and at last {"done": true}
or {"refused": reason}.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from thalweg.bench.answering import EngineAnswerer
from thalweg.bench.datasets import OrdinaryTokens, vocabulary_of
from thalweg.bench.eval_prompts import PromptFormat
from thalweg.bench.evaluation import EvalSettings, Evaluation, evaluate
from thalweg.bench.in_process import Generation, exactly, run_all
from thalweg.core.errors import ThalwegError, UnsupportedConfig
from thalweg.engine.local import LocalEngine
from thalweg.llm import LLM

WARM_UP_TOKENS = 4
DONE, REFUSED, FAILED, TIMED_OUT, INTERRUPTED = "done", "not runnable", "failed", "timed out", "interrupted"

Result = dict[str, Any]


class CellWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """The load of each cell: one request alone, then several at a time."""

    input_len: int = 760  # mean tokens
    output_len: int = 460
    spread: float = 0.5  # lengths are uniform within ± this share of the mean
    shared_prefix: int = 0  # first tokens that all prompts of a run have in common
    concurrency: tuple[int, ...] = (8, 32)  # requests at a time, a run each
    waves: int = 2  # requests of a run for each of them
    repeat: int = 1  # runs of each kind, of which the fastest counts
    seed: int = 1

    def check(self, context: int) -> None:
        """Raises UnsupportedConfig where its longest sequence is longer than the context."""
        longest = int(self.input_len * (1 + self.spread)) + int(self.output_len * (1 + self.spread))
        if longest > context:
            raise UnsupportedConfig(
                f"--input-len {self.input_len} and --output-len {self.output_len} with --spread {self.spread:g} make up"
                f" to {longest} tokens, and a sequence has at most {context} here: lower them"
            )


class CellOrder(msgspec.Struct, frozen=True, kw_only=True):
    settings: dict[str, Any]  # of the engine, by name
    work: CellWorkload
    accuracy: EvalSettings  # answered after the clock has stopped


def draw(work: CellWorkload, count: int, vocabulary: OrdinaryTokens, name: str, most: int = 0) -> list[Generation]:
    """Requests, equal for the same workload, count and name. most: tokens of each output, 0 is no limit."""
    rng, requests = Random(f"{work.seed}/{name}"), list[Generation]()
    prefix = vocabulary.draw(rng, work.shared_prefix)

    def length(mean: int) -> int:
        return max(1, round(rng.uniform(mean * (1 - work.spread), mean * (1 + work.spread))))

    for _ in range(count):
        own = max(length(work.input_len) - len(prefix), 1)
        prompt = prefix + vocabulary.draw(rng, own)
        output_len = length(work.output_len)
        requests.append(exactly(prompt, min(output_len, most or output_len)))
    return requests


def single(engine: LocalEngine, work: CellWorkload, vocabulary: OrdinaryTokens) -> dict[str, float]:
    """One request of the mean lengths, alone: seconds to its first token, and the rate of those after it."""
    alone, runs = msgspec.structs.replace(work, spread=0.0, shared_prefix=0), []
    run_all(engine, draw(alone, 1, vocabulary, "warm-up", WARM_UP_TOKENS))
    for turn in range(work.repeat):
        (request,) = draw(alone, 1, vocabulary, f"single {turn}")
        begin = time.process_time()
        run_all(engine, [request])
        cpu = time.process_time() - begin
        runs.append((request.end - request.first, request.first - request.start, cpu))
    decode, ttft, cpu = min(runs)
    return {
        "input_len": work.input_len,
        "output_len": work.output_len,
        "ttft_seconds": ttft,
        "decode_tokens_per_s": (work.output_len - 1) / decode if decode else 0.0,
        "decode_seconds": decode,
        "cpu_seconds": cpu,
    }


def batch(engine: LocalEngine, work: CellWorkload, vocabulary: OrdinaryTokens, concurrency: int) -> dict[str, float]:
    """A closed loop. throughput: (prompt + output tokens) / seconds of the run. decode_per_request: mean over the
    requests of output tokens / seconds from sending to the last token.
    """
    run_all(engine, draw(work, concurrency, vocabulary, "warm-up", WARM_UP_TOKENS))
    runs = []
    for turn in range(work.repeat):
        requests = draw(work, concurrency * work.waves, vocabulary, f"{concurrency} {turn}")
        engine.flush_cache()
        cpu, begin = time.process_time(), time.perf_counter()
        run_all(engine, requests, concurrency)
        seconds, outputs = max(request.end for request in requests) - begin, sum(len(r.tokens) for r in requests)
        runs.append((seconds / outputs, seconds, time.process_time() - cpu, outputs, requests))
    _, seconds, cpu, outputs, requests = min(runs, key=lambda run: run[0])
    inputs = sum(len(request.prompt) for request in requests)
    return {
        "concurrency": concurrency,
        "requests": len(requests),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "cached_tokens": sum(request.cached for request in requests),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "throughput": (inputs + outputs) / seconds,
        "output_throughput": outputs / seconds,
        "decode_per_request": fmean(len(request.tokens) / (request.end - request.start) for request in requests),
        "mean_ttft_seconds": fmean(request.first - request.start for request in requests),
    }


def measure(order: CellOrder, report: Callable[[Result], None]) -> None:
    """All of a cell. Raises ThalwegError."""
    begin, wishes, work = time.perf_counter(), dict(order.settings), order.work
    llm = LLM(wishes.pop("model"), **wishes)
    engine, vocabulary = llm.engine, vocabulary_of(llm.texts.resolved.path)
    work.check(engine.context)
    report({"started": time.perf_counter() - begin})
    report({"single": single(engine, work, vocabulary)})
    for concurrency in work.concurrency:
        report({"batch": batch(engine, work, vocabulary, concurrency)})
    if accuracy := order.accuracy:
        texts = PromptFormat(llm.texts.resolved.path)
        for row in evaluate(Evaluation(texts, EngineAnswerer(llm, False), accuracy.items, accuracy.seed), accuracy):
            report({"accuracy": row})
    report({"done": True})


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came while a cell ran."""

    def __init__(self, result: Result) -> None:
        super().__init__("interrupted")
        self.result = result  # what it had measured


def run_cell(order: CellOrder, limit: float) -> Result:
    """Measures one cell in a process of its own: its status, the reason where it is not done, and what was measured.

    limit: seconds. Raises Interrupted on Ctrl-C.
    """
    begin, status, reason = time.perf_counter(), "", ""
    with TemporaryDirectory(prefix="thalweg-ablate-") as name:
        folder = Path(name)
        (folder / "order.json").write_bytes(msgspec.json.encode(order))
        words = [sys.executable, "-m", "thalweg.bench.ablation_cell", str(folder / "order.json"), str(folder / "news")]
        with (folder / "output").open("wb") as output:  # a session of its own: Ctrl-C in the terminal does not reach it
            process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            status, reason = TIMED_OUT, f"not done within {limit:g} s"
        except KeyboardInterrupt:
            status = INTERRUPTED
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result = read_news(folder / "news")
        if not status:
            status, reason = _outcome(process.returncode, result, folder / "output")
    result = {"status": status, "reason": reason, "seconds": time.perf_counter() - begin, **result}
    if status == INTERRUPTED:
        raise Interrupted(result)
    return result


def read_news(news: Path) -> Result:
    """A cell's lines merged; a last line that was cut off is left out."""
    result: Result = {"batches": [], "accuracy": []}
    for line in news.read_text(encoding="utf-8").splitlines() if news.is_file() else ():
        with suppress(ValueError):
            for name, value in json.loads(line).items():
                if name == "batch":
                    result["batches"].append(value)
                elif name == "accuracy":
                    result["accuracy"].append({key: field for key, field in value.items() if key != "wrong"})
                else:
                    result[name] = value
    return result


def _outcome(status: int, result: Result, output: Path) -> tuple[str, str]:
    """Of a process that ended by itself. Takes "done" and "refused" out of the result."""
    refused, done = result.pop("refused", ""), result.pop("done", False)
    if refused:
        return REFUSED, str(refused)
    if status == 0 and done:
        return DONE, ""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return FAILED, f"{how}: {lines[-1] if lines else 'no output'}"


def main(words: list[str]) -> int:
    """0 when the news are complete, refusals included."""
    order = msgspec.json.decode(Path(words[0]).read_bytes(), type=CellOrder)
    with Path(words[1]).open("a", encoding="utf-8") as file:

        def report(news: Result) -> None:
            file.write(json.dumps(news) + "\n")
            file.flush()

        try:
            measure(order, report)
        except ThalwegError as error:
            report({"refused": str(error)})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
