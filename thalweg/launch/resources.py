"""The resolver's mind: the user's wishes, the model's facts and the machine become the settings of an engine, or an
error. The only place that may say no: nothing that the user set is changed, and whatever was left to the resolver is
decided here, with its reason.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Callable

from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.config.options import Options
from thalweg.core.errors import InsufficientMemory, UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE
from thalweg.core.report import AUTO, MODEL, USER
from thalweg.launch.decisions import Decisions, source_and_reason
from thalweg.launch.graphs import GraphPlan, resolve_graphs
from thalweg.launch.kernels import resolve_kernels
from thalweg.launch.resolved import Sizes

TYPICAL = 2048  # tokens that a request keeps on average; unless asked, the cache holds no more than this for each slot


@dataclass(frozen=True, slots=True)
class ResolverRule:
    """A combination that cannot be: `why` it cannot, and what to ask for `instead`. The aim is an empty table."""

    when: Callable[[Options], bool]
    why: str
    instead: str


RULES = (
    ResolverRule(
        lambda c: c.parallel.tp_size > 1, "tp_size: this version runs a model on one device", "use --tp-size 1"
    ),
    ResolverRule(
        lambda c: c.parallel.dp_size > 1, "dp_size: this version runs a model on one device", "use --dp-size 1"
    ),
    ResolverRule(
        lambda c: c.parallel.pp_size > 1, "pp_size: this version runs a model on one device", "use --pp-size 1"
    ),
    ResolverRule(
        lambda c: c.parallel.ep_size > 1, "ep_size: this version runs a model on one device", "use --ep-size 1"
    ),
)


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What differs between kinds of device. free: bytes of its memory. fraction: of them, for weights and KV; measures:
    where nothing was asked for, the engine measures what there is room for, and the fraction is an estimate. useful:
    whether the cache holds no more than the running requests can fill. float32: whether that type is considered. slots,
    budget, overlap: the defaults, the latter two with their reasons.
    """

    free: int
    fraction: float
    fraction_why: str
    measures: bool
    useful: bool
    float32: bool
    slots: int
    slots_why: str
    budget: int
    budget_why: str
    overlap: bool
    overlap_why: str


def cpu_defaults(machine: Machine) -> DeviceDefaults:
    """This machine's processor."""
    return DeviceDefaults(
        free=machine.free,
        fraction=0.8,
        fraction_why="leaves a fifth for activations and others",
        measures=False,
        useful=True,
        float32=True,
        slots=64,
        slots_why="enough to keep a CPU busy",
        budget=512,
        budget_why="on a CPU longer steps would hold up running requests",
        overlap=False,
        overlap_why="on a CPU planning would take a core from the model",
    )


def gpu_defaults(machine: Machine) -> DeviceDefaults:
    """The first GPU."""
    return DeviceDefaults(
        free=machine.gpu_free,
        fraction=0.92,
        fraction_why=(
            "the engine measures what weights, compiled kernels, the largest step and CUDA graphs leave, and keeps a"
            " reserve"
        ),
        measures=True,
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
class ResolvedResources:
    """The numbers of an engine: see `config.engine.EngineConfig`, which has the same names, but for what is recorded.
    measured: pages and context are estimates, which the engine puts its own in the place of. limit: the longest
    sequence that is wanted; least_context: that must fit.
    """

    device: str
    kernels: KernelConfig
    graphs: GraphPlan
    dtype: str
    threads: int
    overlap: bool
    slots: int
    budget: int
    context: int
    pages: int
    measured: bool
    limit: int
    least_context: int
    seed: int
    sizes: Sizes


def resolve_resources(
    config: Options,
    facts: ModelFacts,
    machine: Machine,
    sizes_in: Callable[[str, KernelConfig, str], Sizes],
    decisions: Decisions,
    width: int = 0,
    trees: bool = False,
) -> ResolvedResources:
    """Decides, and notes each decision in the decisions. `sizes_in(device, kernels, dtype)` measures the model as it would
    be loaded. width: tokens that are drafted a step, at most; trees: whether they may part ways. Raises
    UnsupportedConfig; InsufficientMemory where weights and one page of KV cache, or what was asked for, are more than
    the device has memory for.
    """
    for rule in RULES:
        if rule.when(config):
            raise UnsupportedConfig(f"{rule.why}; {rule.instead}")
    note, take, schedule = decisions.add, decisions.choose, config.schedule
    device = _device(config, machine, decisions)
    site = gpu_defaults(machine) if device == "cuda" else cpu_defaults(machine)
    threads = take(
        "threads", config.load.threads, max(1, machine.cores - 1), "cores - 1: one stays free for the server"
    )
    kernels = resolve_kernels(config, facts, machine, device, decisions, trees)
    dtype, sizes = _dtype(config, site, lambda dtype: sizes_in(device, kernels, dtype), decisions)
    note("kv_cache_dtype", kernels.kv or dtype, *source_and_reason(bool(kernels.kv), "as dtype"))
    overlap = take("overlap_schedule", schedule.overlap_schedule, site.overlap, site.overlap_why)
    slots = take("max_running_requests", schedule.max_running_requests, site.slots, site.slots_why)
    measured = site.measures and config.memory.mem_fraction_static is None and config.memory.max_total_tokens is None
    pages, context = _memory(config, facts, site, sizes, dtype, slots, measured, decisions)
    budget = _budget(config, site, slots, context, decisions)
    if budget <= width:
        raise UnsupportedConfig(
            f"chunked_prefill_size: a step of {budget} tokens has no room to verify {width} drafts of one request; use"
            f" at least --chunked-prefill-size {width + 1}"
        )
    graphs = resolve_graphs(
        config, device, kernels, slots * (1 + (min(width, 1) if trees else width)), budget, decisions
    )  # each draft is a row of its own; drafts that part ways are recorded by themselves
    note(
        "schedule_policy",
        schedule.schedule_policy,
        *source_and_reason(schedule.schedule_policy != "fcfs", "arrival order"),
    )
    note(
        "radix_cache",
        config.memory.radix_cache,
        *source_and_reason(not config.memory.radix_cache, "prompts that begin alike are computed once"),
    )
    seed = config.sampling.random_seed
    drawn = secrets.randbits(62) if seed is None else seed
    note("random_seed", drawn, *source_and_reason(seed is not None, "drawn at start; give it to repeat a run"))
    return ResolvedResources(
        device=device,
        kernels=kernels,
        graphs=graphs,
        dtype=dtype,
        threads=threads,
        overlap=overlap,
        slots=slots,
        budget=budget,
        context=context,
        pages=pages,
        measured=measured,
        limit=_context_limit(config, facts),
        least_context=config.model.context_length or 0,
        seed=drawn,
        sizes=sizes,
    )


def _device(config: Options, machine: Machine, decisions: Decisions) -> str:
    """The user's, else a GPU where there is one. Raises UnsupportedConfig for a GPU that is not there."""
    if config.load.device == "cuda" and not machine.gpus:
        raise UnsupportedConfig(
            "device: cuda, but the driver shows no NVIDIA GPU; use --device cpu, or see `thalweg doctor`"
        )
    if machine.gpus:
        return decisions.choose("device", config.load.device, "cuda", machine.gpus[0])
    return decisions.choose("device", config.load.device, "cpu", f"{machine.cpu}, {machine.cores} cores")


def _dtype(
    config: Options, site: DeviceDefaults, sizes_in: Callable[[str], Sizes], decisions: Decisions
) -> tuple[str, Sizes]:
    """The type of weights and activations, and the model's sizes in it."""
    wish = config.load.dtype
    if not site.float32:
        dtype = decisions.choose("dtype", wish, "bfloat16", "what a GPU's matrix units compute with")
        return dtype, sizes_in(dtype)
    room = int(site.free * (config.memory.mem_fraction_static or site.fraction))
    plain = sizes_in(wish or "float32")
    fits = plain.weight_bytes <= room // 2
    reason = (
        f"float32 weights take {format_bytes(plain.weight_bytes)}, {'not ' if not fits else ''}within half of"
        f" {format_bytes(room)}"
    )
    dtype = decisions.choose("dtype", wish, "float32" if fits else "bfloat16", reason)
    return dtype, plain if dtype == (wish or "float32") else sizes_in(dtype)


def _memory(
    config: Options,
    facts: ModelFacts,
    site: DeviceDefaults,
    sizes: Sizes,
    dtype: str,
    slots: int,
    measured: bool,
    decisions: Decisions,
) -> tuple[int, int]:
    """Pages of the KV cache and the longest sequence, from the free memory: (pages, context). measured: see
    `ResolvedResources`.
    """
    wish = config.memory
    fraction = wish.mem_fraction_static or site.fraction
    if measured:
        decisions.add("mem_fraction_static", "auto", AUTO, site.fraction_why)
    elif site.measures and wish.mem_fraction_static is None:
        fraction = 1.0  # the tokens that were asked for are held to what is free when the engine starts
        decisions.add("mem_fraction_static", "auto", AUTO, "--max-total-tokens says how much the KV cache takes")
    else:
        decisions.choose("mem_fraction_static", wish.mem_fraction_static, site.fraction, site.fraction_why)
    room = int(site.free * fraction)
    page = sizes.kv_bytes * PAGE
    most = (room - sizes.weight_bytes) // page
    sums = (
        f"({format_bytes(site.free)} free x {fraction:g} - {format_bytes(sizes.weight_bytes)} weights) /"
        f" {format_bytes(page)} a page"
    )
    if most < 1:
        needed = (sizes.weight_bytes + page) / site.free if site.free else 1.0
        smaller = ", or --dtype bfloat16" if dtype == "float32" else ""
        instead = (
            f"--mem-fraction-static {needed + 0.005:.2f}" if needed < 0.985 else f"a machine with more memory{smaller}"
        )
        raise InsufficientMemory(f"memory: {sums} leaves no page for the KV cache; use {instead}")
    limit = _context_limit(config, facts)
    if wish.max_total_tokens is not None:
        pages = wish.max_total_tokens // PAGE
        if pages > most:
            raise InsufficientMemory(
                f"max_total_tokens: {wish.max_total_tokens} do not fit: {sums} = {most} pages; use at most"
                f" {most * PAGE}"
            )
        decisions.add("max_total_tokens", pages * PAGE, USER, f"{pages} whole pages of {PAGE} tokens")
    else:
        useful = max(slots * -(-min(limit, TYPICAL) // PAGE), -(-limit // PAGE)) if site.useful else most
        pages = min(most, useful)
        enough = f"{useful} are enough for {slots} requests of {min(limit, TYPICAL)} tokens"
        about = "an estimate, which the engine replaces by what it measures: " if measured else ""
        decisions.add(
            "max_total_tokens", pages * PAGE, AUTO, f"{about}{sums} = {most}" + (f"; {enough}" if pages < most else "")
        )
    return pages, _context(config, facts, limit, pages, decisions)


def _context_limit(config: Options, facts: ModelFacts) -> int:
    """The longest sequence that is wanted: the user's, else the model's."""
    wish = config.model.context_length
    if wish is not None and wish > facts.context:
        raise UnsupportedConfig(
            f"context_length: {wish} is beyond the model's {facts.context}; use at most {facts.context}"
        )
    return wish or facts.context


def _context(config: Options, facts: ModelFacts, limit: int, pages: int, decisions: Decisions) -> int:
    held = pages * PAGE
    if config.model.context_length is not None:
        if limit > held:
            raise InsufficientMemory(
                f"context_length: {limit} is more than the KV cache holds, {pages} pages x {PAGE}; use at most {held}"
            )
        decisions.add("context_length", limit, USER, "")
    elif limit > held:
        decisions.add("context_length", held, AUTO, f"what the KV cache holds; the model could {facts.context}")
    else:
        decisions.add("context_length", limit, MODEL, "max_position_embeddings")
    return min(limit, held)


def _budget(config: Options, site: DeviceDefaults, slots: int, context: int, decisions: Decisions) -> int:
    """Tokens a step."""
    wish = config.schedule.chunked_prefill_size
    if wish == -1:
        decisions.add("chunked_prefill_size", slots * context, USER, "-1: room for every running prompt in one step")
        return slots * context
    budget, why = site.budget, site.budget_why
    if 2 * slots > budget:
        budget, why = (
            slots + budget,
            f"a token for each of {slots} running requests, and {budget} of prompts beside them",
        )
    return decisions.choose("chunked_prefill_size", wish, budget, why)
