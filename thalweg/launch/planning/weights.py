"""A model's weights by kind, from its facts alone: how many numbers, in which type, and how a layout cuts them. No
torch.

Names of the cuts: HEADS (of queries; the vocabulary and the width of dense MLPs, too) goes by the GPUs that share an
attention, KEYS by at most as many as there are key heads, EXPERTS by all GPUs of a stage, WHOLE is on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.config.model import ModelFacts, MoeFacts
from thalweg.launch.planning.layouts import ONE, ParallelLayout
from thalweg.quant.catalog import quantized

HEADS, KEYS, EXPERTS, WHOLE = "heads", "keys", "experts", "whole"
BLOCK_SCALE = 4  # bytes of the multiplier of an FP8 block
EXACT = 4  # bytes of a float32
PLAIN = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Of one kind in `layers` layers; the numbers are those of one layer. quantized: in the checkpoint's type; plain:
    in its 16-bit type; exact: float32; biases: in its 16-bit type, multiplied by nothing. phase: of a step that reads
    them, "" where none does. kept_plain: of the quantized ones, those that this engine keeps in its own type.
    """

    name: str
    phase: str
    cut: str
    layers: int
    quantized: int = 0
    plain: int = 0
    exact: int = 0
    biases: int = 0
    kept_plain: int = 0

    @property
    def numbers(self) -> int:
        """In all layers."""
        return self.layers * (self.multiplied + self.exact + self.biases)

    @property
    def in_layers(self) -> bool:
        """Whether a stage of a pipeline has its part of them; head, embedding and the last norm stay whole."""
        return self.layers > 1

    @property
    def multiplied(self) -> int:
        """Of one layer, those that tokens are multiplied by."""
        return self.quantized + self.plain

    def share(self, layout: ParallelLayout, facts: ModelFacts) -> float:
        """Of the numbers, that one GPU of a stage holds."""
        if self.cut == EXPERTS:
            return 1 / layout.tp
        if self.cut == KEYS:
            return 1 / min(layout.attention, facts.kv_heads)
        return 1 / layout.attention if self.cut == HEADS else 1.0


@dataclass(frozen=True, slots=True)
class NumberBytes:
    """Bytes of a number: quantized, plain. scale: of block multipliers, for each quantized number."""

    quantized: float
    plain: float
    scale: float = 0.0

    @staticmethod
    def of(facts: ModelFacts, dtype: str = "bfloat16", dequantized: bool = False) -> NumberBytes:
        """As a checkpoint of these facts has them. dtype: of what is not quantized. dequantized: FP8 weights become
        that, too.
        """
        plain = PLAIN[dtype]
        scheme = quantized(facts.quantization_config)
        if scheme is None or dequantized:
            return NumberBytes(plain, plain)
        rows, columns = scheme.block
        return NumberBytes(1.0, plain, BLOCK_SCALE / (rows * columns))

    def read(self, one: WeightGroup) -> float:
        """Bytes of one layer's numbers that a step reads: as published, norms and the blocks' multipliers not
        counted.
        """
        return one.quantized * self.quantized + (one.plain + one.biases) * self.plain

    def published(self, one: WeightGroup) -> float:
        """Bytes of one layer's in a checkpoint that has no float32, the blocks' multipliers not counted."""
        return self.read(one) + one.exact * self.plain

    def held(self, one: WeightGroup) -> float:
        """Bytes that one layer's take in memory as this engine loads them."""
        quantized, plain = one.quantized - one.kept_plain, one.kept_plain + one.plain + one.biases
        return quantized * (self.quantized + self.scale) + plain * self.plain + one.exact * EXACT


def inventory(facts: ModelFacts) -> tuple[WeightGroup, ...]:
    """All weights but NextN layers'."""
    layers, hidden, vocab = facts.layers, facts.hidden, facts.vocab * facts.hidden
    sparse = 0 if facts.moe is None else sum(facts.moe.in_layer(layer) for layer in range(layers))
    biases = (2 * facts.intermediate + hidden) * facts.mlp_bias
    norms = 2 * hidden + 2 * facts.head_dim * (facts.architecture == "Qwen3ForCausalLM")  # it norms queries and keys
    found = [
        *_attention(facts),
        WeightGroup(
            "dense MLP", "mlp", HEADS, layers - sparse, quantized=3 * hidden * facts.intermediate, biases=biases
        ),
    ]
    if facts.moe is not None:
        found += _moe(facts, facts.moe, sparse)
    found.append(WeightGroup("norms", "", WHOLE, layers, exact=norms))
    found.append(WeightGroup("last norm", "", WHOLE, 1, exact=hidden))
    found.append(WeightGroup("head", "head", HEADS, 1, plain=vocab))
    if not facts.tied:
        found.append(WeightGroup("embedding", "", HEADS, 1, plain=vocab))
    return tuple(one for one in found if one.numbers)


def _attention(facts: ModelFacts) -> list[WeightGroup]:
    layers, hidden = facts.layers, facts.hidden
    if facts.mla is None:
        queries, keys = facts.heads * facts.head_dim, 2 * facts.kv_heads * facts.head_dim
        biases = queries * facts.qkv_bias + hidden * facts.attention_bias
        return [
            WeightGroup("queries, output", "projections", HEADS, layers, quantized=2 * hidden * queries, biases=biases),
            WeightGroup(
                "keys, values", "projections", KEYS, layers, quantized=hidden * keys, biases=keys * facts.qkv_bias
            ),
        ]
    mla, heads = facts.mla, facts.heads
    up = mla.kv_lora * heads * (mla.nope + mla.v)
    cut = (mla.q_lora or hidden) * heads * (mla.nope + mla.rope) + heads * mla.v * hidden
    whole = hidden * (mla.q_lora + mla.kv_lora + mla.rope)
    found = [
        WeightGroup("MLA, by heads", "projections", HEADS, layers, quantized=cut + up, kept_plain=up),
        WeightGroup("MLA, down", "projections", WHOLE, layers, quantized=whole),
        WeightGroup("MLA, norms", "", WHOLE, layers, exact=mla.q_lora + mla.kv_lora),
    ]
    if facts.indexer is not None:
        index, own = facts.indexer, sum(facts.indexer.full)
        keys, scores = index.heads * index.dim * mla.q_lora + index.dim * hidden, index.heads * hidden
        found.append(WeightGroup("indexer", "projections", WHOLE, own, quantized=keys, plain=scores))
        found.append(WeightGroup("indexer, norms", "", WHOLE, own, exact=2 * index.dim))
    return found


def _moe(facts: ModelFacts, moe: MoeFacts, layers: int) -> list[WeightGroup]:
    each, biased = 3 * facts.hidden * moe.intermediate, moe.method == "noaux_tc"
    return [
        WeightGroup("shared experts", "experts", HEADS, layers, quantized=moe.shared * each),
        WeightGroup("experts", "experts", EXPERTS, layers, quantized=moe.experts * each),
        WeightGroup("router", "experts", WHOLE, layers, plain=facts.hidden * moe.experts),
        WeightGroup("router, biases", "", WHOLE, layers, exact=moe.experts * biased),
    ]


def parameters(kinds: Sequence[WeightGroup]) -> int:
    return sum(one.numbers for one in kinds)


def held(
    facts: ModelFacts, widths: NumberBytes, layout: ParallelLayout = ONE, published: bool = False
) -> dict[str, float]:
    """Bytes of each kind on one GPU, the fullest of a pipeline. published: as the checkpoint has them, multipliers not
    counted, and not as this engine keeps them.
    """
    stage = -(-facts.layers // layout.pp) / facts.layers
    found = {}
    for one in inventory(facts):
        each = widths.published(one) if published else widths.held(one)
        found[one.name] = one.layers * each * one.share(layout, facts) * (stage if one.in_layers else 1.0)
    if layout.pp > 1 and "embedding" in found:  # the first stage has this, the last the head, and they are as large
        del found["embedding"]
    return found


def flops_a_token(facts: ModelFacts) -> float:
    """Of all products with weights that a token meets, the head included."""
    chosen = facts.moe.topk / facts.moe.experts if facts.moe is not None else 1.0
    return sum(
        2.0 * one.layers * one.multiplied * (chosen if one.cut == EXPERTS else 1.0)
        for one in inventory(facts)
        if one.phase
    )
