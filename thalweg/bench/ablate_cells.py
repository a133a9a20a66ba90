"""The rows of an ablation: which combinations of levels are measured, and which cannot be, with the resolver's
reason.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.bench.ablate_columns import Column, Level, Probe

ONE, LADDER, MATRIX = "one-at-a-time", "ladder", "matrix"
MODES = (ONE, LADDER, MATRIX)


@dataclass(frozen=True, slots=True)
class Cell:
    """labels: of each column's level. wishes: settings on top of the base's. reason: why it cannot run, "" where it
    can. decisions: what the resolver made of it, by name.
    """

    labels: Mapping[str, str]
    wishes: Mapping[str, Any]
    reason: str
    decisions: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The same for the same wishes."""
        return json.dumps(self.wishes, sort_keys=True, default=str)


def cells(mode: str, columns: Sequence[Column], probe: Probe) -> list[Cell]:
    """The cells of a mode, each once. See `MODES`: the base and each column changed alone; everything off and then one
    after the other on; every combination.
    """
    makers = {ONE: _one_at_a_time, LADDER: _ladder, MATRIX: _matrix}
    found: dict[str, Cell] = {}
    for cell in makers[mode](columns, probe):
        found.setdefault(cell.key, cell)
    return list(found.values())


def _cell(columns: Sequence[Column], chosen: Mapping[str, Level], probe: Probe) -> Cell:
    """chosen: by column; the others are as in the base."""
    wishes: dict[str, Any] = {}
    for column in columns:
        if column.name in chosen:
            wishes |= column.wishes(chosen[column.name])
    labels = {column.name: chosen[column.name].label if column.name in chosen else column.base for column in columns}
    found = probe(wishes)
    if isinstance(found, str):
        return Cell(labels, wishes, found, {})
    return Cell(labels, wishes, "", {one.name: one.value for one in found.decisions})


def _one_at_a_time(columns: Sequence[Column], probe: Probe) -> Iterator[Cell]:
    yield _cell(columns, {}, probe)
    for column in columns:
        for level in column.levels:
            if level.label != column.base and not probe.alike(column.wishes(level)):
                yield _cell(columns, {column.name: level}, probe)


def _ladder(columns: Sequence[Column], probe: Probe) -> Iterator[Cell]:
    chosen = {column.name: column.levels[0] for column in columns}
    yield _cell(columns, chosen, probe)
    for column in columns:
        for level in column.levels[1:]:
            step = _cell(columns, {**chosen, column.name: level}, probe)
            if not step.reason:  # what cannot run has its row, and the next steps do without
                chosen[column.name] = level
            yield step


def _matrix(columns: Sequence[Column], probe: Probe) -> Iterator[Cell]:
    for levels in itertools.product(*map(_base_first, columns)):
        yield _cell(columns, {column.name: level for column, level in zip(columns, levels, strict=True)}, probe)


def _base_first(column: Column) -> list[Level]:
    """Its levels, the base's in front where it is one of them."""
    return [
        *(one for one in column.levels if one.label == column.base),
        *(one for one in column.levels if one.label != column.base),
    ]
