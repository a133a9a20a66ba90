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
    inner, found = layout.attention, []
    among = (inner - 1) / inner
    if inner > 1:
        # after attention and after dense MLPs; where all GPUs share one attention, also after experts
        count = 2 * facts.layers - (sparse if layout.dp > 1 else 0)
        found.append(Collective("all-reduce", count, inner, 2 * among * shape.tokens * row))
        logits = shape.rows * facts.vocab * ACTIVATION
        found.append(Collective("all-gather of logits", 1, inner, among / inner * logits))
    if facts.moe is not None and layout.dp > 1:
        found += _around_experts(facts, shape, layout, sparse, row)
    if layout.pp > 1:
        ranks = layout.tp * layout.pp
        found.append(Collective("to the next stage", layout.pp - 1, ranks, shape.tokens * row / inner, ONWARD))
    return found


def sending_seconds(facts: ModelFacts, shape: StepShape, layout: ParallelLayout, hardware: Hardware | None) -> float:
    """The least time of all collectives of a step; 0.0 for GPUs whose links are unknown."""
    return 0.0 if hardware is None else sum(one.seconds(hardware) for one in collectives(facts, shape, layout))


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
            Collective("dispatch to experts", layers, layout.tp, copies * code, PAIRWISE),
            Collective("combine", layers, layout.tp, copies * row, PAIRWISE),
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
