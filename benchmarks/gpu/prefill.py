"""Prefill on one GPU, by kernel: `python benchmarks/gpu/prefill.py FOLDER [flags of thalweg serve]`.

8,192 tokens as one prompt and as 8 of 1,024, random weights, through the engine's own loop: the best of three steps
against the floor of `thalweg.launch.planning.roofline` with the ceilings of the same run, then where one step's time
goes, from torch's profiler. Writes $OUT/prefill_FOLDER.json (OUT: the current folder if unset).
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from thalweg.bench import ceilings
from thalweg.bench.in_process import Tokens, random_batch, start, time_batch
from thalweg.config.args import options_parser, parse_options
from thalweg.config.tree import replace
from thalweg.engine.local import LocalEngine
from thalweg.launch.planning import roofline
from thalweg.launch.planning.layouts import ONE
from thalweg.launch.planning.weights import PlannedModel
from thalweg.models.catalog import read_facts

CASES = ((1, 8192), (8, 1024), (1, 1024))
SHOWN = 22


def kernels(engine: LocalEngine, prompts: list[Tokens]) -> tuple[dict[str, list[float]], list[tuple[float, str]]]:
    """Of one prefill: name → launches and µs; and how long the device did nothing, with the kernel that it waited for,
    the longest first.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        time_batch(engine, prompts, 1)
        torch.cuda.synchronize()
    events = sorted(
        (one for one in seen.events() if one.device_type == DeviceType.CUDA), key=lambda one: one.time_range.start
    )
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    gaps, last = [], events[0].time_range.start if events else 0.0
    for one in events:
        gaps.append((max(0.0, one.time_range.start - last), one.name[:60]))
        last = max(last, one.time_range.end)
        found[one.name[:90]][0] += 1
        found[one.name[:90]][1] += one.time_range.end - one.time_range.start
    return dict(sorted(found.items(), key=lambda item: -item[1][1])), sorted(gaps, reverse=True)


def main() -> None:
    parsed = parse_options(
        options_parser("prefill", "Times prefill.", only=("model", "load", "memory", "schedule")), sys.argv[1:]
    )
    config = replace(
        parsed.options,
        load_format="dummy",
        max_running_requests=8,
        chunked_prefill_size=8192,
        context_length=8256,
        max_total_tokens=40960,
        radix_cache=False,
    )
    top = ceilings.measure()
    resolved, engine = start(config)
    facts, rng, rows = read_facts(resolved.path), Random(1), []
    print({key: f"{value:.4g}" for key, value in vars_of(top).items()}, torch.cuda.get_device_name(), flush=True)
    for batch, length in CASES:
        phases = roofline.phases(PlannedModel(facts).on(ONE), roofline.StepShape(batch, length, length))
        times = [time_batch(engine, random_batch(resolved, batch, length, rng), 1).prefill for _ in range(5)][2:]
        floor, took = roofline.seconds(phases, top), min(times)
        by, gaps = kernels(engine, random_batch(resolved, batch, length, rng))
        idle = sum(gap for gap, _ in gaps)
        row: dict[str, Any] = {
            "rows": batch, "tokens": length, "ms": took * 1e3, "floor_ms": floor * 1e3, "share": floor / took,
            "floor_by_phase_ms": {name: each * 1e3 for name, each in roofline.by_name(phases, top).items()},
            "idle_ms": idle / 1e3, "gaps": gaps[:8], "kernels": by, "all_ms": [each * 1e3 for each in times],
        }  # fmt: skip
        rows.append(row)
        print(f"## {resolved.path.name} {batch} x {length}: {took * 1e3:.2f} ms, floor {floor * 1e3:.2f}, share {floor / took:.3f}, "
              f"idle {idle / 1e3:.2f} ms, floor by phase {row['floor_by_phase_ms']}")  # fmt: skip
        print("   waited: " + ", ".join(f"{gap:.0f} us for {name}" for gap, name in gaps[:5]))
        for name, (count, us) in list(by.items())[:SHOWN]:
            print(f"   {us / 1e3:8.3f} ms {int(count):5d} x {us / count:8.1f} us  {name}", flush=True)
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": vars_of(top),
        "flags": sys.argv[1:],
        "rows": rows,
    }
    Path(os.environ.get("OUT", "."), f"prefill_{resolved.path.name}.json").write_text(json.dumps(record, indent=1))


def vars_of(top: roofline.Ceilings) -> dict[str, float]:
    return {"read": top.read, "bf16": top.bf16, "fp8": top.fp8}


if __name__ == "__main__":
    with torch.inference_mode():
        main()
