"""The resolver's report as plain values, and its tables: `thalweg plan`, the start-up log."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thalweg.core.format import format_bytes, format_known
from thalweg.core.plan import PAGE
from thalweg.launch.resolved import Resolved

ONE_GPU = "1 GPU"  # the name of the layout without parallelism
CHOICES = {"setting": "{name}", "value": lambda choice: _shown(choice["value"]), "": "{source}", "why": "{reason}"}


def as_json(resolved: Resolved) -> dict[str, Any]:
    """The whole report as plain values."""
    sizes, pages, slots = resolved.sizes, resolved.pages, resolved.engine.max_running_requests
    page_size = resolved.engine.page_size
    tokens = pages * page_size
    each = min(tokens // slots, resolved.context)
    return {
        "model": str(resolved.path),
        "served_as": list(resolved.names),
        "architecture": resolved.architecture,
        "parameters": sizes.parameters,
        "weight_bytes": sizes.weight_bytes,
        "kv_bytes_per_token": sizes.kv_bytes,
        "planes": [msgspec.to_builtins(plane) for plane in sizes.planes],
        "pages": pages,
        "pages_measured_at_start": resolved.engine.num_pages == 0,
        "page_tokens": page_size,
        "kv_tokens": tokens,
        "kv_bytes": pages * PAGE * sizes.kv_bytes,
        "host_kv_bytes": pages * PAGE * sizes.host_kv_bytes,
        "hot_set_bytes": slots * sizes.hot_sets(resolved.context),
        "concurrent_full_contexts": tokens // resolved.context,
        "holds": [holding(resolved.context, tokens // resolved.context), holding(each, slots)],
        "eos_ids": list(resolved.engine.eos_ids),
        "sampling_defaults": msgspec.to_builtins(resolved.sampling),
        "decisions": resolved.engine.report.as_tree(),
    }


def holding(length: int, sequences: int) -> dict[str, int]:
    """A JSON entry: so many sequences of this length fit into all KV caches together."""
    return {"length": length, "sequences": sequences}


def wide_console() -> Console:
    """On stderr; it does not fold the report in files and pipes, which have no width of their own."""
    return Console(file=sys.stderr, width=None if sys.stderr.isatty() else 200)


def show(report: Mapping[str, Any], console: Console, facts: Iterable[tuple[str, str]] = ()) -> None:
    """Prints the facts and the choices of a report. facts: more of them, by name."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, text in (*_model(report), *facts, *_cache(report)):
        table.add_row(name, escape(text))
    console.print(table, "")
    choices = make_table("", CHOICES, list(report["decisions"].values()), left=4)
    choices.box = None  # lines of a log
    console.print(choices)


def make_table(
    title: str, columns: Mapping[str, object], rows: Sequence[Mapping[str, Any]], left: int = 0, notes: int = 0
) -> Table:
    """columns: by heading, format strings of the row's fields or functions of the row. left, notes: the first and the
    last so many hold text, the others numbers. A column without a value is left out.
    """
    cells = [
        [column(row) if callable(column) else format_known(str(column), row) for row in rows]
        for column in columns.values()
    ]
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    is_shown = [any(column) or not rows for column in cells]
    for place, (head, column) in enumerate(zip(columns, cells, strict=True)):
        if not is_shown[place]:
            continue
        if place < left or place >= len(columns) - notes:
            table.add_column(head, overflow="fold")
        else:  # in a narrow terminal its heading wraps, and text is folded before a number is
            table.add_column(head, justify="right", min_width=max(map(len, [*head.split(), *column])))
    for row_cells in zip(*compress(cells, is_shown), strict=True):
        table.add_row(*map(escape, row_cells))
    return table


def _model(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", f"{report['model']} ({report['architecture']})"
    memory, each = format_bytes(report["weight_bytes"]), " of each process" * ("processes" in report["decisions"])
    yield "weights", f"{report['parameters']:,} parameters, {memory} in memory{each}"
    for plane in report["planes"]:
        count, layers = plane["bytes_per_token"], plane["layers"]
        where = ", in host memory" * plane["in_host"]
        yield f"kv: {plane['name']}", f"{count:,} B a token: {layers} layers x {count // layers:,}{where}"


def _cache(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not (tokens := report["kv_tokens"]):
        return
    size, about = report["kv_bytes"], "about " if report["pages_measured_at_start"] else ""
    of_pages = f"{about}{report['pages']:,} pages x {report['page_tokens']} tokens"
    pages = f"{of_pages} x {size / tokens:,.0f} B = {format_bytes(size)}"
    layout, caches = report.get("bounds_layout", ONE_GPU), report.get("caches", 1)
    pages += f" on each GPU of {layout}" if layout != ONE_GPU else ""
    yield "kv cache", pages + (f", {caches} caches" if caches > 1 else "")
    if in_host := report["host_kv_bytes"]:
        yield (
            "latents",
            f"{format_bytes(in_host)} in host memory; hot sets take {format_bytes(report['hot_set_bytes'])}",
        )
    lengths = " or ".join("{sequences:,} sequences of {length:,}".format_map(one) for one in report["holds"])
    yield "holds", f"{tokens * caches:,} tokens: {lengths}"


def _shown(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
