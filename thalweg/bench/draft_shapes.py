"""Chains and trees of drafts as benchmarks ask for them, and the engines that make them."""

from __future__ import annotations

import argparse
import gc
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from rich.table import Table

from thalweg.bench.command import PartialRun
from thalweg.bench.display import show
from thalweg.bench.in_process import configuration
from thalweg.bench.results import save
from thalweg.config.options import Options
from thalweg.config.tree import replace
from thalweg.core.errors import UnsupportedConfig
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved

CHAIN = "chain"
ADAPTIVE = -1  # a number of drafts: as many as the engine chooses

Row = dict[str, Any]


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
        raise argparse.ArgumentTypeError(
            f"expected branches x depth x drafts with 2 branches or more, such as 4x3x16, got {text!r}"
        )
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


def started(shape: DraftShape, config: Options, **wishes: object) -> tuple[Resolved, LocalEngine]:
    """An engine that drafts this shape. Raises ThalwegError."""
    resolved = resolved_for(shape, config, **wishes)
    adaptive = ADAPTIVE in shape.widths
    return resolved, LocalEngine(msgspec.structs.replace(resolved.engine, speculative_adaptive=adaptive))


def measure_engines(
    command: str,
    argv: list[str],
    output_file: str,
    engines: Iterable[tuple[DraftShape, Options]],
    rows_of: Callable[[DraftShape, Resolved, LocalEngine], Iterator[Row]],
    table: Callable[[Sequence[Row]], Table],
    fields: Mapping[str, object],
) -> list[Row]:
    """Starts one engine after the other and measures it. Prints and writes what there is when it ends early.

    fields: of the result beside its rows. Raises ThalwegError, KeyboardInterrupt.
    """
    rows, settings = list[Row](), dict[str, object]()
    with PartialRun() as partial:
        for shape, config in engines:
            if config.parallel.dp_size > 1:
                raise UnsupportedConfig(f"bench {command} sets the drafts of one scheduler: leave out --dp-size")
            resolved, engine = started(shape, config)
            settings = configuration(resolved)
            for row in rows_of(shape, resolved, engine):
                rows.append(row)
                print(" ".join(f"{name}={value}" for name, value in row.items()), file=sys.stderr)
            del engine
            gc.collect()  # the weights of the next engine may not fit beside these
            torch.cuda.empty_cache()
    show(table(rows))
    if rows:
        save(output_file, f"bench {command}", argv, settings, {command: rows, **fields, **partial.as_json()})
    partial.finish()
    return rows
