"""The table that maps a checkpoint onto a model: published tensor → parameter, slice, transform.

Nobody writes it: each layer declares the rules of its own parameters when it is built, and `table_of` collects them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from thalweg.quant.scheme import Index, Quantized, Take, TensorSpec

Transform = Callable[[Tensor], Tensor]


def unchanged(tensor: Tensor) -> Tensor:
    """The transform of a tensor that memory holds as it is published."""
    return tensor


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Destination of a slice of one checkpoint tensor."""

    source: TensorSpec  # as an unquantized checkpoint has it
    target: str  # the parameter's name
    into: Index = ()  # the slice of the parameter; () is all of it
    take: Take = ()  # the slice of the source that this rank reads; () is all of it
    transform: Transform = unchanged  # pure; sees the published dtype, and float32 of dequantized weights
    held: Quantized | None = None  # the scheme in which memory holds it; None is plain numbers


@dataclass(slots=True)
class WeightTable:
    """All rules of a model. Several rules may read the same tensor."""

    rules: list[WeightRule] = field(default_factory=list)
    skips: list[str] = field(
        default_factory=list
    )  # regular expressions of published names that are not read on purpose
    # by plane and layer, names under which a checkpoint may have the scale of its FP8 KV cache
    cache_scales: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)

    def by_source(self) -> dict[str, list[WeightRule]]:
        grouped: dict[str, list[WeightRule]] = {}
        for rule in self.rules:
            grouped.setdefault(rule.source.name, []).append(rule)
        return grouped

    def is_skipped(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.skips) or any(
            name in sources for sources in self.cache_scales.values()
        )

    def sources(self) -> Iterator[TensorSpec]:
        """The published tensors, each once, in the order of the model."""
        return iter({rule.source.name: rule.source for rule in self.rules}.values())


def cache_scale_names(attention: str, kind: str) -> tuple[str, ...]:
    """Names that producers give to the scale of keys ("k") or values ("v") of an attention in an FP8 cache: ModelOpt's
    after compressed-tensors', then those of engines, Quark's, and one for both.
    """
    own, module = f"{kind}_scale", f"{kind}_proj"
    names = own, f"{module}.{own}", f"attn.{own}", f"mla_attn.{own}", f"{module}.output_scale", "kv_scale"
    return tuple(f"{attention}.{name}" for name in names)


def table_of(module: nn.Module) -> WeightTable:
    """The rules that the layers inside `module` declare (`layers.module.Module`), with targets as `module` names
    them.
    """
    table = WeightTable()
    for path, inner in module.named_modules():
        own: WeightTable | None = inner.__dict__.get("weights")
        if own is None:
            continue
        prefix = f"{path}." if path else ""
        table.rules += [replace(rule, target=prefix + rule.target) for rule in own.rules]
        table.skips += own.skips
        table.cache_scales |= own.cache_scales
    return table
