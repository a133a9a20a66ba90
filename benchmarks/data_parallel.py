"""Data-parallel ranks by simulation: how evenly requests are assigned, what agreeing costs, and where experts go.

    python -m benchmarks.data_parallel --traces FOLDER --times benchmarks/simulation/step_times_h100_v3_3_layers.json \
        --config config.json --result-filename benchmarks/simulation/data_parallel.json

Assignment: all requests of Mooncake's conversation trace at once; the work of a rank is the prompt tokens that its
prefix cache does not hold, and the output. Served: the same by real schedulers, one for each rank, that run agreed
steps on a simulated device; a step lasts as long as the slowest rank needs. `--loads 0.8` sends them at the trace's
times, scaled to that share of the rate at which the ranks serve them all at once. Agreement: `coordinate_step` on the
records of all ranks, and their exchange through shared memory. Experts: the placement of DeepSeek-V3's experts, whose
popularity is Zipf's with another order of experts in each layer. Plans: what `thalweg plan` says of nodes of eight
H200s. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from benchmarks.agreement import exchange_us
from benchmarks.scheduling import NoGrammars
from thalweg.bench.display import progress_bar
from thalweg.bench.results import provenance, write
from thalweg.bench.traces import BLOCK, TraceLimits, TraceRow, trace_rows
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import RadixTree
from thalweg.core.agreement import RankStep, coordinate_step, rank_step_of
from thalweg.core.messages import Submit, TokenDelta
from thalweg.core.plan import PAGE, Output, StepPlan
from thalweg.core.request import Request
from thalweg.core.sampling import SamplingParams
from thalweg.core.step_times import StepTimes
from thalweg.engine.routing import RequestRouter, page_keys
from thalweg.parallel.balancer import MOVES, aligned, next_moves
from thalweg.parallel.eplb import balance, utilization
from thalweg.parallel.shared_memory import WakePipe
from thalweg.parallel.step_records import StepExchange, StepRecords
from thalweg.scheduler.plan_builder import DecodeLoad
from thalweg.scheduler.prompt_share import StepCost
from thalweg.scheduler.requests import Limits
from thalweg.scheduler.scheduler import Scheduler

TRACE, JITTER = "mooncake_conversation.dev.jsonl.gz", 3.0
RANKS = (4, 16, 64)
SLOTS, BUDGET, PAGES, CONTEXT = 256, 8192, 1 << 14, 1 << 17  # of a rank
RECORDS, PROCESSES = (4, 8, 16, 32, 64), (2, 4)
LAYERS, EXPERTS = 58, 256  # DeepSeek-V3: layers with experts, experts of a layer
PLACEMENTS = ((0, 8), (0, 64), (32, 32), (64, 64))  # redundant slots, GPUs; slots are divided evenly
ZIPF = (0.3, 0.6, 1.0)
CHOICES = 8 * 20_000  # that are counted in each layer
NODES, REQUESTS_OF_A_GPU, BEST = (2, 8), 64, 2  # of the plans; layouts that are kept


class Router(Protocol):
    """What chooses the rank of a request."""

    def route(self, message: Submit) -> int: ...

    def follow(self, delta: TokenDelta) -> None: ...


class BlindRouter:
    """Chooses ranks without a look at the requests."""

    def __init__(self, next_rank: Callable[[], int]) -> None:
        self.next_rank = next_rank

    def route(self, message: Submit) -> int:
        return self.next_rank()

    def follow(self, delta: TokenDelta) -> None: ...


def in_turn(ranks: int) -> Router:
    count = iter(range(1 << 60))
    return BlindRouter(lambda: next(count) % ranks)


def at_random(ranks: int) -> Router:
    rng = Random(1)
    return BlindRouter(lambda: rng.randrange(ranks))


LEAST_WORK, LONGEST_FIRST = "least work", "least work, longest first"
POLICIES: dict[str, Callable[[int], Router]] = {
    LEAST_WORK: lambda ranks: RequestRouter(ranks, PAGES, PAGE),
    LONGEST_FIRST: lambda ranks: RequestRouter(ranks, PAGES, PAGE),
    "round robin": in_turn,
    "random": at_random,
}


class Served(NamedTuple):
    """What a run gives. Ratios are 1 where ranks are even."""

    seconds: float  # of simulated time
    computed: float  # largest over mean of the tokens that a rank computes in the whole run
    held: float  # largest over mean of the tokens that a rank's sequences hold, over the time that steps take
    waited: float  # time of all steps over that of the mean rank: 1.25 where ranks wait a fifth of the time
    padded: float  # tokens of the agreed steps over those that ranks have
    cached: float  # share of prompt tokens that were in a prefix cache
    ttft: float  # mean seconds from the arrival of a request to its first token
    e2e: float  # and to its last
    steps: int


class Fleet:
    """Ranks that run agreed steps together, each planned when the one before is committed."""

    def __init__(self, ranks: int, router: Router, device: StepCost) -> None:
        self.router, self.device, self.now, self.steps = router, device, 0.0, 0
        limits = Limits(SLOTS, BUDGET, CONTEXT, vocab=1 << 30)
        self.ranks = [
            Scheduler(limits, PageAllocator(PAGES, RadixTree(PAGE)), grammars=NoGrammars(), clock=lambda: self.now)
            for _ in range(ranks)
        ]
        self.may_prefill = True
        self.prompts, self.left = dict[int, int](), dict[int, int]()  # tokens of prompts and to generate, by uid
        self.sizes = dict[int, int]()  # tokens that each unfinished sequence has
        self.arrived = dict[int, float]()
        self.first, self.last = list[float](), list[float]()  # seconds from the arrival to these tokens
        self.computed = [0] * ranks
        self.held = [0] * ranks  # tokens of the sequences that a rank has, as far as they are there
        self.held_most = self.held_mean = self.busy = self.needed = 0.0
        self.padded = self.tokens = self.prompt_tokens = self.prompt_computed = 0

    def run(self, rows: Sequence[TraceRow]) -> Served:
        waiting = list(reversed(list(enumerate(rows))))
        while waiting or self.sizes:
            while waiting and waiting[-1][1].at <= self.now:
                self.submit(*waiting.pop())
            if self.sizes:
                self.step()
            else:
                self.now = max(self.now, waiting[-1][1].at)
        ratio = max(self.computed) / mean(self.computed)
        return Served(
            self.now, ratio, self.held_most / self.held_mean, self.busy / self.needed, self.padded / self.tokens,
            1 - self.prompt_computed / self.prompt_tokens, mean(self.first), mean(self.last), self.steps,
        )  # fmt: skip

    def submit(self, uid: int, row: TraceRow) -> None:
        prompt, params = prompt_of(uid, row), SamplingParams(max_tokens=row.output_len)
        rank = self.router.route(Submit(uid, prompt, params))
        self.left[uid], self.prompts[uid], self.sizes[uid] = row.output_len, len(prompt), len(prompt)
        self.prompt_tokens, self.arrived[uid] = self.prompt_tokens + len(prompt), row.at
        self.held[rank] += len(prompt)
        self.ranks[rank].add(Request(uid, prompt, params, len(prompt) + row.output_len))

    def step(self) -> None:
        plans = [rank.plan(0, self.may_prefill) for rank in self.ranks]
        records = [
            rank_step_of(plan)._replace(step=self.steps, prefill_wait=rank.prefill_wait)
            for plan, rank in zip(plans, self.ranks, strict=True)
        ]
        agreed = coordinate_step(records)
        self.may_prefill = agreed.may_prefill
        seconds = [self.seconds(plan) for plan in plans]
        self.now += max(seconds)
        self.busy, self.needed = self.busy + max(seconds), self.needed + mean(seconds)
        self.held_most += max(seconds) * max(self.held)
        self.held_mean += max(seconds) * mean(self.held)
        self.padded, self.tokens = self.padded + agreed.tokens, self.tokens + mean(one.tokens for one in records)
        self.steps += 1
        for number, plan in enumerate(plans):
            if plan.rows:
                self.commit(number, plan)

    def seconds(self, plan: StepPlan) -> float:
        prompts = [row for row in plan.rows if row.start < self.prompts[row.uid]]
        decoding = [row for row in plan.rows if row.start >= self.prompts[row.uid]]
        load = DecodeLoad(len(decoding), len(decoding), sum(row.start for row in decoding))
        tokens = sum(row.n for row in prompts)
        self.prompt_computed += tokens
        return self.device.seconds(load, tokens, sum(row.n * row.start for row in prompts)) if plan.rows else 0.0

    def commit(self, number: int, plan: StepPlan) -> None:
        scheduler, outputs = self.ranks[number], list[Output]()
        scheduler.mark_launched()
        for row in plan.rows:
            self.computed[number] += row.n
            self.left[row.uid] -= row.samples
            outputs.append(Output((1,), done=not self.left[row.uid]) if row.samples else Output())
        scheduler.commit(plan, outputs)
        for delta in scheduler.take_deltas():
            self.router.follow(delta)
            if self.sizes[delta.uid] == self.prompts[delta.uid]:
                self.first.append(self.now - self.arrived[delta.uid])
            self.held[number] += len(delta.tokens)
            self.sizes[delta.uid] += len(delta.tokens)
            if delta.finish:
                self.held[number] -= self.sizes.pop(delta.uid)
                self.last.append(self.now - self.arrived[delta.uid])
        scheduler.take_events()


def prompt_of(uid: int, row: TraceRow) -> tuple[int, ...]:
    """Equal for equal hash ids. Tokens are below 257, which Python holds once: a prompt takes 8 bytes a token."""
    pages = ((1, block, page) for block in row.hashes for page in range(BLOCK // PAGE))
    own = ((2, uid, page) for page in range(1 << 20))
    length, tokens = max(row.input_len, 1), list[int]()
    for kind, number, page in (*islice(pages, -(-length // PAGE)), *islice(own, -(-length // PAGE))):
        if len(tokens) >= length:
            break
        tokens += (kind, number % 250, number // 250 % 250, number // 62_500 % 250, page % 250, page // 250)
        tokens += (0,) * (PAGE - 6)
    return tuple(tokens[:length])


def rows_of(path: Path, count: int, seconds: float) -> list[TraceRow]:
    """The first requests of a trace, within so many seconds; 0: all at once."""
    rows, rng = list(islice(trace_rows(path, TraceLimits(), 1), count)), Random(3)
    at = [row.at + rng.uniform(0.0, JITTER) for row in rows]
    first, last = min(at), max(at)
    moved = (row._replace(at=(when - first) * seconds / (last - first)) for row, when in zip(rows, at, strict=True))
    return sorted(moved, key=lambda row: row.at)


def cached_tokens(cache: OrderedDict[int, None], prompt: tuple[int, ...]) -> int:
    """Tokens of a prompt that a prefix cache of PAGES pages has. It then has all of them, and drops the oldest pages."""
    keys = page_keys(prompt, 0, PAGE)
    hits = next((i for i, key in enumerate(keys) if key not in cache), len(keys))
    for key in keys:
        cache[key] = None
        cache.move_to_end(key)
    while len(cache) > PAGES:
        cache.popitem(last=False)
    return PAGE * hits


def in_order(rows: Sequence[TraceRow], policy: str) -> list[TraceRow]:
    """Rows of one time, as a policy gets them."""
    return sorted(rows, key=lambda row: -row.input_len) if policy == LONGEST_FIRST else list(rows)


def assignments(rows: Sequence[TraceRow]) -> list[dict[str, Any]]:
    """Largest over mean work of the ranks, all requests at once."""
    found = []
    for ranks in RANKS:
        for policy, make in POLICIES.items():
            router, work, caches = make(ranks), [0] * ranks, [OrderedDict[int, None]() for _ in range(ranks)]
            for uid, row in enumerate(in_order(rows, policy)):
                message = Submit(uid, prompt_of(uid, row), SamplingParams(max_tokens=row.output_len))
                rank = router.route(message)
                work[rank] += len(message.prompt) - cached_tokens(caches[rank], message.prompt) + row.output_len
            found.append({"ranks": ranks, "policy": policy, "work": round(max(work) / mean(work), 3)})
            print(found[-1], file=sys.stderr)
    return found


def simulations(
    rows_for: Callable[[float], list[TraceRow]], counts: Sequence[int], loads: Sequence[float], device: StepCost,
    advance: Callable[[], None],
) -> list[dict[str, Any]]:  # fmt: skip
    found = []
    for ranks in counts:
        at_once = 0.0
        for load in loads:
            rows = rows_for(at_once / load if load else 0.0)
            for policy, router in POLICIES.items():
                if load and policy == LONGEST_FIRST:  # for requests of one time
                    continue
                run = Fleet(ranks, router(ranks), device).run(rows if load else in_order(rows, policy))
                at_once = at_once or run.seconds
                figures = {name: round(value, 3) for name, value in run._asdict().items()}
                found.append({"ranks": ranks, "load": load, "policy": policy, **figures})
                print(found[-1], file=sys.stderr)
                advance()
    return found


def us_of(call: Callable[[], object], rounds: int = 2000) -> float:
    """Median microseconds of a call."""
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return round(1e6 * median(seconds), 2)


def agreement(rounds: int) -> dict[str, Any]:
    """In one process: `coordinate_step`, and a rank's part of an exchange, to write its record and to read those of
    all, which are there. Between processes: all of a round, with the wait for the others.
    """
    alone = []
    for ranks in RECORDS:
        records = [RankStep(7, rows=16 + i % 5, tokens=16 + i % 5, sampled_rows=16) for i in range(ranks)]
        shared = StepRecords([WakePipe() for _ in records], [f"rank {i}" for i in range(ranks)], timeout=1.0)
        for number, record in enumerate(records[1:], 1):
            StepExchange(shared, number).publish(record)

        def exchange(shared: StepRecords = shared, own: RankStep = records[0]) -> None:
            StepExchange(shared, 0).exchange(own)

        exchanged, agreed = us_of(exchange), us_of(lambda records=records: coordinate_step(records))
        alone.append({"ranks": ranks, "exchange_us": exchanged, "coordinate_us": agreed})
    processes = []
    for ranks in PROCESSES:
        median_us, p99_us = exchange_us(ranks, rounds)
        processes.append({"ranks": ranks, "median_us": median_us, "p99_us": p99_us})
    return {"alone": alone, "processes": processes, "load_average": os.getloadavg()}


@cache
def loads_of(exponent: float, seed: int) -> tuple[Tensor, Tensor]:
    """int64 [L, E], twice: tokens of each expert, drawn from the same popularity."""
    rng = torch.Generator().manual_seed(seed)
    popularity_E = torch.arange(1, EXPERTS + 1, dtype=torch.float64) ** -exponent
    popularity_LE = torch.stack([popularity_E[torch.randperm(EXPERTS, generator=rng)] for _ in range(LAYERS)])
    first, second = (
        torch.stack([torch.bincount(chosen, minlength=EXPERTS) for chosen in drawn])
        for drawn in (torch.multinomial(popularity_LE, CHOICES, True, generator=rng) for _ in range(2))
    )
    return first, second


def evenness(load_LE: Tensor, by_slot: Iterable[Sequence[int]], gpus: int) -> float:
    """Mean load of the GPUs over the largest, of the mean layer."""
    layers = zip(load_LE.tolist(), by_slot, strict=True)
    return round(mean(utilization(load_E, slots, gpus) for load_E, slots in layers), 3)


def placements() -> list[dict[str, Any]]:
    found = []
    for redundant, gpus in PLACEMENTS:
        slots = EXPERTS + redundant
        in_order = [slot % EXPERTS for slot in range(slots)]
        for exponent in ZIPF:
            counted, later = loads_of(exponent, seed=1)
            begun = time.perf_counter()
            new = balance(counted, slots, 1, 1, gpus).expert_LS.tolist()
            seconds = time.perf_counter() - begun
            begun = time.perf_counter()  # as `ExpertBalancer` does for one layer before a step
            target = aligned(in_order, balance(counted[:1], slots, 1, 1, gpus).expert_LS[0].tolist(), gpus)
            next_moves(in_order, target, MOVES * gpus)
            layer_seconds = time.perf_counter() - begun
            found.append(
                {
                    "gpus": gpus,
                    "redundant": redundant,
                    "zipf": exponent,
                    "before": evenness(counted, [in_order] * LAYERS, gpus),
                    "after": evenness(counted, new, gpus),
                    "after_on_later_tokens": evenness(later, new, gpus),
                    "all_layers_ms": round(1e3 * seconds, 1),
                    "one_layer_ms": round(1e3 * layer_seconds, 2),
                }
            )
            print(found[-1], file=sys.stderr)
    return found


def plans(config: Path) -> list[dict[str, Any]]:
    """The best layouts of `thalweg plan` for nodes of eight H200s, and the next best that span nodes."""
    found = []
    for nodes in NODES:
        words = ["plan", str(config), "--machine", "h200x8", "--nnodes", str(nodes), "--input-len", "4096"]
        words += ["--output-len", "1024", "--concurrency", str(REQUESTS_OF_A_GPU * 8 * nodes), "--json"]
        made = json.loads(
            subprocess.run([sys.executable, "-m", "thalweg", *words], check=True, capture_output=True).stdout
        )
        fitting = [layout for layout in made["layouts"] if layout["requests"]]
        names = ("name", "requests", "tpot", "ttft", "output_throughput", "sending", "trouble")
        spanning = [layout for layout in fitting[BEST:] if layout["tp"] * layout["pp"] > 8]
        for layout in [*fitting[:BEST], *spanning[:BEST]]:
            kv_tokens = layout["kv_tokens_per_cache"] * layout["caches"]
            found.append({"gpus": 8 * nodes, **{name: layout[name] for name in names}, "kv_tokens": kv_tokens})
            print(found[-1], file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of " + TRACE)
    parser.add_argument("--times", type=Path, required=True, help="step times of benchmarks/gpu/step_times.py")
    parser.add_argument("--config", type=Path, required=True, help="config.json of DeepSeek-V3")
    parser.add_argument("--requests", type=int, default=6000, help="of the trace, at most")
    parser.add_argument("--served-by", nargs="*", type=int, default=RANKS, help="numbers of simulated ranks")
    parser.add_argument("--loads", nargs="*", type=float, default=(0.0,), help="0: all at once, which comes first")
    parser.add_argument("--rounds", type=int, default=20_000, help="of an exchange between processes")
    parser.add_argument("--result-filename", type=Path, required=True)
    args = parser.parse_args()
    times = msgspec.convert(json.loads(args.times.read_text())["times"], StepTimes)
    result: dict[str, Any] = {"plans": plans(args.config), "experts": placements(), "agreement": agreement(args.rounds)}

    def rows_for(seconds: float) -> list[TraceRow]:
        return rows_of(args.traces / TRACE, args.requests, seconds)

    result["assignment"] = assignments(rows_for(0.0))
    with progress_bar("simulations", len(args.served_by) * len(args.loads) * len(POLICIES)) as bar:
        result["served"] = simulations(rows_for, args.served_by, args.loads, StepCost(times), bar.advance)
    hidden = {str(args.traces): "FOLDER", str(args.config): "config.json"}
    words = [hidden.get(word, word) for word in sys.argv[1:]]
    about = provenance("benchmarks/data_parallel.py", words, {})
    command = shlex.join(["python", "-m", "benchmarks.data_parallel", *words])
    write(args.result_filename, {**result, **about, "command": command})


if __name__ == "__main__":
    main()
