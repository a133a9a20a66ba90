"""The least time that a step can take on a device: each phase reads its weights and its context once, or computes, whichever takes longer.

Counted as `max(bytes / read bandwidth, FLOPs / matmul rate)` for each phase, summed: projections, attention, MLP or experts of each layer,
and the head. Activations are not counted. Of experts only those count that a token chose: measured, or what uniform routing expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.config.model import ModelFacts, Moe


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device was measured to do: bytes read a second, FLOP/s of large bf16 and FP8 products."""

    read: float
    bf16: float
    fp8: float


@dataclass(frozen=True, slots=True)
class Phase:
    """name: of the kind. bytes: of weights and context. bf16, fp8: FLOPs."""

    name: str
    bytes: float
    bf16: float = 0.0
    fp8: float = 0.0

    def seconds(self, top: Ceilings) -> float:
        return max(self.bytes / top.read, self.bf16 / top.bf16 + self.fp8 / top.fp8)


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: rows that each compute `new` tokens, the last of `context`, and sample one. covered: distinct routed experts of each layer with
    experts, () for what uniform routing expects."""

    rows: int
    new: int
    context: int
    covered: tuple[float, ...] = ()

    @property
    def tokens(self) -> int:
        return self.rows * self.new

    @property
    def pairs(self) -> int:
        """Of a token and a position that it attends to."""
        return self.rows * (self.new * (self.context - self.new) + self.new * (self.new + 1) // 2)


def phases(facts: ModelFacts, shape: Shape) -> list[Phase]:
    """All of a step, in bf16, or in FP8 where the checkpoint's weights are."""
    made: list[Phase] = []
    with_experts = 0
    for layer in range(facts.layers):
        made += _attention(facts, shape)
        if facts.moe is not None and facts.moe.in_layer(layer):
            covered = shape.covered[with_experts] if shape.covered else uniform(facts.moe, shape.tokens)
            with_experts += 1
            made.append(_experts(facts, facts.moe, shape.tokens, covered))
        else:
            made.append(_product("mlp", facts, shape.tokens, 3 * facts.hidden * facts.intermediate))
    weights = facts.vocab * facts.hidden
    return [*made, Phase("head", 2 * weights, bf16=2 * shape.rows * weights)]


def seconds(phases: Sequence[Phase], top: Ceilings) -> float:
    return sum(phase.seconds(top) for phase in phases)


def by_name(phases: Sequence[Phase], top: Ceilings) -> dict[str, float]:
    """Seconds of each kind of phase."""
    found: dict[str, float] = {}
    for phase in phases:
        found[phase.name] = found.get(phase.name, 0.0) + phase.seconds(top)
    return found


def uniform(moe: Moe, tokens: int) -> float:
    """Distinct routed experts that `tokens` uniform choices are expected to reach."""
    return moe.experts * (1.0 - (1.0 - moe.topk / moe.experts) ** tokens)


def _product(name: str, facts: ModelFacts, tokens: int, weights: int, plain: int = 0) -> Phase:
    """Of `weights` numbers in the checkpoint's type and `plain` ones in bf16, with every token."""
    flops = 2.0 * tokens * weights
    if facts.fp8_block is None:
        return Phase(name, 2 * (weights + plain), bf16=flops + 2.0 * tokens * plain)
    return Phase(name, weights + 2 * plain, bf16=2.0 * tokens * plain, fp8=flops)


def _experts(facts: ModelFacts, moe: Moe, tokens: int, covered: float) -> Phase:
    each = 3 * facts.hidden * moe.intermediate
    flops = 2.0 * tokens * (moe.topk + moe.shared) * each
    gate = facts.hidden * moe.experts
    moved = (covered + moe.shared) * each
    if facts.fp8_block is None:
        return Phase("experts", 2 * (moved + gate), bf16=flops + 2.0 * tokens * gate)
    return Phase("experts", moved + 2 * gate, bf16=2.0 * tokens * gate, fp8=flops)


def _attention(facts: ModelFacts, shape: Shape) -> list[Phase]:
    """Projections, and scores with sums. Latents: one token attends to them as they are, more decompress them."""
    if facts.mla is None:
        width = facts.heads * facts.head_dim
        weights = facts.hidden * (2 * width + 2 * facts.kv_heads * facts.head_dim)
        kept = 2 * facts.kv_heads * facts.head_dim
        return [
            _product("projections", facts, shape.tokens, weights),
            Phase("attention", 2 * shape.rows * shape.context * kept, bf16=4.0 * shape.pairs * width),
        ]
    mla, heads = facts.mla, facts.heads
    query = heads * (mla.nope + mla.rope)
    weights = facts.hidden * (mla.kv_lora + mla.rope) + heads * mla.v * facts.hidden
    weights += mla.q_lora * (facts.hidden + query) if mla.q_lora else facts.hidden * query
    pair = 2 * mla.kv_lora + mla.rope if shape.new == 1 else mla.nope + mla.rope + mla.v
    kept = mla.kv_lora + mla.rope
    return [
        _product("projections", facts, shape.tokens, weights, plain=mla.kv_lora * heads * (mla.nope + mla.v)),
        Phase("attention", 2 * shape.rows * shape.context * kept, bf16=2.0 * shape.pairs * heads * pair),
    ]
