"""Decides whether latents of sparse attention are in host memory (`kernels.swap_in`), and how large hot sets are."""

from __future__ import annotations

import msgspec

from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.config.options import MemoryOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.core.kernels import MOST_HOT_ENTRIES, KernelConfig
from thalweg.launch.decisions import Decisions
from thalweg.launch.kernels import HOT_WHOLE_CONTEXTS

HOST_SHARE = 0.8  # of the free host memory, beside a GPU: the rest is for the process and for other programs
SETTINGS = "hisparse_device_buffer_size", "hisparse_host_memory_gb"


def resolve_hisparse(
    memory: MemoryOptions,
    facts: ModelFacts,
    machine: Machine,
    device: str,
    kernels: KernelConfig,
    graph_mode: str | None,
    decisions: Decisions,
) -> KernelConfig:
    """The kernel selection with hot sets. graph_mode: that the user asked for. decisions: with the drafter's.

    Raises UnsupportedConfig.
    """
    if not memory.enable_hisparse:
        for name in SETTINGS:
            if getattr(memory, name) is not None:
                raise UnsupportedConfig(
                    f"{name}: it has no effect without --enable-hisparse; add that, or leave this out"
                )
        return kernels
    reason = _why_not(facts, device, kernels, graph_mode)
    if decisions.config().dcp_size > 1 or decisions.config().attn_cp_size > 1:
        reason = HOT_WHOLE_CONTEXTS
    if reason:
        raise UnsupportedConfig(f"enable_hisparse: {reason}")
    assert facts.indexer is not None
    topk, query = facts.indexer.topk, 1 + decisions.config().num_drafts
    least, name = topk * query, "hisparse_device_buffer_size"
    if least > MOST_HOT_ENTRIES:
        raise UnsupportedConfig(
            f"enable_hisparse: a step of {query} tokens may choose {topk} for each, and a hot set holds at most"
            f" {MOST_HOT_ENTRIES}; use --speculative-num-draft-tokens {MOST_HOT_ENTRIES // topk} or fewer drafts"
        )
    reason = f"{1 + query} x index_topk: a request's step may choose {least}"
    auto = min(topk * (1 + query), MOST_HOT_ENTRIES)
    entries = decisions.choose(name, memory.hisparse_device_buffer_size, auto, reason)
    if entries < least:
        raise UnsupportedConfig(
            f"{name}: {entries} are too few: a step of {query} tokens may choose {topk} for each; use at least"
            f" --hisparse-device-buffer-size {least}" + " or fewer drafts" * (query > 1)
        )
    decisions.add("enable_hisparse", True, "user", "")
    decisions.fields["hisparse_host_memory"] = _host_memory(memory, machine, device, decisions)
    return msgspec.structs.replace(kernels, hot=entries)


def _why_not(facts: ModelFacts, device: str, kernels: KernelConfig, graph_mode: str | None) -> str:
    if facts.indexer is None or facts.mla is None:
        return f"{facts.architecture} has no sparse attention (DSA), whose choice says what is loaded; leave it out"
    if not kernels.latent:
        return "--no-mla keeps no latents; leave one of them out"
    if kernels.deterministic:
        return "deterministic attention has no swap-in; leave --deterministic-inference out"
    if device == "cpu":
        is_reference = kernels.decode == "reference"
        return "" if is_reference else f"{kernels.decode} attention has no swap-in on a CPU; use reference"
    if kernels.decode == "reference":
        return "reference attention does not read host memory on a GPU; use --attention-backend triton_sparse"
    if graph_mode == "full":
        return (
            "--cuda-graph-mode full computes tokens of a prompt as rows, which would share a hot set; use"
            " full_and_piecewise"
        )
    return ""


def _host_memory(memory: MemoryOptions, machine: Machine, device: str, decisions: Decisions) -> int:
    """Bytes for one process; 0: on a CPU all memory is one, and its limit is that of the KV cache."""
    name, asked, processes = (
        "hisparse_host_memory_gb",
        memory.hisparse_host_memory_gb,
        decisions.config().node_processes,
    )
    if asked is None and device == "cpu":
        return 0
    free = machine.free / 1e9
    if asked is not None and asked > free:
        raise UnsupportedConfig(
            f"{name}: {asked:g} GB are more than the {format_bytes(machine.free)} that the container's limit and other"
            f" programs leave; use at most {free * HOST_SHARE:.0f}"
        )
    reason = f"{HOST_SHARE:g} of the {format_bytes(machine.free)} that the container's limit and other programs leave"
    reason += f", for {processes} processes" * (processes > 1)
    return int(decisions.choose(name, asked, round(free * HOST_SHARE, 3), reason) * 1e9) // processes
