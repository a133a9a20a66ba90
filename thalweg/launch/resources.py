"""Decides device, types, requests, tokens of a step, and memory. It never changes what the user set: a value that
cannot be honoured is an error.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from thalweg.config.engine import EngineConfig
from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.config.options import Options
from thalweg.core.errors import InsufficientMemory, UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.core.kernels import TORCH_ATTENTION, KernelConfig
from thalweg.core.plan import PAGE
from thalweg.core.report import AUTO, MODEL, USER
from thalweg.launch.decisions import NO_CACHE, Decisions
from thalweg.launch.graphs import resolve_graphs
from thalweg.launch.hisparse import resolve_hisparse
from thalweg.launch.kernels import resolve_kernels
from thalweg.launch.parallelism import check_dcp, resolve_parallelism
from thalweg.launch.resolved import Sizes

TYPICAL_TOKENS = 2048  # of a request; by default a CPU's cache holds no more than this for each running request


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Defaults of one kind of device, each with its reason."""

    fraction: tuple[float, str]  # of the free memory, for weights and KV cache
    requests: tuple[int, str]
    tokens: tuple[int, str]  # of a step
    overlap: tuple[bool, str]


DEFAULTS = {
    "cpu": DeviceDefaults(
        fraction=(0.8, "leaves a fifth for activations and other programs"),
        requests=(64, "enough to keep a CPU busy"),
        tokens=(512, "longer steps would hold up running requests on a CPU"),
        overlap=(False, "planning would take a core from the model on a CPU"),
    ),
    "cuda": DeviceDefaults(
        fraction=(0.92, "start-up measures what weights, kernels, the largest step and CUDA graphs leave"),
        requests=(256, "with more, a GPU gains little and each request waits longer"),
        tokens=(8192, "enough for matrix products to run at full rate"),
        overlap=(True, "the device never waits for the plan"),
    ),
}

HOT_REQUESTS = 64, "each has hot sets on the device, some 190 MB of DeepSeek-V3.2 in FP8"


class Resources(NamedTuple):
    """The configuration with all that was decided so far."""

    config: EngineConfig
    sizes: Sizes
    pages: int  # of the KV cache: the engine's, or an estimate where start-up measures them
    context: int  # as `pages`


def resolve_resources(
    options: Options,
    facts: ModelFacts,
    machine: Machine,
    measure: Callable[[EngineConfig], Sizes],
    decisions: Decisions,
) -> Resources:
    """measure: sizes of the model and the drafter of a configuration. decisions: with those of the drafter.

    Raises UnsupportedConfig; InsufficientMemory where weights and one page of KV cache, or the user's sizes, do not
    fit.
    """
    choose, schedule = decisions.choose, options.schedule
    device = _device(options, machine, decisions)
    resolve_parallelism(options.parallel, facts, machine, device, decisions)
    defaults, processes = DEFAULTS[device], decisions.config().node_processes
    free = machine.gpu_free if device == "cuda" else machine.free // processes
    reason = "one core stays free for the server"
    if processes > 1:
        reason += f", {processes} processes share the others"
    choose("threads", options.load.threads, max(1, (machine.cores - 1) // processes), reason)
    drafting = decisions.config()
    kernels = resolve_kernels(options, facts, machine, device, decisions, drafting.tree.is_tree)
    graph_mode = options.load.cuda_graph_mode
    kernels = resolve_hisparse(options.memory, facts, machine, device, kernels, graph_mode, decisions)
    kept = {"mla": kernels.latent, "kv_cache_dtype": kernels.kv, "shared_experts_fusion": kernels.fusion}
    kept |= {"dsa_topk_backend": kernels.topk, "fp8_index_keys": kernels.fp8_index}
    kept |= {"dsa_paged_mqa_logits_backend": kernels.index_scores}
    decisions.fields |= kept
    check_dcp(decisions.config(), facts)
    sizes = _resolve_dtype(options, device, free, measure, decisions)
    kv = kernels.kv or decisions.fields["dtype"]
    decisions.record("kv_cache_dtype", kv, bool(kernels.kv), "as dtype")
    choose("overlap_schedule", schedule.overlap_schedule, *defaults.overlap)
    auto = HOT_REQUESTS if kernels.hot and device == "cuda" else defaults.requests
    requests = choose("max_running_requests", schedule.max_running_requests, *auto)
    is_open = options.memory.mem_fraction_static is None and options.memory.max_total_tokens is None
    is_measured = device == "cuda" and is_open  # start-up measures how much KV cache fits
    pages, context = _resolve_memory(options, facts, free, sizes, is_measured, decisions)
    tokens = _resolve_step_tokens(options, defaults, requests, context, decisions)
    drafts = drafting.num_drafts
    if tokens <= drafts:
        raise UnsupportedConfig(
            f"chunked_prefill_size: a step of {tokens} tokens cannot verify {drafts} drafts of one request; use at"
            f" least --chunked-prefill-size {drafts + 1}"
        )
    # each draft of a chain is a row of the captured step; trees are captured by themselves
    rows = requests * (1 + (min(drafts, 1) if drafting.tree.is_tree else drafts))
    resolve_graphs(options, device, kernels, rows, tokens, decisions)
    _resolve_scheduling(options, decisions)
    decisions.fields |= _resolve_targets(options, device, kernels, decisions)
    decisions.fields |= {
        "min_context_length": options.model.context_length or 0,
        "context_length": _context_limit(options, facts) if is_measured else context,
        "max_total_tokens": 0 if is_measured else pages * drafting.page_size,
    }
    return Resources(decisions.config(), sizes, pages, context)


def _resolve_targets(options: Options, device: str, kernels: KernelConfig, decisions: Decisions) -> dict[str, object]:
    """Latency targets, and whether start-up measures the step times by which they are kept. A size of steps that the
    user set is kept as it is, unless there is a target. Raises UnsupportedConfig.
    """
    schedule, fields = options.schedule, dict[str, object]()
    for name in ("max_ttft_ms", "max_itl_ms"):
        fields[name] = wish = getattr(schedule, name) or 0.0
        if wish:
            decisions.add(name, wish, USER, "prompt tokens of each step follow it")
    has_target = any(fields.values())
    if has_target and not can_measure_steps(kernels):
        raise UnsupportedConfig(
            f"{'max_itl_ms' if schedule.max_itl_ms else 'max_ttft_ms'}: deterministic inference with torch attention"
            " computes one token at a time, so no step holds several; leave the target out"
        )
    is_open = device == "cuda" and schedule.chunked_prefill_size is None
    return fields | {"measures_step_times": has_target or is_open and can_measure_steps(kernels)}


def can_measure_steps(kernels: KernelConfig) -> bool:
    """Whether steps with prompt tokens can be timed at the start. Where every token is a pass of its own, that would
    take minutes, and any number would hold up a row.
    """
    return not (kernels.deterministic and kernels.decode in TORCH_ATTENTION)


def _resolve_scheduling(options: Options, decisions: Decisions) -> None:
    policy, uses_cache = options.schedule.schedule_policy, options.memory.radix_cache
    if policy == "lpm" and not uses_cache:
        decisions.add("schedule_policy", policy, USER, NO_CACHE)
    else:
        decisions.record("schedule_policy", policy, policy != "fcfs", "arrival order")
    reason = "common beginnings of prompts are computed once"
    decisions.record("radix_cache", uses_cache, not uses_cache, reason)
    reason = "drawn at start; set it to repeat a run"
    decisions.choose("random_seed", options.sampling.random_seed, secrets.randbits(62), reason)


def _device(options: Options, machine: Machine, decisions: Decisions) -> str:
    """The user's, else a GPU where there is one."""
    if options.load.device == "cuda" and not machine.gpus:
        raise UnsupportedConfig(
            "device: cuda, but the driver shows no NVIDIA GPU; use --device cpu, or see `thalweg doctor`"
        )
    if machine.gpus:
        return decisions.choose("device", options.load.device, "cuda", machine.gpus[0])
    return decisions.choose("device", options.load.device, "cpu", f"{machine.cpu}, {machine.cores} cores")


def _resolve_dtype(
    options: Options, device: str, free: int, measure: Callable[[EngineConfig], Sizes], decisions: Decisions
) -> Sizes:
    """The type of weights and activations. Returns the model's sizes in it."""
    asked = options.load.dtype
    if device == "cuda":
        decisions.choose("dtype", asked, "bfloat16", "what a GPU's matrix units compute with")
        return measure(decisions.config())
    usable = int(free * (options.memory.mem_fraction_static or DEFAULTS[device].fraction[0]))
    sizes = measure(decisions.config(dtype=asked or "float32"))
    fits = sizes.weight_bytes <= usable // 2
    weights, memory = format_bytes(sizes.weight_bytes), format_bytes(usable)
    reason = f"float32 weights take {weights}, {'' if fits else 'not '}within half of {memory}"
    dtype = decisions.choose("dtype", asked, "float32" if fits else "bfloat16", reason)
    return sizes if dtype == (asked or "float32") else measure(decisions.config())


def _resolve_memory(
    options: Options, facts: ModelFacts, free: int, sizes: Sizes, is_measured: bool, decisions: Decisions
) -> tuple[int, int]:
    """Pages of the KV cache, and the longest sequence."""
    asked, fields = options.memory, decisions.fields
    is_gpu, name = fields["device"] == "cuda", "mem_fraction_static"
    default, reason = DEFAULTS[fields["device"]].fraction
    fraction = asked.mem_fraction_static or default
    if is_measured:
        decisions.add(name, "auto", AUTO, reason)
    elif is_gpu and asked.mem_fraction_static is None:
        fraction = 1.0  # start-up compares the tokens that were asked for with what is free then
        decisions.add(name, "auto", AUTO, "--max-total-tokens says how much the KV cache takes")
    else:
        decisions.choose(name, asked.mem_fraction_static, default, reason)
    limit, requests = _context_limit(options, facts), fields["max_running_requests"]
    in_host, host = sizes.host_kv_bytes * PAGE, fields.get("hisparse_host_memory", 0)
    page, page_size = sizes.kv_bytes * PAGE - in_host * is_gpu, decisions.config().page_size
    used, others = sizes.weight_bytes, ""
    if hot := requests * sizes.hot_sets(limit):
        used, others = used + hot, f" - {format_bytes(hot)} hot sets of {requests} requests"
    most = (int(free * fraction) - used) // page
    formula = (
        f"({format_bytes(free)} free x {fraction:g} - {format_bytes(sizes.weight_bytes)} weights{others}) /"
        f" {format_bytes(page)} a page"
    )
    if in_host and host and (held := host // in_host - 1) < most:  # beside the null page
        most, formula = held, f"{format_bytes(host)} of host memory / {format_bytes(in_host)} of latents a page"
    if most < 1:
        needed = (used + page) / free if free else 1.0
        smaller = ", or --dtype bfloat16" if fields["dtype"] == "float32" else ""
        larger = f"a machine with more memory{smaller}"
        instead = f"--mem-fraction-static {needed + 0.005:.2f}" if needed < 0.985 else larger
        if hot > used / 2:
            instead = "a smaller --max-running-requests or --context-length"
        raise InsufficientMemory(f"memory: {formula} leaves no page for the KV cache; use {instead}")
    if asked.max_total_tokens is not None:
        pages = asked.max_total_tokens // page_size
        if pages < 1:
            raise UnsupportedConfig(
                f"max_total_tokens: {asked.max_total_tokens} are less than a page, which has {page_size} tokens with"
                f" --dcp-size {page_size // PAGE}; use at least {page_size}"
            )
        if pages > most:
            raise InsufficientMemory(
                f"max_total_tokens: {asked.max_total_tokens} do not fit: {formula} = {most} pages; use at most"
                f" {most * page_size}"
            )
        decisions.add("max_total_tokens", pages * page_size, USER, f"{pages} whole pages of {page_size} tokens")
    else:
        tokens = min(limit, TYPICAL_TOKENS)
        # a CPU's cache holds no more than the running requests need
        useful = most if is_gpu else max(requests * -(-tokens // page_size), -(-limit // page_size))
        pages = min(most, useful)
        estimate = "an estimate, which start-up replaces by what it measures: " if is_measured else ""
        enough = f"; {useful} are enough for {requests} requests of {tokens} tokens" if pages < most else ""
        decisions.add("max_total_tokens", pages * page_size, AUTO, f"{estimate}{formula} = {most}{enough}")
    return pages, _resolve_context(options, facts, limit, pages, decisions)


def _context_limit(options: Options, facts: ModelFacts) -> int:
    """The longest sequence that the user or the model wants."""
    asked = options.model.context_length
    if asked is not None and asked > facts.context:
        raise UnsupportedConfig(
            f"context_length: {asked} is beyond the model's {facts.context}; use at most {facts.context}"
        )
    return asked or facts.context


def _resolve_context(options: Options, facts: ModelFacts, limit: int, pages: int, decisions: Decisions) -> int:
    page_size = decisions.config().page_size
    capacity = pages * page_size
    if options.model.context_length is not None:
        if limit > capacity:
            raise InsufficientMemory(
                f"context_length: {limit} is more than the KV cache holds, {pages} pages x {page_size}; use at most"
                f" {capacity}"
            )
        decisions.add("context_length", limit, USER, "")
    elif limit > capacity:
        reason = f"what the KV cache holds; the model could have {facts.context}"
        decisions.add("context_length", capacity, AUTO, reason)
    else:
        decisions.add("context_length", limit, MODEL, "max_position_embeddings")
    return min(limit, capacity)


def _resolve_step_tokens(
    options: Options, defaults: DeviceDefaults, requests: int, context: int, decisions: Decisions
) -> int:
    asked, name = options.schedule.chunked_prefill_size, "chunked_prefill_size"
    if asked == -1:
        decisions.add(name, requests * context, USER, "-1: every running prompt fits into one step")
        return requests * context
    tokens, reason = defaults.tokens
    if 2 * requests > tokens:
        reason = f"a token for each of {requests} running requests, and {tokens} of prompts beside them"
        tokens += requests
    return decisions.choose(name, asked, tokens, reason)
