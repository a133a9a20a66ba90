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
from thalweg.core.plan import PAGE
from thalweg.launch.backends import ATTENTION, attention_need
from thalweg.launch.resolved import ASKED, AUTO, MODEL, Decision, Sizes, Value

FRACTION = 0.8  # of the free memory, for weights and KV; the rest is for activations and everybody else
CPU_SLOTS = 64
CPU_BUDGET = 512
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
class Decided:
    """The numbers of an engine: see `engine.settings.EngineSettings`, which has the same names."""

    device: str
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
    config: Config, facts: ModelFacts, machine: Machine, sizes_in: Callable[[str], Sizes], ledger: Ledger
) -> Decided:
    """Decides, and notes each decision in the ledger. `sizes_in(dtype)` measures the model as it would be loaded. Raises CannotServe."""
    for rule in RULES:
        if rule.when(config):
            raise CannotServe(f"{rule.why}; {rule.instead}")
    note, take, schedule = ledger.note, ledger.take, config.schedule
    gpus = f"; not {machine.gpus[0]}: this version computes on the CPU" if machine.gpus else ""
    device = take("device", config.load.device, "cpu", f"{machine.cpu}, {machine.cores} cores{gpus}")
    threads = take(
        "threads", config.load.threads, max(1, machine.cores - 1), "cores - 1: one stays free for the server"
    )
    backend = choose(
        "attention_backend", attention_need(facts, device), ATTENTION, config.load.attention_backend or "auto"
    )
    note(backend.role, backend.name, backend.source, backend.reason)
    dtype, sizes = _dtype(config, machine, sizes_in, ledger)
    overlap = take(
        "overlap_schedule", schedule.overlap_schedule, False, "on a CPU planning would take a core from the model"
    )
    note("depth", 2 if overlap else 1, AUTO, "2 steps under way with overlap, else 1")
    slots = take("max_running_requests", schedule.max_running_requests, CPU_SLOTS, "enough to keep a CPU busy")
    pages, context = _memory(config, facts, machine, sizes, dtype, slots, ledger)
    budget = _budget(config, slots, context, ledger)
    note("schedule_policy", schedule.schedule_policy, *_source(schedule.schedule_policy != "fcfs", "arrival order"))
    note(
        "radix_cache",
        config.memory.radix_cache,
        *_source(not config.memory.radix_cache, "prompts that begin alike are computed once"),
    )
    seed = config.sampling.random_seed
    drawn = secrets.randbits(62) if seed is None else seed
    note("random_seed", drawn, *_source(seed is not None, "drawn at start; give it to repeat a run"))
    return Decided(device, dtype, threads, 2 if overlap else 1, slots, budget, context, pages, drawn, sizes)


def _dtype(config: Config, machine: Machine, sizes_in: Callable[[str], Sizes], ledger: Ledger) -> tuple[str, Sizes]:
    """The type of weights and KV, and the model's sizes in it."""
    wish, kv = config.load.dtype, config.memory.kv_cache_dtype
    room = int(machine.free * (config.memory.mem_fraction_static or FRACTION))
    plain = sizes_in(wish or "float32")
    fits = plain.weight_bytes <= room // 2
    reason = f"float32 weights take {size(plain.weight_bytes)}, {'not ' if not fits else ''}within half of {size(room)}"
    auto = kv or ("float32" if fits else "bfloat16")
    dtype = ledger.take("dtype", wish, auto, f"as --kv-cache-dtype, {kv}" if kv else reason)
    if kv is not None and kv != dtype:
        raise CannotServe(
            f"kv_cache_dtype: {kv} with --dtype {dtype}: this version keeps KV in the model's type; use --dtype {kv}"
        )
    ledger.note("kv_cache_dtype", dtype, *_source(kv is not None, "as dtype"))
    return dtype, plain if dtype == (wish or "float32") else sizes_in(dtype)


def _memory(
    config: Config, facts: ModelFacts, machine: Machine, sizes: Sizes, dtype: str, slots: int, ledger: Ledger
) -> tuple[int, int]:
    """Pages of the KV cache and the longest sequence, from the free memory: (pages, context)."""
    wish = config.memory
    fraction = ledger.take(
        "mem_fraction_static", wish.mem_fraction_static, FRACTION, "leaves a fifth for activations and others"
    )
    room = int(machine.free * fraction)
    page = sizes.kv_bytes * PAGE
    most = (room - sizes.weight_bytes) // page
    sums = f"({size(machine.free)} free x {fraction:g} - {size(sizes.weight_bytes)} weights) / {size(page)} a page"
    if most < 1:
        needed = (sizes.weight_bytes + page) / machine.free if machine.free else 1.0
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
        useful = max(slots * -(-min(limit, TYPICAL) // PAGE), -(-limit // PAGE))
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


def _budget(config: Config, slots: int, context: int, ledger: Ledger) -> int:
    """Tokens a step."""
    wish = config.schedule.chunked_prefill_size
    if wish == -1:
        ledger.note("chunked_prefill_size", slots * context, ASKED, "-1: room for every running prompt in one step")
        return slots * context
    return ledger.take("chunked_prefill_size", wish, CPU_BUDGET, "on a CPU longer steps would hold up running requests")


def _source(asked: bool, reason: str) -> tuple[str, str]:
    return (ASKED, "") if asked else (AUTO, reason)


def size(count: int) -> str:
    """Bytes in words, e.g. 16.3 GB."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
