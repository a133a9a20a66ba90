"""Collectives of a step between the GPUs of a layout, and their least time when nothing else hides it. No
torch.

Of a group on several nodes some bytes cross the network, at most `NETWORK` a second for each GPU, while the others
cross NVLink. What goes to all ranks alike enters a node once, each of its GPUs carrying a part.
"""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.machines import NETWORK, Hardware
from thalweg.config.model import ModelFacts
from thalweg.launch.planning.layouts import ParallelLayout
from thalweg.launch.planning.roofline import StepShape

# the least that one costs however little it carries; eight H200s were measured at 11.5 us with the kernels there are,
# 14 KiB cross in under 5
LATENCY = 5e-6
ACTIVATION = 2  # bytes of a number between layers
LSE = 4  # bytes of a head's log-sum-exp
SCORE = 4  # bytes of a position's score by an indexer
CANDIDATE = 8  # bytes of a score and its position
HEADER = 16  # bytes before a token that is dispatched
SHARED, PAIRWISE, ONWARD = "shared", "pairwise", "onward"  # to all ranks alike, to each its own, to the next rank


@dataclass(frozen=True, slots=True)
class Collective:
    """`count` of a kind in a step. ranks: that take part. sent: bytes that one GPU sends in each. goes: SHARED,
    PAIRWISE or ONWARD. latency: seconds that each costs at least.
    """

    name: str
    count: int
    ranks: int
    sent: float
    goes: str = SHARED
    latency: float = LATENCY

    def seconds(self, hardware: Hardware) -> float:
        outside = self._outside(hardware.gpus_of_node)
        inside = self.sent if self.goes == SHARED else self.sent * (1 - outside)
        return self.count * (self.latency + max(inside / hardware.chip.link, self.sent * outside / NETWORK))

    def _outside(self, node: int) -> float:
        """Share of the bytes that a GPU sends over the network. node: GPUs of one."""
        if self.ranks <= node:
            return 0.0
        if self.goes == ONWARD:
            return min((self.ranks / node - 1) / self.count, 1.0)
        return (self.ranks - node) / (self.ranks - 1) / (node if self.goes == SHARED else 1)


def collectives(facts: ModelFacts, shape: StepShape, layout: ParallelLayout) -> list[Collective]:
    """All of a step of every attention with this shape, on one GPU of each stage."""
    sparse = 0 if facts.moe is None else sum(facts.moe.in_layer(layer) for layer in range(facts.layers))
    row = facts.hidden * ACTIVATION
    inner, found, has_others = layout.attention, [], layout.dp * layout.cp > 1
    among, tokens = (inner - 1) / inner, shape.tokens / layout.cp
    if inner > 1:
        # after attention and after dense MLPs; where all GPUs share one attention, also after experts
        count = 2 * facts.layers - (sparse if has_others else 0)
        found.append(Collective("all-reduce", count, inner, 2 * among * tokens * row))
        logits = shape.rows * facts.vocab * ACTIVATION
        found.append(Collective("all-gather of logits", 1, inner, among / inner * logits))
    if layout.indexer > 1 and facts.indexer is not None and shape.context > facts.indexer.topk:
        scores = (layout.indexer - 1) * shape.pairs / layout.cp * SCORE
        found.append(Collective("all-gather of scores", sum(facts.indexer.full), layout.indexer, scores))
    if layout.dcp > 1:
        found += _around_attention(facts, shape, layout)
    if facts.moe is not None and has_others:
        found += _around_experts(facts, tokens, layout, sparse, row)
    if layout.cp > 1:
        stored, ranks, others = _stored(facts, inner), layout.cp * inner, layout.cp - 1
        found.append(Collective("all-gather of stored tokens", facts.layers, ranks, others * tokens * stored))
        found.append(Collective("all-gather of hidden states", 1, ranks, others * tokens * row))
    if layout.pp > 1:
        ranks = layout.tp * layout.pp
        found.append(Collective("to the next stage", layout.pp - 1, ranks, tokens * row / inner, ONWARD))
    return found


def _stored(facts: ModelFacts, heads: int) -> float:
    """Bytes that a layer keeps of a token in bfloat16 on one of the ranks that share its heads."""
    if facts.mla is None:
        return ACTIVATION * 2 * max(facts.kv_heads / heads, 1) * facts.head_dim
    return ACTIVATION * (facts.mla.kv_lora + facts.mla.rope + (0 if facts.indexer is None else facts.indexer.dim))


def sending_seconds(facts: ModelFacts, shape: StepShape, layout: ParallelLayout, hardware: Hardware | None) -> float:
    """The least time of all collectives of a step; 0.0 for GPUs whose links are unknown."""
    return 0.0 if hardware is None else sum(one.seconds(hardware) for one in collectives(facts, shape, layout))


def _around_attention(facts: ModelFacts, shape: StepShape, layout: ParallelLayout) -> list[Collective]:
    """Queries of all GPUs that share a context meet each part of it; outputs, each with its log-sum-exp, go back. An
    indexer's candidates, a score and a position each, are gathered.
    """
    ranks, heads, mla = layout.dcp, facts.heads / layout.attention, facts.mla
    query, out = (facts.head_dim,) * 2 if mla is None else (mla.kv_lora + mla.rope, mla.kv_lora)
    tokens, others = shape.tokens / layout.cp, ranks - 1
    each = tokens * heads
    found = [
        Collective("all-gather of queries", facts.layers, ranks, others * each * query * ACTIVATION),
        Collective("all-to-all of attention", facts.layers, ranks, others * each * (out * ACTIVATION + LSE), PAIRWISE),
    ]
    if facts.indexer is not None and shape.context > facts.indexer.topk:
        chosen = min(facts.indexer.topk, shape.context / ranks)
        candidates = others * tokens * chosen * CANDIDATE
        found.append(Collective("all-gather of candidates", sum(facts.indexer.full), ranks, candidates))
    return found


def _around_experts(facts: ModelFacts, own: float, layout: ParallelLayout, layers: int, row: float) -> list[Collective]:
    """Tokens of all attentions meet at the experts: dealt out in FP8 and brought back, or gathered and reduced. Then
    each GPU of an attention has a part of its tokens, and gathers the others'. own: tokens of a GPU.
    """
    assert facts.moe is not None
    inner, groups, others = layout.attention, layout.dp * layout.cp, (layout.tp - 1) / layout.tp
    if layout.ep > 1:
        code = facts.hidden + 4 * facts.hidden / 128 + HEADER
        reached = (layout.tp - 1) * (1 - (1 - 1 / layout.ep) ** facts.moe.topk)  # other ranks, once each
        copies = own / inner * reached
        found = [
            Collective("dispatch to experts", layers, layout.tp, copies * code, PAIRWISE),
            Collective("combine", layers, layout.tp, copies * row, PAIRWISE),
        ]
    else:
        tokens = own * groups
        found = [
            Collective("all-gather of tokens", layers, layout.tp, tokens * row * (groups - 1) / groups),
            Collective("reduce-scatter", layers, layout.tp, tokens * row * others),
        ]
    if inner > 1:
        found.append(Collective("all-gather within an attention", layers, inner, own * row * (inner - 1) / inner))
    return found
