"""Tables for the terminal and for Markdown, and progress bars."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

Row = Mapping[str, Any]
WIDTH = 140  # characters, where neither a terminal nor COLUMNS gives the width


def show(table: Table, width: int = WIDTH) -> None:
    Console(width=shutil.get_terminal_size((width, 0)).columns).print(table)


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table, aligned for a terminal. Numbers are rounded and stand right."""
    numeric = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(heads))]
    cells = [[cell.replace("|", "\\|") for cell in map(_cell, row)] for row in (heads, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ]
        for row in cells
    ]
    rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
    return [f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:])]


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class ProgressBar(NamedTuple):
    """One task of a progress display."""

    progress: Progress
    task: TaskID

    def advance(self, count: int = 1, note: str = "") -> None:
        self.progress.update(self.task, advance=count, note=note)

    def label(self, text: str) -> None:
        self.progress.update(self.task, description=text[:60])


@contextmanager
def progress_bar(label: str, total: int, shown: bool = True) -> Iterator[ProgressBar]:
    """A bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    columns += (TimeRemainingColumn(), TextColumn("{task.fields[note]}"))  # type: ignore[assignment]
    hidden = not (shown and console.is_terminal)
    with Progress(*columns, console=console, disable=hidden, refresh_per_second=4) as progress:
        yield ProgressBar(progress, progress.add_task(label, total=total, note=""))
