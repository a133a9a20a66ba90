"""Collectives of a step between the GPUs of a layout, and their least time when nothing else hides it. No
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.machines import Hardware
from thalweg.config.model import ModelFacts
from thalweg.launch.planning.layouts import ParallelLayout
from thalweg.launch.planning.roofline import StepShape

# the least that one costs however little it carries; eight H200s were measured at 11.5 us with the kernels there are,
# 14 KiB cross in under 5
LATENCY = 5e-6
ACTIVATION = 2  # bytes of a number between layers
LSE = 4  # bytes of a head's log-sum-exp
CANDIDATE = 8  # bytes of a score and its position
HEADER = 16  # bytes before a token that is dispatched


@dataclass(frozen=True, slots=True)
class Collective:
    """`count` of a kind in a step. ranks: that take part. sent: bytes that one GPU sends in each. latency: seconds that
    each costs at least.
    """

    name: str
    count: int
    ranks: int
    sent: float
    latency: float = LATENCY

    def seconds(self, hardware: Hardware) -> float:
        return self.count * (self.latency + self.sent / hardware.link(self.ranks))


def collectives(facts: ModelFacts, shape: StepShape, layout: ParallelLayout) -> list[Collective]:
    """All of a step of every attention with this shape, on one GPU of each stage."""
    sparse = 0 if facts.moe is None else sum(facts.moe.in_layer(layer) for layer in range(facts.layers))
    row = facts.hidden * ACTIVATION
    inner, found = layout.attention, []
    among = (inner - 1) / inner
    if inner > 1:
        # after attention and after dense MLPs; where all GPUs share one attention, also after experts
        count = 2 * facts.layers - (sparse if layout.dp > 1 else 0)
        found.append(Collective("all-reduce", count, inner, 2 * among * shape.tokens * row))
        logits = shape.rows * facts.vocab * ACTIVATION
        found.append(Collective("all-gather of logits", 1, inner, among / inner * logits))
    if layout.dcp > 1:
        found += _around_attention(facts, shape, layout)
    if facts.moe is not None and layout.dp > 1:
        found += _around_experts(facts, shape, layout, sparse, row)
    if layout.pp > 1:
        found.append(Collective("to the next stage", layout.pp - 1, layout.tp * layout.pp, shape.tokens * row / inner))
    return found


def sending_seconds(facts: ModelFacts, shape: StepShape, layout: ParallelLayout, hardware: Hardware | None) -> float:
    """The least time of all collectives of a step; 0.0 for GPUs whose links are unknown."""
    return 0.0 if hardware is None else sum(one.seconds(hardware) for one in collectives(facts, shape, layout))


def _around_attention(facts: ModelFacts, shape: StepShape, layout: ParallelLayout) -> list[Collective]:
    """Queries of all GPUs that share a context meet each part of it; outputs, each with its log-sum-exp, go back. An
    indexer's candidates, a score and a position each, are gathered.
    """
    ranks, heads, mla = layout.dcp, facts.heads / layout.attention, facts.mla
    query, out = (facts.head_dim,) * 2 if mla is None else (mla.kv_lora + mla.rope, mla.kv_lora)
    each, others = shape.tokens * heads, ranks - 1
    found = [
        Collective("all-gather of queries", facts.layers, ranks, others * each * query * ACTIVATION),
        Collective("all-to-all of attention", facts.layers, ranks, others * each * (out * ACTIVATION + LSE)),
    ]
    if facts.indexer is not None and shape.context > facts.indexer.topk:
        chosen = min(facts.indexer.topk, shape.context / ranks)
        candidates = others * shape.tokens * chosen * CANDIDATE
        found.append(Collective("all-gather of candidates", sum(facts.indexer.full), ranks, candidates))
    return found


def _around_experts(
    facts: ModelFacts, shape: StepShape, layout: ParallelLayout, layers: int, row: float
) -> list[Collective]:
    """Tokens of all attentions meet at the experts: dealt out in FP8 and brought back, or gathered and reduced. Then
    each GPU of an attention has a part of its tokens, and gathers the others'.
    """
    assert facts.moe is not None
    inner, others = layout.attention, (layout.tp - 1) / layout.tp
    if layout.ep > 1:
        code = facts.hidden + 4 * facts.hidden / 128 + HEADER
        reached = (layout.ep - 1) * (1 - (1 - 1 / layout.ep) ** facts.moe.topk)  # other ranks, once each
        copies = shape.tokens / inner * reached
        found = [
            Collective("dispatch to experts", layers, layout.tp, copies * code),
            Collective("combine", layers, layout.tp, copies * row),
        ]
    else:
        tokens = shape.tokens * layout.dp
        found = [
            Collective("all-gather of tokens", layers, layout.tp, tokens * row * (layout.dp - 1) / layout.dp),
            Collective("reduce-scatter", layers, layout.tp, tokens * row * others),
        ]
    if inner > 1:
        found.append(
            Collective("all-gather within an attention", layers, inner, shape.tokens * row * (inner - 1) / inner)
        )
    return found
