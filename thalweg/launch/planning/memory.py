"""What a GPU of a layout holds once an engine has started there: from what the resolver chose, the model's facts, and
sums of `room`.
"""

from __future__ import annotations

import dataclasses

from thalweg.config.machine import Machine
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.core.report import AUTO, Decision
from thalweg.launch.planning.gpu_memory import (
    BESIDE,
    RESERVE,
    EngineExtent,
    GpuMemory,
    graph_bytes,
    slot_bytes,
    step_bytes,
)
from thalweg.launch.planning.layouts import ParallelLayout
from thalweg.launch.planning.roofline import KVBytes
from thalweg.launch.planning.weights import NumberBytes, held
from thalweg.launch.resolved import Resolved


def kept(facts: ModelFacts, resolved: Resolved) -> KVBytes:
    """From the planes that the model has."""
    index = sum(plane.bytes_per_token for plane in resolved.sizes.planes if plane.name == "index")
    own = 0 if facts.indexer is None else sum(facts.indexer.full)
    return KVBytes((resolved.sizes.kv_bytes - index) / facts.layers, index / own if own else 0.0)


def alone(facts: ModelFacts, resolved: Resolved, machine: Machine) -> GpuMemory:
    """Of the one GPU that this version uses."""
    extent = _extent(resolved)
    room = GpuMemory(
        free=machine.gpu_free,
        beside=BESIDE,
        weights=resolved.sizes.weight_bytes,
        step=step_bytes(facts, extent),
        graphs=graph_bytes(facts, extent),
        slots=0.0,
        reserve=RESERVE,
        page=resolved.sizes.kv_bytes * PAGE,
    )
    return _with_slots(room, extent)


def of_layout(
    facts: ModelFacts, resolved: Resolved, loaded: NumberBytes, layout: ParallelLayout, single: GpuMemory
) -> GpuMemory:
    """Of one GPU of a layout: its part of weights and cache, and what an engine takes anyway. single: of one GPU
    alone.
    """
    if layout.tp == layout.pp == 1:
        return single
    extent = _extent(resolved)
    stage = resolved.sizes.kv_bytes * -(-facts.layers // layout.pp) / facts.layers
    cut = 1 if facts.mla is not None else min(layout.attention, facts.kv_heads)
    rotary = 4 * facts.context * facts.rope.dim
    drafter = 0.0
    if resolved.engine.speculative_algorithm != "NONE":  # most of whose weights are experts
        drafter = max(0.0, single.weights - rotary - sum(held(facts, loaded).values())) / layout.tp
    room = dataclasses.replace(
        single,
        weights=sum(held(facts, loaded, layout).values()) + rotary + drafter,
        step=step_bytes(facts, extent, layout.tp),
        graphs=graph_bytes(facts, extent, layout.tp),
        slots=0.0,
        page=stage * PAGE / cut,
    )
    return _with_slots(room, extent)


def with_pages(resolved: Resolved, room: GpuMemory, layout: ParallelLayout) -> Resolved:
    """With the pages of a cache that are expected where the engine will measure them, in place of the resolver's first
    estimate, which knows one GPU or the sum of all. room: of a GPU of the layout.
    """
    if resolved.engine.num_pages:
        return resolved
    context = min(resolved.engine.context_length, max(room.tokens, 1))
    of = "" if layout.gpus == 1 else f" of each of the {layout.caches} caches" if layout.caches > 1 else " of the cache"
    why = f"expected{of}, which the engine replaces by what it measures: see the memory above"
    decisions = [Decision("max_total_tokens", room.pages * PAGE, AUTO, why)]
    if context < resolved.engine.context_length:
        decisions.append(Decision("context_length", context, AUTO, "what the KV cache is expected to hold"))
    engine = resolved.engine.started(decisions)
    return dataclasses.replace(resolved, pages=room.pages, context=context, engine=engine)


def _extent(resolved: Resolved) -> EngineExtent:
    engine = resolved.engine
    return EngineExtent(
        engine.max_running_requests,
        engine.chunked_prefill_size,
        engine.context_length,
        engine.cuda_graph_bs,
        engine.piecewise_cuda_graph_tokens,
        resolved.sizes.slot_bytes,
    )


def _with_slots(room: GpuMemory, extent: EngineExtent) -> GpuMemory:
    """Slots are as long as the longest sequence, which is no longer than what the pages hold."""
    context = min(extent.context, max(room.tokens, PAGE))
    return dataclasses.replace(room, slots=slot_bytes(extent.slots + 1, context, drafts=extent.drafts))
