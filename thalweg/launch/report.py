"""The resolver's report: `thalweg plan`, the start-up log, `/server_info`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from thalweg.core.plan import PAGE
from thalweg.launch.decide import size
from thalweg.launch.resolved import Resolved, Sizes


def as_json(resolved: Resolved) -> dict[str, Any]:
    """The whole report as plain values."""
    engine, sizes = resolved.engine, resolved.sizes
    return {
        "model": str(resolved.path),
        "served_as": list(resolved.names),
        "architecture": resolved.architecture,
        "parameters": sizes.parameters,
        "weight_bytes": sizes.weight_bytes,
        "kv_bytes_per_token": sizes.kv_bytes,
        "planes": [msgspec.to_builtins(plane) for plane in sizes.planes],
        "pages": engine.pages,
        "page_tokens": PAGE,
        "kv_tokens": engine.pages * PAGE,
        "kv_bytes": engine.pages * PAGE * sizes.kv_bytes,
        "concurrent_full_contexts": engine.pages * PAGE // engine.context,
        "eos_ids": list(engine.eos_ids),
        "sampling_defaults": msgspec.to_builtins(resolved.sampling),
        "decisions": {one.name: msgspec.to_builtins(one) for one in resolved.decisions},
    }


def wide_console(stderr: bool) -> Console:
    """A console that does not fold the report in files and pipes, which have no width of their own."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 200)


def show(resolved: Resolved, console: Console) -> None:
    """Prints the report as two tables."""
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for row in [("model", f"{resolved.path} ({resolved.architecture})"), *_sizes(resolved.sizes), *_cache(resolved)]:
        facts.add_row(*row)
    choices = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("setting", "value", "", "why"):
        choices.add_column(heading, overflow="fold")
    for one in resolved.decisions:
        choices.add_row(one.name, _shown(one.value), one.source, one.reason)
    console.print(facts)
    console.print()
    console.print(choices)


def _sizes(sizes: Sizes) -> Iterator[tuple[str, str]]:
    yield "weights", f"{sizes.parameters:,} parameters, {size(sizes.weight_bytes)} in memory"
    for plane in sizes.planes:
        each = plane.bytes_per_token // plane.layers
        yield f"kv: {plane.name}", f"{plane.bytes_per_token:,} B a token: {plane.layers} layers x {each:,}"


def _cache(resolved: Resolved) -> Iterator[tuple[str, str]]:
    engine, kv = resolved.engine, resolved.sizes.kv_bytes
    tokens = engine.pages * PAGE
    yield "kv cache", f"{engine.pages:,} pages x {PAGE} tokens x {kv:,} B = {size(tokens * kv)}"
    each = min(tokens // engine.slots, engine.context)
    yield (
        "holds",
        f"{tokens:,} tokens: {tokens // engine.context:,} sequences of {engine.context:,}, or {engine.slots:,} of {each:,}",
    )


def _shown(value: str | int | float | bool) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
