"""The least time that a step can take on a device: each phase reads its weights and its context once, or computes,
whichever takes longer.

The sum over projections, attention, index scores, MLPs, experts and the head of `max(bytes / read bandwidth, FLOPs /
matmul rate)`; communication comes on top (`collectives`). Activations are not counted. Of experts only those count that
a token chose: measured, or what routing is expected to reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from thalweg.config.model import IndexerFacts, MlaFacts, MoeFacts
from thalweg.launch.planning.layouts import ParallelLayout
from thalweg.launch.planning.weights import KVBytes, RankModel, WeightGroup

ORDER = ("join", "projections", "attention", "index", "mlp", "experts", "head")  # of phases in reports


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peak rates of a device."""

    read: float  # bytes a second
    bf16: float  # FLOP/s of large products; on a CPU of float32
    fp8: float
    fp4: float = 0.0  # 0: FP4 weights multiply 16-bit activations, at the rate of bf16


@dataclass(frozen=True, slots=True)
class StepPhase:
    """A kind of work in a step."""

    name: str
    bytes: float  # weights and context
    bf16: float = 0.0  # FLOPs
    fp8: float = 0.0
    fp4: float = 0.0

    def seconds(self, top: Ceilings) -> float:
        products = self.bf16 / top.bf16 + self.fp8 / top.fp8 + self.fp4 / (top.fp4 or top.bf16)
        return max(self.bytes / top.read, products)

    def plus(self, other: StepPhase) -> StepPhase:
        bf16, fp8, fp4 = self.bf16 + other.bf16, self.fp8 + other.fp8, self.fp4 + other.fp4
        return StepPhase(self.name, self.bytes + other.bytes, bf16, fp8, fp4)

    def times(self, count: float) -> StepPhase:
        return StepPhase(self.name, self.bytes * count, self.bf16 * count, self.fp8 * count, self.fp4 * count)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of one attention: rows that each compute `new` tokens, the last of `context`."""

    rows: int
    new: int
    context: int
    covered: tuple[float, ...] = ()  # distinct routed experts of each layer with experts; (): as expected
    skew: float = 0.0  # see `expected`
    scored: bool = False  # every token is sampled, not the last alone
    attentions: int = 0  # how many of a layout's have such rows; 0: all

    @property
    def tokens(self) -> int:
        return self.rows * self.new

    @property
    def pairs(self) -> int:
        """Pairs of a token and a position that it attends to."""
        return self.rows * (self.new * (self.context - self.new) + self.new * (self.new + 1) // 2)

    def chosen(self, most: int) -> int:
        """The same where a token attends to at most `most` positions."""
        first = self.context - self.new + 1  # positions that the first token sees
        full = max(0, self.context - max(first, most + 1) + 1)  # tokens that see more than most
        rest = self.new - full
        return self.rows * (rest * (2 * first + rest - 1) // 2 + full * most)


def divided(layout: ParallelLayout, requests: int, new: int, context: int, cohorts: int = 1, **more: Any) -> StepShape:
    """The step of each attention of a layout. requests: on the whole machine. cohorts: that take turns in a
    pipeline. more: further fields of the shape.
    """
    on_a_copy = -(-requests // layout.copies)
    rows = -(-on_a_copy // (layout.dp * cohorts))
    return StepShape(rows, new, context, attentions=min(on_a_copy, layout.dp), **more)


def products(group: WeightGroup, tokens: float, read: float) -> StepPhase:
    """Of this many tokens with all weights of a group. read: bytes of these."""
    flops = 2.0 * tokens
    return StepPhase(group.phase, read, flops * group.high, flops * group.low, flops * group.fp4)


def phases(model: RankModel, shape: StepShape) -> list[StepPhase]:
    """All of a step on one GPU of each stage, the stages one after the other. shape: of each attention, all alike."""
    parts: dict[str, StepPhase] = {}
    own = 1 / model.layout.cp  # of the tokens; all GPUs compute the logits
    for group in model.groups:
        if group.phase and not group.is_routed:
            sampled = shape.tokens if shape.scored else shape.rows
            rows = sampled if group.phase == "head" else own * shape.tokens
            phase = products(group, rows, group.read)
            parts[group.phase] = parts[group.phase].plus(phase) if group.phase in parts else phase
    experts: list[StepPhase] = []
    routed = next((group for group in model.groups if group.is_routed), None)
    if model.facts.moe is not None and routed is not None:
        experts = _experts(model, model.facts.moe, shape, routed, parts.pop("experts"))
    attention = [replace(one, bf16=own * one.bf16, fp8=own * one.fp8) for one in _attention(model, shape)]
    return sorted([*parts.values(), *attention, *experts], key=lambda part: ORDER.index(part.name))


def verified(shape: StepShape, drafts: int) -> StepShape:
    """A decode step that also verifies this many drafts of each row."""
    return replace(shape, new=shape.new + drafts, context=shape.context + drafts, scored=True)


def seconds(phases: Sequence[StepPhase], top: Ceilings) -> float:
    return sum(phase.seconds(top) for phase in phases)


def by_name(phases: Sequence[StepPhase], top: Ceilings) -> dict[str, float]:
    """Seconds of each kind of phase."""
    times: dict[str, float] = {}
    for phase in phases:
        times[phase.name] = times.get(phase.name, 0.0) + phase.seconds(top)
    return times


def expected(moe: MoeFacts, tokens: int, skew: float = 0.0) -> float:
    """Distinct routed experts that tokens are expected to reach where the i-th expert's popularity is proportional to i
    to the power of -skew (0: uniform). A token chooses an expert with topk times its popularity, at most surely.
    """
    popularity = [rank**-skew for rank in range(1, moe.experts + 1)]
    total, reached, left = sum(popularity), 0.0, float(moe.topk)
    for weight in popularity:  # a token chooses each once, so what the first cannot take goes to the others
        chance = min(1.0, left * weight / total)
        total, left = total - weight, left - chance
        reached += 1.0 - (1.0 - chance) ** tokens
    return reached


def _experts(
    model: RankModel, moe: MoeFacts, shape: StepShape, routed: WeightGroup, rest: StepPhase
) -> list[StepPhase]:
    """The experts of all layers; one phase for each coverage that was measured. rest: shared experts and routers."""
    tokens = shape.tokens * (shape.attentions or model.layout.dp)
    coverage = shape.covered or (expected(moe, tokens, shape.skew),)
    parts = []
    for covered in coverage:
        layers = rest.plus(products(routed, tokens * moe.topk / moe.experts, covered / moe.experts * routed.read))
        parts.append(layers.times(1 / len(coverage)))
    return parts


def _attention(model: RankModel, shape: StepShape) -> list[StepPhase]:
    """Scores and sums over the context, and before them an indexer's choice."""
    facts, kv, heads = model.facts, model.kv, model.facts.heads / model.layout.attention
    context = shape.rows * shape.context / model.layout.dcp
    if facts.mla is None:
        flops = 4.0 * shape.pairs * heads * facts.head_dim
        return [StepPhase("attention", context * kv.attended, flops).times(facts.layers)]
    if facts.indexer is None:
        flops = min(absorbed(facts.mla, heads, shape.pairs), decompressed(facts.mla, heads, shape))
        return [StepPhase("attention", context * kv.attended, flops).times(facts.layers)]
    selected = shape.rows * min(shape.context, facts.indexer.topk * shape.new) / model.layout.dcp
    sparse = absorbed(facts.mla, heads, shape.chosen(facts.indexer.topk))
    flops = min(sparse, decompressed(facts.mla, heads, shape))
    return [
        StepPhase("attention", selected * kv.attended, flops).times(facts.layers),
        _index(facts.indexer, shape, kv, model.layout.indexer).times(sum(facts.indexer.full) / model.layout.dcp),
    ]


def absorbed(mla: MlaFacts, heads: float, pairs: float) -> float:
    """FLOPs of a layer that attends to latents as they are."""
    return 2.0 * pairs * heads * (2 * mla.kv_lora + mla.rope)


def decompressed(mla: MlaFacts, heads: float, shape: StepShape) -> float:
    """FLOPs of a layer that attends to keys and values. Those of the cached context are made again; the others count as
    projections.
    """
    cached = shape.rows * (shape.context - shape.new)
    again = 2.0 * cached * heads * mla.kv_lora * (mla.nope + mla.v)
    return again + 2.0 * shape.pairs * heads * (mla.nope + mla.rope + mla.v)


def _index(index: IndexerFacts, shape: StepShape, kv: KVBytes, ranks: int) -> StepPhase:
    """Scores of every position, in FP8 where the keys are, by heads that so many ranks share. Where every token sees
    its whole context nothing is scored.
    """
    if shape.context <= index.topk:
        return StepPhase("index", 0.0)
    flops = 2.0 * shape.pairs * index.heads * index.dim / ranks
    is_fp8 = kv.index < 2 * index.dim
    return StepPhase("index", shape.rows * shape.context * kv.index, 0.0 if is_fp8 else flops, flops if is_fp8 else 0.0)
