"""The resolver's mind: the user's wishes, the model's facts and the machine become the settings of an engine, or an error. The only place that
may say no: nothing that the user set is changed, and whatever was left to the resolver is decided here, with its reason."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Callable, TypeVar

from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.config.options import Config
from thalweg.core.errors import CannotServe
from thalweg.core.fit import choose
from thalweg.core.kernels import KernelChoice
from thalweg.core.plan import PAGE
from thalweg.launch.backends import ATTENTION, attention_need
from thalweg.launch.resolved import ASKED, AUTO, MODEL, Decision, Sizes, Value

GPU_RESERVE = 2 << 30  # bytes of a GPU for its context, libraries, graphs and what fragments
MOST_RECORDED = 256  # rows; larger steps wait for the device longer than for Python
TYPICAL = 2048  # tokens that a request keeps on average; unless asked, the cache holds no more than this for each slot

V = TypeVar("V", bound=Value)


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination that cannot be: `why` it cannot, and what to ask for `instead`. The aim is an empty table."""

    when: Callable[[Config], bool]
    why: str
    instead: str


RULES = (
    Rule(lambda c: c.parallel.tp_size > 1, "tp_size: this version runs a model on one device", "use --tp-size 1"),
    Rule(lambda c: c.parallel.dp_size > 1, "dp_size: this version runs a model on one device", "use --dp-size 1"),
    Rule(lambda c: c.parallel.pp_size > 1, "pp_size: this version runs a model on one device", "use --pp-size 1"),
    Rule(lambda c: c.parallel.ep_size > 1, "ep_size: this version runs a model on one device", "use --ep-size 1"),
)


@dataclass(frozen=True, slots=True)
class Site:
    """What differs between kinds of device. free: bytes of its memory. fraction: of them, for weights and KV. useful: whether the cache
    holds no more than the running requests can fill. float32: whether that type is considered. slots, budget, overlap: the defaults, the
    latter two with their reasons."""

    free: int
    fraction: float
    fraction_why: str
    useful: bool
    float32: bool
    slots: int
    slots_why: str
    budget: int
    budget_why: str
    overlap: bool
    overlap_why: str


def cpu(machine: Machine) -> Site:
    """This machine's processor."""
    return Site(
        free=machine.free,
        fraction=0.8,
        fraction_why="leaves a fifth for activations and others",
        useful=True,
        float32=True,
        slots=64,
        slots_why="enough to keep a CPU busy",
        budget=512,
        budget_why="on a CPU longer steps would hold up running requests",
        overlap=False,
        overlap_why="on a CPU planning would take a core from the model",
    )


def gpu(machine: Machine) -> Site:
    """The first GPU."""
    return Site(
        free=machine.gpu_free - GPU_RESERVE,
        fraction=0.92,
        fraction_why="leaves a twelfth for activations, beside the reserve",
        useful=False,
        float32=False,
        slots=256,
        slots_why="beyond, a GPU gains little and each request waits longer",
        budget=8192,
        budget_why="enough for matrix products to run at full rate",
        overlap=True,
        overlap_why="the device never waits for the plan",
    )


@dataclass(frozen=True, slots=True)
class Decided:
    """The numbers of an engine: see `engine.settings.EngineSettings`, which has the same names."""

    device: str
    kernels: KernelChoice
    graphs: tuple[int, ...]
    dtype: str
    threads: int
    depth: int
    slots: int
    budget: int
    context: int
    pages: int
    seed: int
    sizes: Sizes


class Ledger:
    """Collects decisions. `take` returns the wish where there is one, else what was chosen for the reason given."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def note(self, name: str, value: Value, source: str, reason: str) -> None:
        self.decisions.append(Decision(name, value, source, reason))

    def take(self, name: str, wish: V | None, auto: V, reason: str) -> V:
        self.note(name, auto if wish is None else wish, AUTO if wish is None else ASKED, reason if wish is None else "")
        return auto if wish is None else wish


def decide(
    config: Config, facts: ModelFacts, machine: Machine, sizes_in: Callable[[str, KernelChoice, str], Sizes], ledger: Ledger
) -> Decided:
    """Decides, and notes each decision in the ledger. `sizes_in(device, kernels, dtype)` measures the model as it would be loaded.
    Raises CannotServe."""
    for rule in RULES:
        if rule.when(config):
            raise CannotServe(f"{rule.why}; {rule.instead}")
    note, take, schedule = ledger.note, ledger.take, config.schedule
    device = _device(config, machine, ledger)
    site = gpu(machine) if device == "cuda" else cpu(machine)
    threads = take(
        "threads", config.load.threads, max(1, machine.cores - 1), "cores - 1: one stays free for the server"
    )
    backend = choose(
        "attention_backend", attention_need(facts, device), ATTENTION, config.load.attention_backend or "auto"
    )
    note(backend.role, backend.name, backend.source, backend.reason)
    kernels = KernelChoice(decode=backend.name, prefill=backend.name)
    dtype, sizes = _dtype(config, site, lambda dtype: sizes_in(device, kernels, dtype), ledger)
    overlap = take("overlap_schedule", schedule.overlap_schedule, site.overlap, site.overlap_why)
    note("depth", 2 if overlap else 1, AUTO, "2 steps under way with overlap, else 1")
    slots = take("max_running_requests", schedule.max_running_requests, site.slots, site.slots_why)
    graphs = _graphs(config, device, backend.name, slots, ledger)
    pages, context = _memory(config, facts, site, sizes, dtype, slots, ledger)
    budget = _budget(config, site, slots, context, ledger)
    note("schedule_policy", schedule.schedule_policy, *_source(schedule.schedule_policy != "fcfs", "arrival order"))
    note(
        "radix_cache",
        config.memory.radix_cache,
        *_source(not config.memory.radix_cache, "prompts that begin alike are computed once"),
    )
    seed = config.sampling.random_seed
    drawn = secrets.randbits(62) if seed is None else seed
    note("random_seed", drawn, *_source(seed is not None, "drawn at start; give it to repeat a run"))
    depth = 2 if overlap else 1
    return Decided(device, kernels, graphs, dtype, threads, depth, slots, budget, context, pages, drawn, sizes)


def _device(config: Config, machine: Machine, ledger: Ledger) -> str:
    """The user's, else a GPU where there is one. Raises CannotServe for a GPU that is not there."""
    if config.load.device == "cuda" and not machine.gpus:
        raise CannotServe("device: cuda, but the driver shows no NVIDIA GPU; use --device cpu, or see `thalweg doctor`")
    if machine.gpus:
        return ledger.take("device", config.load.device, "cuda", machine.gpus[0])
    return ledger.take("device", config.load.device, "cpu", f"{machine.cpu}, {machine.cores} cores")


def _graphs(config: Config, device: str, attention: str, slots: int, ledger: Ledger) -> tuple[int, ...]:
    """Rows of the decode steps to record. Raises CannotServe."""
    wish = config.load
    if device == "cpu" or not wish.cuda_graph or attention == "reference":
        why = "a CPU has none" if device == "cpu" else "the reference attention reads lengths on the host"
        ledger.note("cuda_graph", False, *_source(not wish.cuda_graph, why))
        return ()
    most = min(wish.cuda_graph_max_bs or min(slots, MOST_RECORDED), slots)
    made = tuple(wish.cuda_graph_bs) or buckets(most)
    if any(rows < 1 or rows > slots for rows in made):
        raise CannotServe(f"cuda_graph_bs: {list(made)} must lie between 1 and --max-running-requests, {slots}")
    ledger.note(
        "cuda_graph", ",".join(map(str, made)), *_source(bool(wish.cuda_graph_bs), "rows of recorded decode steps")
    )
    return tuple(sorted(set(made)))


def buckets(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are made for: 1, 2, 4, then every eighth up to 256, then every thirty-second. Over 1 to 256 rows the
    mean of (bucket - rows) / bucket is 4.9 %."""
    steps = [1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(288, most + 1, 32)]
    return tuple(sorted({min(step, most) for step in steps} | {most}))


def _dtype(config: Config, site: Site, sizes_in: Callable[[str], Sizes], ledger: Ledger) -> tuple[str, Sizes]:
    """The type of weights and KV, and the model's sizes in it."""
    wish, kv = config.load.dtype, config.memory.kv_cache_dtype
    if not site.float32:
        dtype = ledger.take("dtype", wish, kv or "bfloat16", "what a GPU's matrix units compute with")
        plain = sizes_in(dtype)
    else:
        room = int(site.free * (config.memory.mem_fraction_static or site.fraction))
        plain = sizes_in(wish or "float32")
        fits = plain.weight_bytes <= room // 2
        reason = (
            f"float32 weights take {size(plain.weight_bytes)}, {'not ' if not fits else ''}within half of {size(room)}"
        )
        auto = kv or ("float32" if fits else "bfloat16")
        dtype = ledger.take("dtype", wish, auto, f"as --kv-cache-dtype, {kv}" if kv else reason)
    if kv is not None and kv != dtype:
        raise CannotServe(
            f"kv_cache_dtype: {kv} with --dtype {dtype}: this version keeps KV in the model's type; use --dtype {kv}"
        )
    ledger.note("kv_cache_dtype", dtype, *_source(kv is not None, "as dtype"))
    return dtype, plain if site.float32 is False or dtype == (wish or "float32") else sizes_in(dtype)


def _memory(
    config: Config, facts: ModelFacts, site: Site, sizes: Sizes, dtype: str, slots: int, ledger: Ledger
) -> tuple[int, int]:
    """Pages of the KV cache and the longest sequence, from the free memory: (pages, context)."""
    wish = config.memory
    fraction = ledger.take("mem_fraction_static", wish.mem_fraction_static, site.fraction, site.fraction_why)
    room = int(site.free * fraction)
    page = sizes.kv_bytes * PAGE
    most = (room - sizes.weight_bytes) // page
    sums = f"({size(site.free)} free x {fraction:g} - {size(sizes.weight_bytes)} weights) / {size(page)} a page"
    if most < 1:
        needed = (sizes.weight_bytes + page) / site.free if site.free else 1.0
        smaller = ", or --dtype bfloat16" if dtype == "float32" else ""
        instead = (
            f"--mem-fraction-static {needed + 0.005:.2f}" if needed < 0.985 else f"a machine with more memory{smaller}"
        )
        raise CannotServe(f"memory: {sums} leaves no page for the KV cache; use {instead}")
    limit = _context_limit(config, facts)
    if wish.max_total_tokens is not None:
        pages = wish.max_total_tokens // PAGE
        if pages > most:
            raise CannotServe(
                f"max_total_tokens: {wish.max_total_tokens} do not fit: {sums} = {most} pages; use at most {most * PAGE}"
            )
        ledger.note("pages", pages, ASKED, f"{wish.max_total_tokens} tokens / {PAGE} a page")
    else:
        useful = max(slots * -(-min(limit, TYPICAL) // PAGE), -(-limit // PAGE)) if site.useful else most
        pages = min(most, useful)
        enough = f"{useful} are enough for {slots} requests of {min(limit, TYPICAL)} tokens"
        ledger.note("pages", pages, AUTO, f"{sums} = {most}" + (f"; {enough}" if pages < most else ""))
    return pages, _context(config, facts, limit, pages, ledger)


def _context_limit(config: Config, facts: ModelFacts) -> int:
    """The longest sequence that is wanted: the user's, else the model's."""
    wish = config.model.context_length
    if wish is not None and wish > facts.context:
        raise CannotServe(f"context_length: {wish} is beyond the model's {facts.context}; use at most {facts.context}")
    return wish or facts.context


def _context(config: Config, facts: ModelFacts, limit: int, pages: int, ledger: Ledger) -> int:
    held = pages * PAGE
    if config.model.context_length is not None:
        if limit > held:
            raise CannotServe(
                f"context_length: {limit} is more than the KV cache holds, {pages} pages x {PAGE}; use at most {held}"
            )
        ledger.note("context_length", limit, ASKED, "")
    elif limit > held:
        ledger.note("context_length", held, AUTO, f"what the KV cache holds; the model could {facts.context}")
    else:
        ledger.note("context_length", limit, MODEL, "max_position_embeddings")
    return min(limit, held)


def _budget(config: Config, site: Site, slots: int, context: int, ledger: Ledger) -> int:
    """Tokens a step."""
    wish = config.schedule.chunked_prefill_size
    if wish == -1:
        ledger.note("chunked_prefill_size", slots * context, ASKED, "-1: room for every running prompt in one step")
        return slots * context
    return ledger.take("chunked_prefill_size", wish, site.budget, site.budget_why)


def _source(asked: bool, reason: str) -> tuple[str, str]:
    return (ASKED, "") if asked else (AUTO, reason)


def size(count: int) -> str:
    """Bytes in words, e.g. 16.3 GB."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
