"""Minutes of mixed lengths at saturation: the engine with the memory that it gives itself must never run out of it.

    python benchmarks/gpu/soak.py MODEL [--seconds 300] [--load-format dummy] [--result-filename FILE] [--flags of
    thalweg serve]

Requests of random lengths wait all the time; their sampling asks for everything that takes memory (truncation,
penalties, log-probabilities of outputs and prompts), and now and then one is as long as the context. Reported are the
least memory that was free beside the stated reserve, torch's peaks, how often its allocator had to give back and try
again, preemptions, and tokens. At the end all requests are aborted, and what is left of them is reported: pages, slots,
and what torch has allocated beyond the start. Ends with 1 where memory ran out, even if the allocator found some at the
second try, or anything is left.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from thalweg.bench.datasets import vocabulary_of
from thalweg.bench.in_process import configuration, start
from thalweg.bench.results import provenance, write
from thalweg.config.args import options_parser, parse_options
from thalweg.core.sampling import SamplingParams
from thalweg.engine.calibration_memory import RESERVE
from thalweg.engine.local import LocalEngine

QUEUE = 64  # requests that wait beside those that run
# that may be allocated at the end beyond the start: workspaces of libraries that a request was the first to need
BYTES = 64 << 20
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logprobs": 20},
    {"temperature": 1.0, "logit_bias": ((7, 2.0),), "min_tokens": 16},
    {"temperature": 0.0, "prompt_logprobs": 5},
]


def request(rng: random.Random, draw: Any, context: int) -> tuple[tuple[int, ...], SamplingParams]:
    """Lengths from a few tokens to the context: most short, as of a chat, some long, one in two hundred the whole
    context.
    """
    longest = context - 1 if rng.random() < 0.005 else min(context // 2, 16384)
    length = max(1, min(int(rng.lognormvariate(6.5, 1.3)) if longest < context - 1 else longest - 8, longest))
    output = max(1, min(int(rng.lognormvariate(5.0, 1.0)), 2048, context - length))
    kind = dict(rng.choice(SAMPLING))
    if "min_tokens" in kind:
        kind["min_tokens"] = min(kind["min_tokens"], output)
    if length > 4096:
        kind = {name: value for name, value in kind.items() if name != "prompt_logprobs"}
    return tuple(draw(rng, length)), SamplingParams(max_tokens=output, ignore_eos=True, **kind)


def soak(engine: LocalEngine, draw: Any, seconds: float, seed: int) -> dict[str, Any]:
    """Keeps the queue full for so long."""
    rng, scheduler = random.Random(seed), engine.loop.scheduler
    torch.cuda.reset_peak_memory_stats()
    device_free = least = torch.cuda.mem_get_info()[0]
    held, before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()
    submitted = ended = tokens = steps = 0
    uids: set[int] = set()
    begun, said = time.monotonic(), 0.0
    while (passed := time.monotonic() - begun) < seconds:
        while submitted - ended < engine.config.max_running_requests + QUEUE:
            prompt, params = request(rng, draw, engine.context)
            made = engine.submit(prompt, params)
            submitted += len(made)
            uids.update(made)
        for delta in engine.step():
            tokens += len(delta.tokens)
            if delta.finish:
                ended += 1
                uids.discard(delta.uid)
        steps += 1
        if steps % 16 == 0:
            least = min(least, torch.cuda.mem_get_info()[0])
        if passed - said > 15:
            said = passed
            print(
                f"{passed:.0f} s: {ended} ended, {tokens} tokens out, {least / 1e9:.2f} GB free at the least",
                flush=True,
            )
    elapsed, stats, memory = time.monotonic() - begun, scheduler.stats(0.0), torch.cuda.memory_stats()
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {
        "seconds": elapsed,
        "requests": ended,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": tokens,
        "output_tokens_a_second": tokens / elapsed,
        "steps": steps,
        "preemptions": stats.preemptions,
        "pages": engine.config.num_pages,
        "free_at_start": device_free,
        "free_at_least": least,
        "reserve": RESERVE,
        "peak_allocated": peaks[0],
        "peak_reserved": peaks[1],
        "allocator_retries": memory["num_alloc_retries"] - before["num_alloc_retries"],
        "out_of_memory": memory["num_ooms"] - before["num_ooms"],
        "arithmetic": engine.config.report.current()["max_total_tokens"].reason,
        "left": left(engine, uids, held),
    }


def left(engine: LocalEngine, uids: set[int], held: int) -> dict[str, int]:
    """What is left of all requests once these, the running and waiting ones, are aborted. held: bytes that were
    allocated before the first.
    """
    engine.abort(tuple(uids))
    while not engine.idle:
        engine.step()
    engine.flush_cache()
    engine.step()
    torch.cuda.synchronize()
    scheduler = engine.loop.scheduler
    return {
        "pages": scheduler.allocator.num_pages - len(scheduler.allocator.free_pages),
        "requests": len(scheduler.requests),
        "slots": len(scheduler.live),
        "bytes": torch.cuda.memory_allocated() - held,
    }


def main(argv: Sequence[str]) -> int:
    parser = options_parser("soak.py", "Mixed lengths at saturation.", only=("model", "load", "memory", "schedule"))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--soak-seed", type=int, default=1)
    parser.add_argument("--result-filename", type=Path)
    parsed = parse_options(parser, argv)
    resolved, engine = start(parsed.options)
    vocabulary = vocabulary_of(resolved.path)
    found = soak(engine, vocabulary.draw, parsed.args.seconds, parsed.args.soak_seed)
    for name, value in found.items():
        print(f"{name:>24}  {value}")
    remains = {name: count for name, count in found["left"].items() if count > (BYTES if name == "bytes" else 0)}
    failed = bool(remains or found["out_of_memory"] or found["allocator_retries"])
    print("FAILED" if failed else "ok", remains or "")
    if parsed.args.result_filename is not None:
        about = provenance("", [], configuration(resolved))
        about["command"] = f"python benchmarks/gpu/soak.py {Path(resolved.path).name} --seconds {parsed.args.seconds:g}"
        write(parsed.args.result_filename, found | about)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
