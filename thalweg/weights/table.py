"""The table that maps a checkpoint onto a model: published name → parameter, slice, transform."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Callable, Iterator

from torch import Tensor

Index = tuple[int | slice, ...]
Transform = Callable[[Tensor], Tensor]


def same(tensor: Tensor) -> Tensor:
    """The transform of a tensor that is stored as it is published."""
    return tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """`take` of the published tensor `source`, transformed, goes to `into` of the parameter `target`. Empty take or into: all of it.

    The transform is pure and sees float32 or the published dtype (FP8 weights arrive with their scales applied). `take` is what is read
    from disk at all. shape: of the published tensor where it is not that of its slice.
    """

    source: str
    target: str
    into: Index = ()
    transform: Transform = same
    take: tuple[slice, ...] = ()
    shape: tuple[int, ...] = ()


@dataclass(slots=True)
class Table:
    """rules: several may share a source. skips: published names (regular expressions, whole name) that are left alone on purpose.
    scales: names of which a checkpoint may have one for a plane of the KV cache, its scale where it is FP8; see `weights.cache_scales`."""

    rules: list[Rule] = field(default_factory=list)
    skips: list[str] = field(default_factory=list)
    scales: dict[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)

    def add(
        self,
        source: str,
        target: str,
        into: Index = (),
        transform: Transform = same,
        take: tuple[slice, ...] = (),
        shape: tuple[int, ...] = (),
    ) -> None:
        self.rules.append(Rule(source, target, into, transform, take, shape))

    def stack(
        self,
        sources: dict[str, int],
        target: str,
        lead: tuple[int, ...] = (),
        transforms: dict[str, Transform] | None = None,
    ) -> None:
        """Several sources below one another in one parameter; the numbers are their rows."""
        row = 0
        for source, rows in sources.items():
            self.add(source, target, (*lead, slice(row, row + rows)), (transforms or {}).get(source, same))
            row += rows

    def by_source(self) -> dict[str, list[Rule]]:
        grouped: dict[str, list[Rule]] = {}
        for rule in self.rules:
            grouped.setdefault(rule.source, []).append(rule)
        return grouped

    def skipped(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.skips) or any(
            name in sources for sources in self.scales.values()
        )

    def targets(self) -> Iterator[str]:
        return iter(dict.fromkeys(rule.target for rule in self.rules))
