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

from thalweg.core.format import format_known

Row = Mapping[str, Any]
WIDTH = 140  # characters, where neither a terminal nor COLUMNS gives the width


def fields(table: str) -> dict[str, str]:
    """Fields by heading, from a text with a line for each: the heading, and the field as its last word."""
    return dict(line.rsplit(maxsplit=1) for line in table.strip().splitlines())


def block(template: str, row: Row) -> str:
    """The sections of a template, with blank lines between them, whose fields the row has; closed by a line."""
    sections = [format_known(section, row) for section in template.split("\n\n")]
    return "\n".join([*filter(None, sections), "=" * 50])


def show(table: Table, width: int = WIDTH) -> None:
    Console(width=shutil.get_terminal_size((width, 0)).columns).print(table)


def field_table(rows: Sequence[Row], columns: Mapping[str, str]) -> list[str]:
    """Markdown with the columns (heading: field) that some row has; those of the cache only where one is not 0."""
    shown = {
        head: key
        for head, key in columns.items()
        if any(row.get(key) if key.startswith("cache_") else row.get(key) is not None for row in rows)
    }
    return markdown_table(list(shown), [[row.get(key) for key in shown.values()] for row in rows])


def accuracy(row: Row) -> tuple[str, str]:
    """A row of an evaluation: its result, and the interval or what else tells how sure it is."""
    if "share" in row:
        return f"{row['share']:.1%}", f"{row['low_95']:.1%} – {row['high_95']:.1%}"
    if "perplexity" in row:
        return f"{row['perplexity']:.4g}", f"{row['bits_per_byte']:.3f} bits a byte"
    return f"{row['value']:.4g}", "" if row["stderr"] is None else f"standard error {row['stderr']:.2g}"


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

    def reach(self, done: int, total: int) -> None:
        self.progress.update(self.task, completed=done, total=total)

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
