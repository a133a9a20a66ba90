"""Prefill and mixed steps: launched eagerly, and from pieces of CUDA graphs.

    python benchmarks/gpu/steps.py --model FOLDER [--rows 0 1 32 128] [--tokens 16 ... 4096] [--out steps.json]

For each number of decoding rows, with 1,024 tokens behind them, and of prompt tokens beside them: milliseconds until
Python has launched the step, and until the device has computed it. Dummy weights, in process, A alone (`prepare`,
forward, logits).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch

from thalweg.bench.results import provenance
from thalweg.config.tree import options_of
from thalweg.core.plan import StepPlan
from thalweg.engine.calibration import Calibrator
from thalweg.engine.local import LocalEngine
from thalweg.launch.graphs import MAX_PIECEWISE_TOKENS, token_buckets
from thalweg.launch.resolve import resolve
from thalweg.runner.piecewise import Piecewise
from thalweg.runner.runner import Runner

ROWS = (0, 1, 32, 128)
TOKENS = (16, 64, 128, 256, 384, 512, 768, 1000, 1024, 1536, 2048, 4096)
RUNS = 5


def timed(runner: Runner, plan: StepPlan) -> dict[str, float]:
    """Milliseconds, medians."""
    launched, done = [], []
    for _ in range(RUNS + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        runner.forward(plan)
        launched.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        done.append(time.perf_counter() - begin)
    return {"launched_ms": round(1e3 * median(launched[2:]), 3), "done_ms": round(1e3 * median(done[2:]), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", default="steps.json")
    said = parser.parse_args()
    config = options_of(
        model=said.model,
        load_format="dummy",
        context_length=4096,
        max_running_requests=max(said.rows) + 8,
        piecewise_cuda_graph_tokens=token_buckets(MAX_PIECEWISE_TOKENS),
    )
    engine = LocalEngine(resolve(config).engine)
    runner, steps = engine.runner, engine.runner.forward_model
    assert isinstance(steps, Piecewise)
    calibrator = Calibrator(engine.config, runner)
    results = []
    for rows in said.rows:
        for tokens in said.tokens:
            plan, found = calibrator.mixed_plan(rows, tokens), {}
            runner.forward(calibrator.bound(plan, plan.rows, plan.max_kv_len))
            for name, one in (("eager", steps.model), ("pieces", steps)):
                runner.forward_model = one
                found[name] = timed(runner, plan)
            results.append({"rows": rows, "prompt_tokens": tokens, **found})
            print(json.dumps(results[-1]), flush=True)
    told = {"model": Path(said.model).name, "results": results, **provenance("steps.py", sys.argv[1:], {})}
    Path(said.out).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
