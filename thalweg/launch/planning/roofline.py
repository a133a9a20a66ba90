"""The least time that a step can take on a device: each phase reads its weights and its context once, or computes,
whichever takes longer.

Counted as `max(bytes / read bandwidth, FLOPs / matmul rate)` for each phase, summed over projections, attention, index
scores, MLPs, experts and the head; what GPUs of a layout send each other comes on top (`traffic`). Activations are not
counted. Weights have the checkpoint's type. Of experts only those count that a token chose: measured, or what routing
is expected to reach. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thalweg.config.model import IndexerFacts, MlaFacts, ModelFacts, MoeFacts
from thalweg.launch.planning.layouts import ONE, ParallelLayout
from thalweg.launch.planning.weights import EXPERTS, NumberBytes, inventory
from thalweg.quant.catalog import scheme_of
from thalweg.quant.scheme import UNQUANTIZED

# bytes: 512 codes, 4 float32 multipliers, 64 rotary numbers in bf16, as kernels of sparse attention read a latent of
# DeepSeek's
RECORD = 656


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device does at best: bytes read a second, FLOP/s of large bf16 and FP8 products. Of a CPU both are those
    of float32.
    """

    read: float
    bf16: float
    fp8: float


@dataclass(frozen=True, slots=True)
class StepPhase:
    """name: of the kind. bytes: of weights and context. bf16, fp8: FLOPs."""

    name: str
    bytes: float
    bf16: float = 0.0
    fp8: float = 0.0

    def seconds(self, top: Ceilings) -> float:
        return max(self.bytes / top.read, self.bf16 / top.bf16 + self.fp8 / top.fp8)

    def times(self, count: float) -> StepPhase:
        return StepPhase(self.name, self.bytes * count, self.bf16 * count, self.fp8 * count)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step of one attention: rows that each compute `new` tokens, the last of `context`, and sample one, or all of
    them (`scored`). covered: distinct routed experts of each layer with experts, () for what routing is expected to
    reach; skew: see `expected`. attentions: how many of a layout's have such rows, 0 for all.
    """

    rows: int
    new: int
    context: int
    covered: tuple[float, ...] = ()
    skew: float = 0.0
    scored: bool = False
    attentions: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.new

    @property
    def pairs(self) -> int:
        """Of a token and a position that it attends to."""
        return self.rows * (self.new * (self.context - self.new) + self.new * (self.new + 1) // 2)

    def chosen(self, most: int) -> int:
        """The same where a token attends to no more than `most` positions."""
        first = self.context - self.new + 1  # positions that the first token sees
        full = max(0, self.context - max(first, most + 1) + 1)  # tokens that see more than most
        rest = self.new - full
        return self.rows * (rest * (2 * first + rest - 1) // 2 + full * most)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes that a token leaves in the KV cache of one layer: attended to (latent, or all keys and values), and an
    indexer's key.
    """

    attended: float
    index: float = 0.0

    @staticmethod
    def of(facts: ModelFacts, kv: float = 2.0, index: float = 2.0, record: bool = False) -> KVBytes:
        """kv, index: bytes of a number. record: latents as FP8 records of `RECORD` bytes."""
        key = 0.0 if facts.indexer is None else facts.indexer.dim * index
        if facts.mla is None:
            return KVBytes(2 * facts.kv_heads * facts.head_dim * kv, key)
        return KVBytes(RECORD if record else (facts.mla.kv_lora + facts.mla.rope) * kv, key)

    @staticmethod
    def fp8_index(facts: ModelFacts) -> float:
        """Bytes of a number of index keys that are FP8 with one float32 multiplier a key."""
        return 0.0 if facts.indexer is None else (facts.indexer.dim + 4) / facts.indexer.dim

    def a_token(self, facts: ModelFacts) -> float:
        """Bytes in all layers."""
        indexers = 0 if facts.indexer is None else sum(facts.indexer.full)
        return facts.layers * self.attended + indexers * self.index


def phases(
    facts: ModelFacts,
    shape: StepShape,
    layout: ParallelLayout = ONE,
    widths: NumberBytes | None = None,
    kept: KVBytes | None = None,
) -> list[StepPhase]:
    """All of a step on one GPU of each stage, the stages behind each other. shape: of each attention of the layout, all
    alike. widths, kept: default as published, and bf16.
    """
    widths, kept = widths or NumberBytes.of(facts), kept or KVBytes.of(facts)
    made: dict[str, StepPhase] = {}
    for one in inventory(facts):
        if one.phase and one.cut != EXPERTS and one.layers:
            share = one.layers * one.share(layout, facts)
            rows = shape.rows if one.phase == "head" and not shape.scored else shape.tokens
            fp8, bf16 = _rates(facts, widths, 2.0 * rows * one.quantized, 2.0 * rows * one.plain)
            _add(made, StepPhase(one.phase, widths.read(one), bf16, fp8).times(share))
    attended = _attended(facts, shape, kept, layout)
    parts = [made.pop("projections"), *attended]
    if "mlp" in made:
        parts.append(made.pop("mlp"))
    if facts.moe is not None and "experts" in made:
        parts += _experts(facts, facts.moe, shape, layout, widths, made.pop("experts"))
    return [*parts, made.pop("head")]


def nextn(facts: ModelFacts) -> ModelFacts:
    """Of a model that is one layer with experts, as a NextN layer is. Raises ValueError for a model without experts,
    which has none.
    """
    if facts.moe is None:
        raise ValueError(f"{facts.architecture} has no NextN layer")
    indexer = None if facts.indexer is None else replace(facts.indexer, full=(True,))
    return replace(facts, layers=1, moe=replace(facts.moe, sparse=(True,)), indexer=indexer)


def verified(shape: StepShape, drafts: int) -> StepShape:
    """A decode step that verifies so many drafts of each row, too."""
    return replace(shape, new=shape.new + drafts, context=shape.context + drafts, scored=True)


def seconds(phases: Sequence[StepPhase], top: Ceilings) -> float:
    return sum(phase.seconds(top) for phase in phases)


def by_name(phases: Sequence[StepPhase], top: Ceilings) -> dict[str, float]:
    """Seconds of each kind of phase."""
    found: dict[str, float] = {}
    for phase in phases:
        found[phase.name] = found.get(phase.name, 0.0) + phase.seconds(top)
    return found


def uniform(moe: MoeFacts, tokens: int) -> float:
    """Distinct routed experts that `tokens` uniform choices are expected to reach."""
    return moe.experts * (1.0 - (1.0 - moe.topk / moe.experts) ** tokens)


def expected(moe: MoeFacts, tokens: int, skew: float = 0.0) -> float:
    """Distinct routed experts that tokens are expected to reach where the popularity of the i-th expert goes by i to
    the power of -skew (0: uniform): an expert is among a token's with topk times its popularity, or surely.
    """
    if not skew:
        return uniform(moe, tokens)
    popularity = [rank**-skew for rank in range(1, moe.experts + 1)]
    total, found, left = sum(popularity), 0.0, float(moe.topk)
    for one in popularity:  # what the first ones cannot take, since a token chooses each once, goes to the others
        chance = min(1.0, left * one / total)
        total, left = total - one, left - chance
        found += 1.0 - (1.0 - chance) ** tokens
    return found


def _add(made: dict[str, StepPhase], phase: StepPhase) -> None:
    has = made.get(phase.name, StepPhase(phase.name, 0.0))
    made[phase.name] = replace(has, bytes=has.bytes + phase.bytes, bf16=has.bf16 + phase.bf16, fp8=has.fp8 + phase.fp8)


def _rates(facts: ModelFacts, widths: NumberBytes, quantized: float, plain: float) -> tuple[float, float]:
    """FLOPs at (FP8's, bf16's) rate."""
    if scheme_of(facts.quantization_config) is UNQUANTIZED or widths.quantized > 1:
        return 0.0, quantized + plain
    return quantized, plain


def _experts(
    facts: ModelFacts, moe: MoeFacts, shape: StepShape, layout: ParallelLayout, widths: NumberBytes, rest: StepPhase
) -> list[StepPhase]:
    """Routed experts, with `rest` of shared experts and router in all layers; one for each coverage that was
    measured.
    """
    layers = sum(moe.in_layer(layer) for layer in range(facts.layers))
    tokens, each = shape.tokens * (shape.attentions or layout.dp), 3 * facts.hidden * moe.intermediate
    flops = 2.0 * tokens * moe.topk * each / layout.tp
    fp8, bf16 = _rates(facts, widths, flops, 0.0)
    coverage = shape.covered or (expected(moe, tokens, shape.skew),)
    share, made = layers / len(coverage), []
    for covered in coverage:
        routed = StepPhase("experts", covered * each * widths.quantized / layout.tp, bf16, fp8).times(share)
        one = {"experts": rest.times(1 / len(coverage))}
        _add(one, routed)
        made.append(one["experts"])
    return made


def _attended(facts: ModelFacts, shape: StepShape, kept: KVBytes, layout: ParallelLayout) -> list[StepPhase]:
    """Scores and sums over the context, and before it an indexer's choice."""
    layers, heads = facts.layers, facts.heads / layout.attention
    if facts.mla is None:
        moved = shape.rows * shape.context * kept.attended / min(layout.attention, facts.kv_heads)
        return [StepPhase("attention", moved, bf16=4.0 * shape.pairs * heads * facts.head_dim).times(layers)]
    if facts.indexer is None:
        moved = shape.rows * shape.context * kept.attended
        flops = min(absorbed(facts.mla, heads, shape.pairs), decompressed(facts.mla, heads, shape))
        return [StepPhase("attention", moved, bf16=flops).times(layers)]
    read = shape.rows * min(shape.context, facts.indexer.topk * shape.new)
    chosen = absorbed(facts.mla, heads, shape.chosen(facts.indexer.topk))
    flops = min(chosen, decompressed(facts.mla, heads, shape))
    return [
        StepPhase("attention", read * kept.attended, bf16=flops).times(layers),
        _index(facts.indexer, shape, kept).times(sum(facts.indexer.full)),
    ]


def absorbed(mla: MlaFacts, heads: float, pairs: float) -> float:
    """FLOPs of a layer that attends to latents as they are."""
    return 2.0 * pairs * heads * (2 * mla.kv_lora + mla.rope)


def decompressed(mla: MlaFacts, heads: float, shape: StepShape) -> float:
    """FLOPs of a layer that attends to keys and values; those of the cached context are made anew, the others' count as
    projections.
    """
    cached = shape.rows * (shape.context - shape.new)
    again = 2.0 * cached * heads * mla.kv_lora * (mla.nope + mla.v)
    return again + 2.0 * shape.pairs * heads * (mla.nope + mla.rope + mla.v)


def _index(index: IndexerFacts, shape: StepShape, kept: KVBytes) -> StepPhase:
    """Scores of every position, in FP8 where the keys are; nothing is scored where every token sees its whole context
    anyway.
    """
    if shape.context <= index.topk:
        return StepPhase("index", 0.0)
    flops = 2.0 * shape.pairs * index.heads * index.dim
    moved = shape.rows * shape.context * kept.index
    return StepPhase("index", moved, fp8=flops) if kept.index < 2 * index.dim else StepPhase("index", moved, bf16=flops)
