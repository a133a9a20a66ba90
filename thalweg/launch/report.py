"""The resolver's report: `thalweg plan`, the start-up log, `/server_info`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thalweg.core.format import format_bytes
from thalweg.core.plan import PAGE
from thalweg.core.report import Decision, Value
from thalweg.launch.resolved import Resolved, Sizes


def as_json(resolved: Resolved) -> dict[str, Any]:
    """The whole report as plain values."""
    sizes, pages = resolved.sizes, resolved.pages
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
        "page_tokens": PAGE,
        "kv_tokens": pages * PAGE,
        "kv_bytes": pages * PAGE * sizes.kv_bytes,
        "concurrent_full_contexts": pages * PAGE // resolved.context,
        "eos_ids": list(resolved.engine.eos_ids),
        "sampling_defaults": msgspec.to_builtins(resolved.sampling),
        "decisions": resolved.engine.report.as_tree(),
    }


def wide_console(stderr: bool) -> Console:
    """A console that does not fold the report in files and pipes, which have no width of their own."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 200)


def show(resolved: Resolved, console: Console) -> None:
    """Prints the report as two tables."""
    model = ("model", f"{resolved.path} ({resolved.architecture})")
    console.print(facts_table([model, *sizes(resolved.sizes), *_cache(resolved)]))
    console.print()
    console.print(choices(resolved.decisions))


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Each name with its text."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, text in rows:
        table.add_row(name, escape(text))
    return table


def choices(decisions: Iterable[Decision]) -> Table:
    """Each with its source and reason."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("setting", "value", "", "why"):
        table.add_column(heading, overflow="fold")
    for one in decisions:
        table.add_row(one.name, _shown(one.value), one.source, one.reason)
    return table


def sizes(of: Sizes) -> Iterator[tuple[str, str]]:
    """Rows of weights and planes: what it is, and how much."""
    yield "weights", f"{of.parameters:,} parameters, {format_bytes(of.weight_bytes)} in memory"
    for plane in of.planes:
        each = plane.bytes_per_token // plane.layers
        yield f"kv: {plane.name}", f"{plane.bytes_per_token:,} B a token: {plane.layers} layers x {each:,}"


def _cache(resolved: Resolved) -> Iterator[tuple[str, str]]:
    slots, context, kv = resolved.engine.max_running_requests, resolved.context, resolved.sizes.kv_bytes
    tokens, about = resolved.pages * PAGE, "" if resolved.engine.num_pages else "about "
    yield "kv cache", f"{about}{resolved.pages:,} pages x {PAGE} tokens x {kv:,} B = {format_bytes(tokens * kv)}"
    each = min(tokens // slots, context)
    yield (
        "holds",
        f"{tokens:,} tokens: {tokens // context:,} sequences of {context:,}, or {slots:,} of {each:,}",
    )


def _shown(value: Value | None) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
