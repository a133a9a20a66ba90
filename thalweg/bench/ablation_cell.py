"""One cell of an ablation, measured in a process of its own, `python -m thalweg.bench.ablation_cell FOLDER`, with a
time limit.

FOLDER has the order (`CellOrder`). The process writes the result there anew after each part, so that a cell that is
ended keeps what it has.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from thalweg.bench.ablation_engine import IN_PROCESS, CellEngine, cell_engine
from thalweg.bench.answering import EvalPrompt, PromptFormat
from thalweg.bench.datasets import OrdinaryTokens, vocabulary_of
from thalweg.bench.evaluation import EvalSettings, Evaluation, evaluate
from thalweg.bench.floor import share_of_floor
from thalweg.bench.in_process import Generation, exactly
from thalweg.bench.results import replace_file
from thalweg.config.machine import Machine
from thalweg.config.machines import hardware_of
from thalweg.core.errors import ThalwegError, UnsupportedConfig

WARM_UP_TOKENS = 4
DONE, REFUSED, FAILED, TIMED_OUT, INTERRUPTED = "done", "not runnable", "failed", "timed out", "interrupted"
ORDER, RESULT, OUTPUT = "order.json", "result.json", "output"  # files of a cell

Result = dict[str, Any]
NOTHING: Result = {"batches": [], "accuracy": []}


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
    client: str = IN_PROCESS
    query: str = ""  # asked alone, greedily
    expected: str = ""  # part of its answer


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


def single(engine: CellEngine, work: CellWorkload, vocabulary: OrdinaryTokens) -> dict[str, float]:
    """One request of the mean lengths, alone: seconds to its first token, and the rate of those after it."""
    alone, runs = msgspec.structs.replace(work, spread=0.0, shared_prefix=0), []
    engine.run(draw(alone, 1, vocabulary, "warm-up", WARM_UP_TOKENS))
    for turn in range(work.repeat):
        (request,) = draw(alone, 1, vocabulary, f"single {turn}")
        begin = engine.cpu_seconds()
        engine.run([request])
        cpu = engine.cpu_seconds() - begin
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


def batch(
    engine: CellEngine, work: CellWorkload, vocabulary: OrdinaryTokens, concurrency: int
) -> dict[str, float | None]:
    """A closed loop. throughput: (prompt + output tokens) / seconds of the run. decode_per_request: mean over the
    requests of output tokens / seconds from sending to the last token.
    """
    engine.run(draw(work, concurrency, vocabulary, "warm-up", WARM_UP_TOKENS))
    runs = []
    for turn in range(work.repeat):
        requests = draw(work, concurrency * work.waves, vocabulary, f"{concurrency} {turn}")
        engine.flush_cache()
        cpu, begin = engine.cpu_seconds(), time.perf_counter()
        engine.run(requests, concurrency)
        seconds, outputs = max(request.end for request in requests) - begin, sum(len(r.tokens) for r in requests)
        runs.append((seconds / outputs, seconds, engine.cpu_seconds() - cpu, outputs, requests))
    _, seconds, cpu, outputs, requests = min(runs, key=lambda run: run[0])
    inputs, busy = sum(len(request.prompt) for request in requests), sum(one.end - one.start for one in requests)
    run = len(requests), inputs, outputs, busy / seconds, seconds
    return {
        "concurrency": concurrency,
        "requests": len(requests),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "cached_tokens": sum(request.cached for request in requests),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "throughput": (inputs + outputs) / seconds,
        "share_of_floor": share_of_floor(engine.model, hardware_of(Machine.here()), *run),
        "decode_per_request": fmean(len(request.tokens) / (request.end - request.start) for request in requests),
    }


def ask(engine: CellEngine, texts: PromptFormat, order: CellOrder) -> dict[str, object]:
    """The answer to the query in the checkpoint's chat format, and whether it has the expected text. Raises
    InvalidRequest where the checkpoint has no chat format.
    """
    text = texts.encoder.encode([{"role": "user", "content": order.query}], None, thinking=False)
    prompt = EvalPrompt(tuple(texts.tokenizer.encode(text)), order.work.output_len)
    ((_, answer),) = engine.answerer().answer([prompt], "query")
    return {"query": order.query, "expected": order.expected, "answer": answer, "right": order.expected in answer}


def measure(order: CellOrder, engine: CellEngine, started: float, save: Callable[[Result], None]) -> None:
    """All of a cell; saves what there is after each part. started: seconds of the start. Raises ThalwegError."""
    work, vocabulary = order.work, vocabulary_of(engine.model.folder)
    work.check(engine.context)
    result = NOTHING | {"started": started, "ran": engine.ran(), "single": single(engine, work, vocabulary)}
    save(result)
    for concurrency in work.concurrency:
        result["batches"] = [*result["batches"], batch(engine, work, vocabulary, concurrency)]
        save(result)
    if order.query:
        result["query"] = ask(engine, PromptFormat(engine.model.folder), order)
    if accuracy := order.accuracy:
        run = Evaluation(PromptFormat(engine.model.folder), engine.answerer(), accuracy.items, accuracy.seed)
        for row in evaluate(run, accuracy):
            kept = {name: value for name, value in row.items() if name != "wrong"}
            result["accuracy"] = [*result["accuracy"], kept]
            save(result)
    save(result | {"ran": engine.ran(), "status": DONE, "reason": ""})


def run_cell(order: CellOrder, limit: float) -> Result:
    """Measures one cell in a process of its own: its status, the reason where it is not done, and what was measured.

    limit: seconds. Ctrl-C ends the cell, which is then INTERRUPTED.
    """
    begin, ended = time.perf_counter(), Result()
    with TemporaryDirectory(prefix="thalweg-ablate-") as name:
        folder = Path(name)
        (folder / ORDER).write_bytes(msgspec.json.encode(order))
        words = [sys.executable, "-m", "thalweg.bench.ablation_cell", name]
        with (folder / OUTPUT).open("wb") as output, _held_signals() as held:
            # a session of its own: Ctrl-C in the terminal does not reach it
            process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        try:
            if held:
                raise KeyboardInterrupt
            process.wait(limit)
        except subprocess.TimeoutExpired:
            ended = {"status": TIMED_OUT, "reason": f"not done within {limit:g} s"}
        except KeyboardInterrupt:
            ended = {"status": INTERRUPTED, "reason": ""}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        result = json.loads((folder / RESULT).read_bytes()) if (folder / RESULT).is_file() else NOTHING
        if not ended and "status" not in result:
            ended = {"status": FAILED, "reason": failure(process.returncode, folder / OUTPUT)}
    return {**result, **ended, "seconds": time.perf_counter() - begin}


@contextmanager
def _held_signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM: within a start they would leave a process that nobody ends."""
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield held
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def failure(status: int, output: Path) -> str:
    """The exit status of a dead process in words, and its last line."""
    lines = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"{how}: {lines[-1] if lines else 'no output'}"


def main(folder: Path) -> None:
    def save(result: Result) -> None:
        replace_file(folder / RESULT, json.dumps(result).encode())

    try:
        order, begin = msgspec.json.decode((folder / ORDER).read_bytes(), type=CellOrder), time.perf_counter()
        with cell_engine(order.client, order.settings) as engine:
            measure(order, engine, time.perf_counter() - begin, save)
    except ThalwegError as error:
        save(NOTHING | {"status": REFUSED, "reason": str(error)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
