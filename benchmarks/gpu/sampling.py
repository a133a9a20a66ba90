"""Sampling on one GPU: times of every kind of draw, edit and log-probability: `python benchmarks/gpu/sampling.py [s]`.

1 to 256 rows of 129,280 logits; writes $OUT/sampling.json (OUT: the current folder if unset). Times in µs: CUDA-graph
replays, each call on other logits, together beyond L2 (66 MB at one row). of_floor: the logits read once, at the rate
that a sum of the same tensor reaches in the same run. eager_us: calls from Python without a graph, one after the other,
host time included. What comes last is left out when time is short (100 seconds unless told).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable

import torch
import triton
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import Bind, SamplingNeeds
from thalweg.core.sampling import SamplingParams
from thalweg.kernels.logprobs import triton as logprobing
from thalweg.kernels.penalties import triton as penalties
from thalweg.kernels.sample import triton as sample
from thalweg.kernels.topk_topp import triton as topk_topp
from thalweg.kernels.topk_topp_threshold import triton as threshold
from thalweg.sampling.kernel_sampling import KernelSampler, sample_into
from thalweg.sampling.sample import REFERENCE

VOCAB, KNOWN, ROWS = 129280, 1024, (1, 256, 64, 16)
DRAWS = SamplingNeeds(random=True, truncated=True)
MIX: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.8}, {"top_p": 0.95}, {"min_p": 0.05}]
# name, scale of normal logits, parameters of the rows in turn
KINDS: list[tuple[str, float, list[dict[str, Any]]]] = [
    ("top-k 50", 1.0, [{"top_k": 50}]),
    ("top-k 50, top-p 0.9", 1.0, [{"top_k": 50, "top_p": 0.9}]),
    ("top-p 0.9", 1.0, [{"top_p": 0.9}]),
    ("top-p 0.9, few likely ids", 4.0, [{"top_p": 0.9}]),
    ("min-p 0.05", 4.0, [{"min_p": 0.05}]),
    ("top-k 1000", 1.0, [{"top_k": 1000}]),
    ("top-k 5000", 1.0, [{"top_k": 5000}]),
    ("all kinds mixed", 4.0, MIX),
    ("top-k 5000, top-p 0.9 (walked)", 1.0, [{"top_k": 5000, "top_p": 0.9}]),
]


class Log:
    """Rows for the table and the file, and how much time is left."""

    def __init__(self, seconds: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.end = time.monotonic() + seconds

    def attempt(self, name: str, rows: int, run: Callable[..., dict[str, Any]], *given: Any) -> None:
        """A crash of one case must not hide the others."""
        if time.monotonic() > self.end:
            self.failed.append(f"{name}, {rows} rows: no time left")
            return
        try:
            row = {"case": name, "rows": rows} | run(*given)
        except Exception:  # noqa: BLE001 - whatever a kernel or its compiler throws is a result here
            self.failed.append(f"{name}, {rows} rows: {traceback.format_exc()}")
            print(f"{name}, {rows} rows FAILED: {traceback.format_exc()[-800:]}", flush=True)
            return
        self.rows.append(row)
        print(
            " ".join(f"{key} {value:.3g}" if isinstance(value, float) else str(value) for key, value in row.items()),
            flush=True,
        )


def replayed(calls: list[Callable[[], object]]) -> float:
    """µs a call, of a graph of them all."""
    calls[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    repeat = max(3, 60 // len(calls))
    graph.replay()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeat):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e3 / repeat / len(calls)


def eager(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(30):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / 30 * 1e6


class Bench:
    """Logits of so many rows, several times, and slots."""

    def __init__(self, rows: int) -> None:
        copies = max(2, min(128, -(-120_000_000 // (rows * VOCAB * 4))))
        self.rows, self.slot_E = rows, torch.arange(rows, device="cuda")
        generator = torch.Generator("cuda").manual_seed(rows)
        self.normal = [torch.randn(rows, VOCAB, generator=generator, device="cuda") for _ in range(copies)]
        self.tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.out = (self.tokens.clone(), *torch.zeros(2, rows, dtype=torch.bool, device="cuda"))
        self.read = replayed([lambda x=x: x.sum() for x in self.normal])  # type: ignore[misc]

    def slots(self, kinds: list[dict[str, Any]]) -> Slots:
        made = Slots(self.rows, 4096, torch.device("cuda"))
        known = tuple(range(0, 7 * KNOWN, 7))
        made.bind(
            [
                Bind(row, known, KNOWN // 2, KNOWN - 1, 4000, row, (7,), SamplingParams(**kinds[row % len(kinds)]))
                for row in range(self.rows)
            ]
        )
        return made

    def timed(self, scale: float, call: Callable[[Tensor], object]) -> dict[str, Any]:
        logits = [x.mul_(scale) for x in self.normal]
        took = replayed([lambda x=x: call(x) for x in logits])  # type: ignore[misc]
        row = {"us": took, "of_floor": self.read / took, "eager_us": eager(lambda: call(logits[0]))}
        for x in self.normal:
            x.div_(scale)
        return row

    def draw(self, scale: float, kinds: list[dict[str, Any]], needs: SamplingNeeds = DRAWS) -> dict[str, Any]:
        slots = self.slots(kinds)
        ints_EI = slots.ints_SI.clone()
        return self.timed(scale, lambda x: sample_into(self.out, x, slots, self.slot_E, ints_EI, needs, slots.ints_SI))

    def edit_logits(self, kinds: list[dict[str, Any]], needs: SamplingNeeds) -> dict[str, Any]:
        slots = self.slots(kinds)
        ints_EI = slots.ints_SI.clone()
        return self.timed(1.0, lambda x: KernelSampler().edit_logits(x, slots, self.slot_E, ints_EI, needs, 4096, None))

    def grammar(self) -> dict[str, Any]:
        bits = torch.randint(-(2**31), 2**31 - 1, (self.rows, VOCAB // 32), device="cuda").to(torch.int32)
        row = self.timed(1.0, lambda x: penalties.apply_grammar_mask(x, self.slot_E, bits))
        masks, slots, host = GrammarMasks(tuple(range(self.rows)), bits.cpu().numpy()), self.slots([{}]), self.normal[0]
        args = slots, self.slot_E, slots.ints_SI, SamplingNeeds(), 4096, masks
        row["eager_us"] = eager(lambda: KernelSampler().edit_logits(host, *args))
        for x in self.normal:
            x.normal_()
        return row

    def logprobs(self, top: int) -> dict[str, Any]:
        return self.timed(1.0, lambda x: logprobing.logprobs(x, self.tokens, top))

    def torch_sort(self) -> dict[str, Any]:
        return {"us": replayed([lambda x=x: torch.sort(x, dim=-1, descending=True) for x in self.normal[:3]])}  # type: ignore[misc]

    def torch_accept(self, needs: SamplingNeeds, kinds: list[dict[str, Any]]) -> dict[str, Any]:
        slots = self.slots(kinds)
        ints_EI = slots.ints_SI.clone()

        def call() -> None:
            REFERENCE.edit_logits(self.normal[0], slots, self.slot_E, ints_EI, needs, KNOWN + 1, None)
            REFERENCE.sample_into_slots(self.normal[0], slots, self.slot_E, ints_EI, needs)

        return {"eager_us": eager(call)}


def launches(bench: Bench, scale: float, kinds: list[dict[str, Any]]) -> dict[str, Any]:
    """µs of each kernel by the profiler, without overlap."""
    slots = bench.slots(kinds)
    ints_EI = slots.ints_SI.clone()
    x = bench.normal[0] * scale
    overlapping = topk_topp.launch_options
    for module in (topk_topp, threshold):
        module.launch_options = lambda tensor: {"PDL": False}
    try:
        sample_into(bench.out, x, slots, bench.slot_E, ints_EI, DRAWS, slots.ints_SI)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                sample_into(bench.out, x, slots, bench.slot_E, ints_EI, DRAWS, slots.ints_SI)
            torch.cuda.synchronize()
    finally:
        for module in (topk_topp, threshold):
            module.launch_options = overlapping
    return {
        event.key: event.device_time_total / event.count for event in profile.key_averages() if event.device_time_total
    }


PENALTIES: list[dict[str, Any]] = [{"repetition_penalty": 1.1, "frequency_penalty": 0.1}]
BIASES: list[dict[str, Any]] = [{"logit_bias": ((3, 1.0), (9, -1.0)), "min_tokens": 600}]


def measure(log: Log, rows: int) -> None:
    bench = Bench(rows)
    log.attempt("sum (read)", rows, lambda: {"us": bench.read, "GB/s": rows * VOCAB * 4e-3 / bench.read})
    log.attempt("greedy", rows, bench.draw, 1.0, [{"temperature": 0.0}], SamplingNeeds())
    log.attempt("temperature", rows, bench.draw, 1.0, [{}], SamplingNeeds(random=True))
    for name, scale, kinds in KINDS:
        log.attempt(name, rows, bench.draw, scale, kinds)
    log.attempt("torch sort", rows, bench.torch_sort)
    log.attempt("penalties, 1,024 tokens", rows, bench.edit_logits, PENALTIES, SamplingNeeds(penalised=True))
    log.attempt("biases and minimum length", rows, bench.edit_logits, BIASES, SamplingNeeds(biased=True))
    log.attempt("grammar", rows, bench.grammar)
    log.attempt("logprobs 0", rows, bench.logprobs, 0)
    log.attempt("logprobs 20", rows, bench.logprobs, 20)
    log.attempt("torch: top-k and top-p", rows, bench.torch_accept, DRAWS, [{"top_k": 50, "top_p": 0.9}])
    log.attempt("torch: penalties, greedy", rows, bench.torch_accept, SamplingNeeds(penalised=True), PENALTIES)
    if rows in (1, 64, 256):
        for name, scale, kinds in (KINDS[1], KINDS[2], KINDS[7]):
            log.attempt(f"launches of {name}", rows, launches, bench, scale, kinds)


def main() -> None:
    log = Log(float(sys.argv[1]) if len(sys.argv) > 1 else 100)
    with torch.inference_mode():
        for rows in ROWS:
            measure(log, rows)
            torch.cuda.empty_cache()
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vocabulary": VOCAB,
        "parts": [sample.PART.value, topk_topp.PART.value],
    }
    path = Path(os.environ.get("OUT", ".")) / "sampling.json"
    path.write_text(json.dumps({"about": about, "rows": log.rows, "failed": log.failed}, indent=1) + "\n")
    print(f"{len(log.rows)} cases, {len(log.failed)} failed or left out → {path.name}")


if __name__ == "__main__":
    main()
