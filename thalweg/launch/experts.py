"""Decides where routed experts are, whether they move, and how tokens get to them."""

from __future__ import annotations

from thalweg.config.model import ModelFacts
from thalweg.config.options import ParallelOptions
from thalweg.config.tree import settings
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine.build import expert_sizes
from thalweg.launch.decisions import Decisions
from thalweg.parallel import deepep
from thalweg.parallel.expert_file import TRIVIAL, read_expert_location

PLACED = "ep_num_redundant_experts", "init_expert_location", "enable_eplb", "moe_a2a_backend"
MOVED = (
    "eplb_rebalance_num_iterations",
    "eplb_rebalance_layers_per_chunk",
    "eplb_min_rebalancing_utilization_threshold",
)


def resolve_experts(parallel: ParallelOptions, facts: ModelFacts, device: str, decisions: Decisions) -> None:
    """After `ep_size` is decided. Raises UnsupportedConfig."""
    known, moe = settings(), facts.moe
    given = {name: getattr(parallel, name) for name in known if hasattr(parallel, name)}
    changed = [name for name, value in given.items() if value != known[name].default]
    if moe is None or parallel.ep_size == 1:
        needs_ranks = (*PLACED, *MOVED, "eplb_algorithm", "deepep_mode")
        if wrong := next((name for name in needs_ranks if name in changed and given[name] != "allgather"), ""):
            raise UnsupportedConfig(f"{wrong}: experts are not divided; use --ep-size 2 or more, or leave it out")
        return
    if not parallel.enable_eplb and (wrong := next((name for name in MOVED if name in changed), "")):
        raise UnsupportedConfig(f"{wrong}: experts do not move; use --enable-eplb, or leave it out")
    for name in (*PLACED, *MOVED):
        decisions.fields[name] = 0 if given[name] is None else given[name]
    groups = moe.groups if moe.method != "greedy" and moe.topk_groups < moe.groups else 1
    algorithm = "deepseek" if groups == 1 else "deepseek_hierarchical"
    if parallel.enable_eplb or parallel.init_expert_location != TRIVIAL:
        why = "the router chooses single experts" if groups == 1 else f"the router chooses among {groups} groups"
        decisions.choose("eplb_algorithm", parallel.eplb_algorithm, algorithm, why)
    elif parallel.eplb_algorithm is not None:
        raise UnsupportedConfig("eplb_algorithm: experts stay where they are; use --enable-eplb, or leave it out")
    _resolve_dispatch(parallel, device, decisions)
    read_expert_location(parallel.init_expert_location, expert_sizes(decisions.config(), facts))


def _resolve_dispatch(parallel: ParallelOptions, device: str, decisions: Decisions) -> None:
    if parallel.moe_a2a_backend != "deepep":
        if parallel.deepep_mode is not None:
            raise UnsupportedConfig("deepep_mode: it is of --moe-a2a-backend deepep; leave it out")
        return
    decisions.choose("deepep_mode", parallel.deepep_mode, "auto", "low_latency for few tokens")
    reason = "it needs GPUs" if device != "cuda" else deepep.missing()
    if not reason and parallel.ep_size != parallel.tp_size:
        reason = f"it needs whole experts on each GPU: --ep-size {parallel.tp_size}"
    if reason:
        raise UnsupportedConfig(f"moe_a2a_backend: deepep: {reason}; or use allgather or alltoall")
