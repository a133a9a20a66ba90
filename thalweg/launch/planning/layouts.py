"""How GPUs may share a model: tensor, data, expert and pipeline parallelism, and whole copies. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from thalweg.config.model import ModelFacts
from thalweg.quant.catalog import quantized


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """tp: GPUs that share each layer of a stage. dp: groups among them, each with an attention, requests and KV of its
    own (data-parallel attention); tp / dp of them share an attention by its heads. ep: how many of them the experts are
    dealt out to; 1 cuts each expert instead. pp: stages of consecutive layers. copies: whole engines beside each other,
    behind one balancer.
    """

    tp: int = 1
    dp: int = 1
    ep: int = 1
    pp: int = 1
    copies: int = 1

    @property
    def attention(self) -> int:
        """GPUs that share an attention, a dense MLP, and the head."""
        return self.tp // self.dp

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.copies

    @property
    def caches(self) -> int:
        """KV caches on the whole machine that hold different requests."""
        return self.dp * self.copies

    @property
    def name(self) -> str:
        parts = [("TP", self.tp), ("DP", self.dp), ("EP", self.ep), ("PP", self.pp)]
        inner = " ".join(f"{name}{count}" for name, count in parts if count > 1) or "1 GPU"
        return f"{self.copies} x {inner}" if self.copies > 1 else inner

    def flags(self) -> tuple[str, ...]:
        """Of the command line of one copy."""
        parts = [("tp", self.tp), ("dp", self.dp), ("ep", self.ep), ("pp", self.pp)]
        return tuple(word for name, count in parts if count > 1 for word in (f"--{name}-size", str(count)))


ONE = ParallelLayout()


def block_rows(facts: ModelFacts) -> int:
    """Rows of a weight that must stay together."""
    scheme = quantized(facts.quantization_config)
    return 1 if scheme is None else scheme.block[0]


def why_not(facts: ModelFacts, layout: ParallelLayout) -> str:
    """Why the model cannot be cut so; "" where it can."""
    cut, block = layout.attention, block_rows(facts)
    if layout.tp % layout.dp:
        return f"dp {layout.dp} must divide tp {layout.tp}"
    if facts.heads % cut:
        return f"{facts.heads} heads are not divided by {cut}"
    if facts.mla is None and facts.kv_heads % cut and cut % facts.kv_heads:
        return f"{facts.kv_heads} key heads are neither divided by {cut} nor divide it"
    if facts.intermediate % (cut * block):
        return f"an MLP of {facts.intermediate} columns does not fall into {cut} parts" + (
            f" of whole blocks of {block}" if block > 1 else ""
        )
    if layout.pp > facts.layers:
        return f"{facts.layers} layers are fewer than {layout.pp} stages"
    if facts.moe is None:
        return "" if layout.ep == 1 and layout.dp == 1 else "a model without experts gains nothing: use copies"
    if layout.ep == 1 and facts.moe.intermediate % (layout.tp * block):
        return f"experts of {facts.moe.intermediate} columns do not fall into {layout.tp} parts" + (
            f" of whole blocks of {block}" if block > 1 else ""
        )
    if layout.ep > 1 and (layout.ep != layout.tp or facts.moe.experts % layout.ep):
        return f"{facts.moe.experts} experts are dealt out to all of a stage's {layout.tp} GPUs, evenly"
    return ""


def layouts(facts: ModelFacts, gpus: int) -> Iterator[ParallelLayout]:
    """All that use so many GPUs and that the model can be cut into."""
    for copies in _divisors(gpus):
        for pp in _divisors(gpus // copies):
            tp = gpus // copies // pp
            for dp in _divisors(tp):
                for ep in sorted({1, tp}):
                    one = ParallelLayout(tp, dp, ep, pp, copies)
                    if not why_not(facts, one):
                        yield one


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
