"""Chains and trees of drafts as benchmarks ask for them, and the engines that make them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NamedTuple

from thalweg.config.options import Options
from thalweg.config.tree import replace
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved

CHAIN = "chain"
ADAPTIVE = -1  # a number of drafts: as many as the engine chooses


class DraftShape(NamedTuple):
    """A chain, or a tree as `core.tree.TreeShape` has it."""

    branches: int  # 1: a chain
    deepest: int
    nodes: int
    widths: tuple[int, ...]  # drafts a step that are measured

    @property
    def name(self) -> str:
        return CHAIN if self.branches == 1 else f"{self.branches}x{self.deepest}x{self.nodes}"


def tree_shape(text: str) -> DraftShape:
    """An argparse type."""
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None or int(match[1]) < 2:
        raise argparse.ArgumentTypeError(f"expected BRANCHESxDEPTHxNODES with 2 branches or more, got {text!r}")
    branches, deepest, nodes = (int(number) for number in match.groups())
    return DraftShape(branches, deepest, nodes, (nodes,))


def draft_shapes(widths: Sequence[int], trees: Sequence[DraftShape]) -> list[DraftShape]:
    """One for all chains, and the trees."""
    deepest = max([1, *widths])
    return [*[DraftShape(1, deepest, deepest, tuple(widths))] * bool(widths), *trees]


def resolved_for(shape: DraftShape, config: Options, **wishes: object) -> Resolved:
    """The settings of an engine that drafts this shape. Raises UnsupportedConfig without a drafter."""
    wishes |= {"mtp": None, "speculative_eagle_topk": shape.branches, "speculative_num_steps": shape.deepest}
    wishes["speculative_num_draft_tokens"] = None if shape.branches == 1 else shape.nodes + 1
    resolved = resolve(replace(config, **wishes), simulates=True)
    if resolved.engine.speculative_algorithm == "NONE":
        raise UnsupportedConfig("speculative_algorithm is NONE: use --speculative-algorithm NEXTN or NGRAM")
    return resolved
