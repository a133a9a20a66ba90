"""Decides how many processes share a model, and how. A number that cannot divide is refused with those that can."""

from __future__ import annotations

import re
from collections.abc import Iterable

from thalweg.config.context_parallel import INTERLEAVE, SGLANG_STRATEGIES
from thalweg.config.engine import EngineConfig
from thalweg.config.machine import Machine
from thalweg.config.machines import hardware_of
from thalweg.config.model import ModelFacts
from thalweg.config.options import ParallelOptions
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.kernels import TORCH_ATTENTION, KernelConfig
from thalweg.core.report import AUTO, USER, Decision
from thalweg.launch.decisions import Decisions
from thalweg.launch.experts import resolve_experts
from thalweg.launch.planning.stages import layer_seconds
from thalweg.models.stages import stage_borders


def resolve_parallelism(
    parallel: ParallelOptions, facts: ModelFacts, machine: Machine, device: str, decisions: Decisions
) -> None:
    """Raises UnsupportedConfig."""
    for name in ("tp_size", "pp_size", "dp_size", "dcp_size", "enable_dp_attention", "shard_indexer"):
        decisions.fields[name] = getattr(parallel, name)
    tp, dp = parallel.tp_size, parallel.dp_size
    if parallel.enable_dp_attention:
        if tp % dp:
            known = _or(_divisors(tp))
            raise UnsupportedConfig(
                f"dp_size: {dp} does not divide --tp-size {tp}; use --dp-size {known}, or another --tp-size"
            )
    _resolve_context_parallelism(parallel, decisions)
    _resolve_nodes(parallel, decisions)
    config = decisions.config()
    _check_heads(facts, config.attention_tp, config.attention_dp * config.attn_cp_size)
    _resolve_indexer(config, facts, decisions)
    _resolve_widths(parallel, facts, config.attention_tp, decisions)
    resolve_experts(parallel, facts, device, decisions)
    _resolve_stages(parallel, facts, machine, decisions)
    gpus = len(machine.gpus) * config.nnodes
    if device == "cuda" and config.processes > gpus:
        copies = f" ({config.copies} copies of {config.copy_processes})" if config.copies > 1 else ""
        raise UnsupportedConfig(
            f"tp_size: {config.processes} GPUs are needed{copies}, and this process may use {len(machine.gpus)}"
            f"{' on each node' if config.nnodes > 1 else ''}; use {_that_fit(config, facts, gpus)}"
        )
    if config.processes > 1:
        copies = f"{config.copies} copies of " if config.copies > 1 else ""
        divided = f" x {config.attn_cp_size} context-parallel" if config.attn_cp_size > 1 else ""
        inner = f"{config.attention_dp} data-parallel{divided} x {config.attention_tp} tensor-parallel ranks"
        if config.dcp_size > 1:
            inner += f", {config.dcp_size} of which share each context"
        if config.pp_size > 1:
            inner = f"{config.pp_size} pipeline stages, each of {inner}"
        if config.nnodes > 1:
            inner += f", {config.node_processes} on each of {config.nnodes} nodes"
        decisions.entries.append(Decision("processes", config.processes, USER, f"{copies}{inner}"))


def _resolve_stages(parallel: ParallelOptions, facts: ModelFacts, machine: Machine, decisions: Decisions) -> None:
    stages, partition, costs = parallel.pp_size, parallel.pp_layer_partition, list[float]()
    if stages > 1 and not partition:
        costs = layer_seconds(facts, decisions.config(), hardware_of(machine))
    layers = tuple(stage.stop - stage.first for stage in stage_borders(facts, stages, partition, costs))
    if stages > 1:
        reason = "the slowest stage takes as little time as it can, of a prompt and of decode steps"
        decisions.record("pp_layer_partition", ",".join(map(str, layers)), bool(partition), reason)
        decisions.fields["pp_layer_partition"] = layers


def _resolve_context_parallelism(parallel: ParallelOptions, decisions: Decisions) -> None:
    cp, inner = parallel.attn_cp_size, parallel.tp_size // (parallel.dp_size if parallel.enable_dp_attention else 1)
    if inner % cp:
        raise UnsupportedConfig(
            f"attn_cp_size: {cp} does not divide the {inner} processes of an attention; use --attn-cp-size"
            f" {_or(_divisors(inner))}, or another --tp-size"
        )
    if cp > 1:
        reason = "each step's tokens are divided; steps with prompts are captured in pieces, never with their attention"
        decisions.add("attn_cp_size", cp, USER, reason)
        asked = SGLANG_STRATEGIES.get(parallel.cp_strategy or "", parallel.cp_strategy)
        decisions.choose("cp_strategy", asked, INTERLEAVE, "it balances prompts of any length")
    elif parallel.cp_strategy is not None:
        raise UnsupportedConfig(
            f"cp_strategy: {parallel.cp_strategy} divides prompts over several groups; use --attn-cp-size 2 or more"
        )


def _resolve_nodes(parallel: ParallelOptions, decisions: Decisions) -> None:
    nodes, node, address = parallel.nnodes, parallel.node_rank, parallel.dist_init_addr
    if node >= nodes:
        raise UnsupportedConfig(f"node_rank: {node} is none of --nnodes {nodes}, which count from 0")
    if nodes == 1 and parallel.launcher != "local":
        raise UnsupportedConfig(f"launcher: {parallel.launcher} is for several nodes; use --nnodes 2 or more")
    if nodes > 1:
        if address is None or not re.fullmatch(r"[^:]+:\d{1,5}", address):
            raise UnsupportedConfig(
                "dist_init_addr: several nodes find each other at an address of the first one; use --dist-init-addr"
                " HOST:PORT, the same on all, with a name or an IPv4 address"
            )
        if (processes := decisions.config().processes) % nodes:
            raise UnsupportedConfig(
                f"nnodes: {processes} processes cannot be shared evenly by {nodes} nodes; use --nnodes"
                f" {_or(_divisors(processes))}"
            )
    decisions.fields |= {"nnodes": nodes, "dist_init_addr": address or ""}


def _that_fit(config: EngineConfig, facts: ModelFacts, gpus: int) -> str:
    """Flags that so many GPUs are enough for."""
    if config.copies > 1 and config.tp_size <= gpus:
        return f"--dp-size {gpus // config.tp_size}"
    dp = config.attention_dp if config.attention_dp <= gpus else 1
    groups = dp * config.attn_cp_size
    sizes = [size * groups for size in _tensor_parallel_sizes(facts) if size * groups <= gpus]
    others = " without --dp-size" if dp < config.dp_size else ""
    return f"--tp-size {_or(sizes)}{others}, or a machine with more"


def _tensor_parallel_sizes(facts: ModelFacts) -> list[int]:
    """Attention heads are divided evenly; key heads too, or neighbouring ranks hold the same ones."""
    keys = facts.heads if facts.mla is not None else facts.kv_heads
    return [size for size in _divisors(facts.heads) if keys % size == 0 or size % keys == 0]


def _check_heads(facts: ModelFacts, tp: int, groups: int) -> None:
    legal = _tensor_parallel_sizes(facts)
    if tp not in legal:
        raise UnsupportedConfig(
            f"tp_size: {facts.heads} attention heads cannot be shared by {tp} ranks; use --tp-size"
            f" {_or(size * groups for size in legal)}"
        )


def _resolve_indexer(config: EngineConfig, facts: ModelFacts, decisions: Decisions) -> None:
    if not config.shard_indexer:
        return
    tp, groups = config.attention_tp, config.attention_dp * config.attn_cp_size
    if reason := unshared_indexer(facts, tp, groups, config.dcp_size):
        raise UnsupportedConfig(reason)
    assert facts.indexer is not None, "it is shared"
    heads = facts.indexer.heads
    reason = f"{heads // tp} of {heads} index heads on each rank, and one sum of scores for each layer that selects"
    decisions.entries.append(Decision("shard_indexer", True, USER, reason))


def unshared_indexer(facts: ModelFacts, ranks: int, groups: int, dcp: int) -> str:
    """Why the ranks of an attention cannot share the heads of its indexer (--shard-indexer); "" where they can.

    ranks: of an attention. groups: attentions of the ranks of a layer. dcp: ranks that share each context.
    """
    if facts.indexer is None:
        return f"shard_indexer: {facts.architecture} has no indexer (index_topk in config.json); leave it out"
    heads = facts.indexer.heads
    legal = [size * groups for size in _tensor_parallel_sizes(facts) if size > 1 and heads % size == 0]
    if ranks == 1 and groups > 1:
        return (
            "shard_indexer: each attention has one rank, so there is nothing to share; use a smaller --dp-size or"
            " --attn-cp-size, or leave it out"
        )
    if ranks == 1 or heads % ranks:
        why = "it is for several ranks" if ranks == 1 else f"{heads} index heads cannot be shared by {ranks} ranks"
        use = f"use --tp-size {_or(legal)}, or leave it out" if legal else "leave it out"
        return f"shard_indexer: {why}; {use}"
    if dcp > 1:
        return (
            f"shard_indexer: with --dcp-size {dcp} each rank scores its own part of a context by all heads;"
            " leave one of them out"
        )
    return ""


def whole_contexts(kernels: KernelConfig, facts: ModelFacts) -> str:
    """Why these kernels attend to whole contexts, which ranks cannot share (DCP); "" where they need not."""
    if kernels.decode in TORCH_ATTENTION or (facts.mla is not None and not kernels.deterministic):
        return ""
    whole = "the kernels of keys and values" if facts.mla is None else "the deterministic kernels"
    use = "reference" if facts.indexer is None else "torch"
    return f"dcp_size: {whole} attend to whole contexts; use --dcp-size 1, or --attention-backend {use}"


def check_dcp(config: EngineConfig, facts: ModelFacts) -> None:
    """Ranks can share contexts whose KV they would all hold: latents, or a key head. Raises UnsupportedConfig."""
    dcp, tp = config.dcp_size, config.attention_tp
    if tp % dcp:
        raise UnsupportedConfig(
            f"dcp_size: {dcp} does not divide the {tp} ranks of an attention; use --dcp-size {_or(_divisors(tp))}"
        )
    replicas = facts.kv_replicas(tp)
    if replicas % dcp:
        raise UnsupportedConfig(
            f"dcp_size: each of the {facts.kv_heads} key heads is on {replicas} of {tp} ranks, which {dcp} does not"
            f" divide; use --dcp-size {_or(_divisors(replicas))}"
        )
    if dcp > 1 and (reason := whole_contexts(config.kernels, facts)):
        raise UnsupportedConfig(reason)
    if dcp > 1 and not config.mla:
        raise UnsupportedConfig(
            "dcp_size: ranks share latents, which --disable-mla does not cache; leave one of them out"
        )


def _resolve_widths(parallel: ParallelOptions, facts: ModelFacts, attention_tp: int, decisions: Decisions) -> None:
    tp, ep, moe = parallel.tp_size, parallel.ep_size, facts.moe
    slots = 0 if moe is None else moe.experts + parallel.ep_num_redundant_experts
    legal = [size for size in _divisors(tp) if size == 1 or moe is not None and slots % size == 0]
    experts = "no experts" if moe is None else f"{slots} experts on {tp} ranks"
    if ep not in legal:
        use, copies = f"--ep-size {_or(legal)}", parallel.ep_num_redundant_experts
        if copies and moe is not None and tp % ep == moe.experts % ep == 0:
            use = f"--ep-num-redundant-experts {copies + -slots % ep}"
        raise UnsupportedConfig(f"ep_size: {experts} cannot be divided into {ep} groups; use {use}")
    decisions.fields["ep_size"] = ep
    dense = parallel.moe_dense_tp_size
    if dense not in (None, 1, attention_tp):
        raise UnsupportedConfig(
            f"moe_dense_tp_size: dense MLPs are divided over the {attention_tp} ranks of an attention, or not; use"
            f" --moe-dense-tp-size {_or(sorted({1, attention_tp}))}"
        )
    if attention_tp > 1:
        decisions.choose("moe_dense_tp_size", dense, attention_tp, "as the attention")
    else:
        decisions.fields["moe_dense_tp_size"] = 1
    if parallel.enable_dp_lm_head is False:
        raise UnsupportedConfig(
            "enable_dp_lm_head: the head is always divided over the ranks of one attention; leave the flag out"
        )
    if parallel.enable_dp_attention:
        source = AUTO if parallel.enable_dp_lm_head is None else USER
        decisions.add("enable_dp_lm_head", True, source, "no logits cross data-parallel ranks")


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _or(sizes: Iterable[int]) -> str:
    """1, 2 or 4"""
    *first, last = map(str, sizes)
    return f"{', '.join(first)} or {last}" if first else last
