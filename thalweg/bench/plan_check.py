"""`thalweg plan --check`: the forecast of memory against the memory that an engine has allocated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from thalweg.core.format import format_bytes
from thalweg.core.plan import PAGE
from thalweg.launch.report import make_table

if TYPE_CHECKING:
    from thalweg.launch.planning.forecast import Forecast

NEAR = 0.03  # of what was measured
COLUMNS = {
    "memory": "{name}",
    "forecast": lambda row: format_bytes(round(row["forecast"])),
    "measured": lambda row: format_bytes(round(row["measured"])),
    "off by": "{off:+.2%}",
    "of all": "{share:+.2%}",
}


class MemoryPart(NamedTuple):
    """Bytes of one thing in memory."""

    name: str
    forecast: float
    measured: float

    @property
    def off(self) -> float:
        """The forecast's error, as a share of what was measured."""
        return (self.forecast - self.measured) / self.measured if self.measured else float(bool(self.forecast))


def check(made: Forecast, argv: Sequence[str], asked: argparse.Namespace, console: Console) -> int:
    """Starts an engine and prints each part. Exit status: 0 where the total and each part that matters to it are within
    3 %, else 1. Raises UnsupportedConfig, CheckpointError.
    """
    from thalweg.engine.local import LocalEngine

    report = LocalEngine(made.resolved.engine).config.report.as_tree()
    measured: dict[str, Any] = {name: decision["value"] for name, decision in report.items()}
    parts = compare(made, measured)
    good = near(parts)
    if asked.json:
        from thalweg.bench.in_process import configuration
        from thalweg.bench.results import provenance

        result = {
            "near": good,
            "parts": [part._asdict() | {"off": part.off} for part in parts],
            "pages": {
                "forecast": made.resolved.pages,
                "measured": measured["max_total_tokens"] // made.resolved.engine.page_size,
            },
            **provenance("plan", _without_keys(argv), configuration(made.resolved)),
        }
        print(json.dumps(result, indent=2))
    else:
        total = parts[-1].measured or 1.0
        rows = [part._asdict() | {"off": part.off, "share": (part.forecast - part.measured) / total} for part in parts]
        console.print(make_table("", COLUMNS, rows, left=1))
        console.print("within 3 %" if good else "[red]more than 3 % apart[/]")
    return 0 if good else 1


def compare(made: Forecast, measured: Mapping[str, Any]) -> list[MemoryPart]:
    """Part by part, their sum last. measured: values of an engine's report by name."""
    pages = (made.resolved.pages + 1) * made.resolved.sizes.kv_bytes * PAGE
    forecast = {"weights": float(made.resolved.sizes.weight_bytes), "kv": float(pages), "slots": made.slots}
    if made.memory is not None:
        forecast |= {"step": made.memory.step, "graphs": made.memory.graphs, "beside": made.memory.beside}
    parts = [MemoryPart(name, value, float(measured[f"memory_{name}"])) for name, value in forecast.items()]
    return [*parts, MemoryPart("total", sum(part.forecast for part in parts), sum(part.measured for part in parts))]


def near(parts: Sequence[MemoryPart]) -> bool:
    """Whether the total, weights and KV cache are within 3 %, and no other part is off by more than 3 % of the
    total.
    """
    total = parts[-1].measured
    return all(
        abs(part.off) <= NEAR
        if part.name in ("weights", "kv", "total")
        else abs(part.forecast - part.measured) <= NEAR * total
        for part in parts
    )


def _without_keys(argv: Sequence[str]) -> list[str]:
    shown = ["--hf-token=***" if word.startswith("--hf-token=") else word for word in argv]
    return ["***" if before == "--hf-token" else word for before, word in zip(["", *shown], shown, strict=False)]
