"""Chains and trees of drafts as benchmarks ask for them, and the engines that make them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from thalweg.config.options import Options
from thalweg.config.tree import replace
from thalweg.core.errors import UnsupportedConfig
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved

CHAIN = "chain"


class Shape(NamedTuple):
    """branches, deepest, nodes: see `core.tree.TreeShape`; 1 branch is a chain. widths: drafts a step that are
    measured, -1 for as many as the engine chooses.
    """

    branches: int
    deepest: int
    nodes: int
    widths: tuple[int, ...]

    @property
    def name(self) -> str:
        return CHAIN if self.branches == 1 else f"{self.branches}x{self.deepest}x{self.nodes}"


def add_shapes(add: Any, widths: list[int], more: str = "") -> None:
    """Adds --widths and --trees to a group of arguments. more: what else a width may be."""
    said = " ".join(map(str, widths))
    add(
        "--widths",
        type=int,
        nargs="*",
        default=widths,
        metavar="N",
        help=f"drafts a step, one behind the other{more} (default: {said})",
    )
    add(
        "--trees",
        type=_tree,
        nargs="*",
        default=[],
        metavar="BxDxN",
        help="trees too: ways behind each token, drafts one behind the other, drafts in all, as 4x3x16 (default: none)",
    )  # fmt: skip


def shapes(widths: Sequence[int], trees: Sequence[Shape]) -> list[Shape]:
    """One for all chains, and the trees."""
    deepest = max([1, *widths])
    return [*[Shape(1, deepest, deepest, tuple(widths))] * bool(widths), *trees]


def resolved_for(shape: Shape, config: Options, **wishes: object) -> Resolved:
    """The engine that drafts this shape. Raises UnsupportedConfig where nothing drafts."""
    wishes |= {"mtp": None, "speculative_eagle_topk": shape.branches, "speculative_num_steps": shape.deepest}
    wishes["speculative_num_draft_tokens"] = None if shape.branches == 1 else shape.nodes + 1
    resolved = resolve(replace(config, **wishes), simulates=True)
    if resolved.engine.speculative_algorithm == "NONE":
        raise UnsupportedConfig(
            "speculative_algorithm: nothing drafts here; use --speculative-algorithm NEXTN or NGRAM"
        )
    return resolved


def _tree(text: str) -> Shape:
    """An argparse type."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found is None or int(found[1]) < 2:
        raise argparse.ArgumentTypeError(f"expected BRANCHESxDEPTHxNODES with 2 branches or more, got {text!r}")
    branches, deepest, nodes = (int(number) for number in found.groups())
    return Shape(branches, deepest, nodes, (nodes,))
