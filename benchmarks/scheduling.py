"""Serves request traces in simulated time: the real scheduler, and a device whose steps take measured times.

    python benchmarks/scheduling.py --times benchmarks/simulation/step_times_h100_v2_lite.json --traces FOLDER \
        --result-filename benchmarks/simulation/h100_v2_lite.json

It compares the prompt shares that the scheduler chooses with fixed chunk sizes, at several loads. Load 1 is the rate at
which the largest chunk computes the trace when all its requests wait from the start. Goodput counts the requests a second
that keep every limit. The scheduler knows only as many step times as start-up measures, each up to 5 % off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from thalweg.bench.display import progress_bar
from thalweg.bench.results import provenance, write
from thalweg.bench.statistics import percentile
from thalweg.bench.traces import TraceLimits, trace_rows
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import RadixTree
from thalweg.core.plan import PAGE, Output, StepPlan
from thalweg.core.request import Request
from thalweg.core.sampling import SamplingParams
from thalweg.core.step_times import StepTimes
from thalweg.engine.calibration import DECODE_ROWS, MIXED_ROWS, PROMPT_TOKENS
from thalweg.scheduler.plan_builder import DecodeLoad, LatencyTargets, WholeBudget
from thalweg.scheduler.prompt_share import CostBasedShare, StepCost
from thalweg.scheduler.requests import Limits
from thalweg.scheduler.scheduler import Scheduler

CHUNKS = (512, 1024, 2048, 4096, 8192)
LOADS = (0.5, 0.8, 1.0, 1.2)
SLOTS, BUDGET, PAGES, CONTEXT = 256, 8192, 1 << 15, 1 << 17
HOST = 0.0002  # seconds from a commit to the launch of the next step
ERROR = 0.05  # of the times that the scheduler knows
BLOCK = 512  # tokens of a hash id of Mooncake's traces
MAX_INPUT, MAX_OUTPUT = 30000, 2000
TRACES = {  # file, requests, seconds of the recording that are used
    "azure-conv": ("azure2023_conv.dev.csv.gz", 1500, TraceLimits()),
    "azure-code": ("azure2023_code.dev.csv.gz", 1500, TraceLimits()),
    "mooncake-conv": ("mooncake_conversation.dev.jsonl.gz", 500, TraceLimits(jitter=3.0)),
    "servegen-r1": ("servegen_deepseek_r1.dev.tar.gz", 600, TraceLimits(begin=36000, end=39600)),
}


class Slo(NamedTuple):
    """Limits of a request, in seconds."""

    first_token: float
    for_prompt_token: float  # more for each prompt token
    between_tokens: float  # longest gap

    @property
    def targets(self) -> LatencyTargets:
        return LatencyTargets(self.first_token, self.between_tokens)


SLOS = {"throughput": Slo(1.0, 1e-4, 0.25), "latency": Slo(2.0, 1e-4, 0.1)}


class Arrival(NamedTuple):
    at: float
    prompt: tuple[int, ...]
    output: int


@dataclass(slots=True)
class Served:
    """Times of one request."""

    arrived: float
    prompt: int
    left: int  # tokens to generate
    times: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    def keeps(self, slo: Slo) -> bool:
        is_prompt = self.times[0] - self.arrived <= slo.first_token + slo.for_prompt_token * self.prompt
        return is_prompt and max(self.gaps, default=0.0) <= slo.between_tokens


class Simulation:
    """One engine with overlap: a step is planned when the one before the last is committed."""

    def __init__(self, device: StepCost, budget: int, share: Callable[[Simulation], Any]) -> None:
        self.now, self.device_free, self.device = 0.0, 0.0, device
        self.served: dict[int, Served] = {}
        limits, pages = Limits(SLOTS, budget, CONTEXT, vocab=1 << 30), PageAllocator(PAGES, RadixTree(PAGE))
        self.scheduler = Scheduler(
            limits, pages, prompt_share=share(self), grammars=NoGrammars(), clock=lambda: self.now
        )

    def run(self, arrivals: Sequence[Arrival]) -> list[Served]:
        """Serves all of them."""
        waiting, launched = list(reversed(arrivals)), list[tuple[StepPlan, float]]()
        while waiting or self.scheduler.requests:
            while waiting and waiting[-1].at <= self.now:
                self.submit(waiting.pop())
            plan = self.scheduler.plan(0)
            if plan.rows:
                self.device_free = max(self.device_free, self.now + HOST) + self.seconds(plan)
                self.scheduler.mark_launched()
                launched.append((plan, self.device_free))
            if len(launched) > 1 or launched and not plan.rows:
                self.commit(*launched.pop(0))
            elif not plan.rows:
                self.now = max(self.now, waiting[-1].at)
        return list(self.served.values())

    def submit(self, arrival: Arrival) -> None:
        uid, end = len(self.served), len(arrival.prompt) + arrival.output
        self.served[uid] = Served(self.now, len(arrival.prompt), arrival.output)
        self.scheduler.add(Request(uid, arrival.prompt, SamplingParams(max_tokens=arrival.output), end))

    def seconds(self, plan: StepPlan) -> float:
        prompts = [row for row in plan.rows if row.start < self.served[row.uid].prompt]
        decoding = [row for row in plan.rows if row.start >= self.served[row.uid].prompt]
        load = DecodeLoad(len(decoding), len(decoding), sum(row.start for row in decoding))
        tokens, pairs = sum(row.n for row in prompts), sum(row.n * row.start for row in prompts)
        return self.device.seconds(load, tokens, pairs)

    def commit(self, plan: StepPlan, at: float) -> None:
        self.now, outputs = max(self.now, at), list[Output]()
        for row in plan.rows:
            request, is_sampled = self.served[row.uid], row.samples and self.served[row.uid].left > 0
            request.left -= is_sampled
            outputs.append(Output((1,), done=not request.left) if is_sampled else Output())
        self.scheduler.commit(plan, outputs)
        for delta in self.scheduler.take_deltas():
            self.served[delta.uid].times.append(self.now)
        self.scheduler.take_events()


class NoGrammars:
    """Requests have no grammar."""

    def close(self, uid: int) -> None: ...


def known_times(times: StepTimes, rng: Random) -> StepTimes:
    """What start-up would measure, with errors."""

    def measured(seconds: float) -> float:
        return seconds * rng.uniform(1 - ERROR, 1 + ERROR)

    mixed = ((rows, [point for point in line if nearest(point[0], PROMPT_TOKENS)]) for rows, line in times.mixed)
    return StepTimes(
        tuple((rows, measured(seconds)) for rows, seconds in times.decode if rows in DECODE_ROWS),
        tuple((rows, tuple((n, measured(s)) for n, s in line)) for rows, line in mixed if rows in MIXED_ROWS),
        times.context,
        measured(times.context_seconds),
        measured(times.pair_seconds),
    )


def nearest(tokens: int, sizes: Iterable[int]) -> bool:
    """Whether so many tokens are about one of these sizes."""
    return any(abs(tokens - size) <= 0.05 * size for size in sizes)


def arrivals_of(path: Path, count: int, limits: TraceLimits, span: float | None) -> list[Arrival]:
    """The first requests of a trace, within `span` seconds; None: all at once."""
    rows, jitter = list(trace_rows(path, limits, 1))[:count], Random(3)
    first = rows[0].at
    whole = rows[-1].at - first
    scale = 0.0 if span is None else span / whole
    made = []
    for number, row in enumerate(rows):
        length = min(max(row.input_len, 1), MAX_INPUT)
        shared = [block * BLOCK + at for block in row.hashes for at in range(BLOCK)][:length]
        own = [(1 << 29) + number * MAX_INPUT + at for at in range(length - len(shared))]
        at = scale * (row.at - first + jitter.uniform(0.0, limits.jitter))
        made.append(Arrival(at, (*shared, *own), min(max(row.output_len, 1), MAX_OUTPUT)))
    return sorted(made, key=lambda arrival: arrival.at)


def summary(served: Sequence[Served]) -> dict[str, float]:
    """Rates in requests and tokens a second, times in ms."""
    seconds = max(request.times[-1] for request in served)
    first = [request.times[0] - request.arrived for request in served]
    gaps = [gap for request in served for gap in request.gaps]
    return {
        "output_tokens_per_second": round(sum(len(request.times) for request in served) / seconds, 1),
        "ttft_ms_p50": round(1e3 * percentile(first, 50), 1),
        "ttft_ms_p99": round(1e3 * percentile(first, 99), 1),
        "itl_ms_p50": round(1e3 * percentile(gaps, 50), 2),
        "itl_ms_p99": round(1e3 * percentile(gaps, 99), 2),
        **{
            f"goodput_{name}": round(sum(request.keeps(slo) for request in served) / seconds, 3)
            for name, slo in SLOS.items()
        },
    }


def policies(known: StepTimes) -> Mapping[str, tuple[int, Callable[[Simulation], Any]]]:
    """By name: the budget of a step and what shares it."""

    def by_cost(targets: LatencyTargets) -> Callable[[Simulation], Any]:
        return lambda simulation: CostBasedShare(StepCost(known), targets, lambda: simulation.now)

    fixed = {f"chunk {size}": (size, lambda simulation: WholeBudget()) for size in CHUNKS}
    aimed = {f"by cost, targets of {name}": (BUDGET, by_cost(slo.targets)) for name, slo in SLOS.items()}
    return {**fixed, "by cost": (BUDGET, by_cost(LatencyTargets())), **aimed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=TRACES, default=list(TRACES))
    parser.add_argument("--loads", nargs="*", type=float, default=LOADS)
    parser.add_argument("--result-filename", type=Path, required=True)
    args = parser.parse_args()
    times = msgspec.convert(json.loads(args.times.read_text())["times"], StepTimes)
    device, choices, rows = StepCost(times), policies(known_times(times, Random(1))), []
    with progress_bar("simulations", len(args.only) * (1 + len(args.loads) * len(choices))) as bar:
        for name in args.only:
            file, count, limits = TRACES[name]
            all_at_once = arrivals_of(args.traces / file, count, limits, None)
            span = max(r.times[-1] for r in Simulation(device, BUDGET, lambda _: WholeBudget()).run(all_at_once))
            bar.advance()
            for load in args.loads:
                arrivals = arrivals_of(args.traces / file, count, limits, span / load)
                for policy, (budget, share) in choices.items():
                    served = Simulation(device, budget, share).run(arrivals)
                    rows.append({"trace": name, "load": load, "policy": policy, **summary(served)})
                    bar.advance()
    about = provenance("benchmarks/scheduling.py", sys.argv[1:], {})
    write(args.result_filename, {"rows": rows, "shares_of_best_chunk": shares(rows), **about})


def shares(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Goodput of the chosen shares over that of the best fixed chunk, for each trace, load and limits."""
    found = []
    for trace, load in dict.fromkeys((row["trace"], row["load"]) for row in rows):
        cell = {row["policy"]: row for row in rows if (row["trace"], row["load"]) == (trace, load)}
        for slo in SLOS:
            goodput = {policy: row[f"goodput_{slo}"] for policy, row in cell.items()}
            best = max((policy for policy in goodput if policy.startswith("chunk")), key=lambda one: goodput[one])
            chosen = {
                p: round(goodput[p] / (goodput[best] or 1.0), 3) for p in ("by cost", f"by cost, targets of {slo}")
            }
            found.append(
                {"trace": trace, "load": load, "limits": slo, "best": best, "goodput": goodput[best], **chosen}
            )
            print(found[-1], file=sys.stderr)
    return found


if __name__ == "__main__":
    main()
