"""`thalweg plan --check`: the forecast of memory against the memory that an engine has allocated."""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from thalweg.bench.display import make_table
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.core.plan import PAGE

if TYPE_CHECKING:
    from thalweg.launch.planning.forecast import Forecast

NEAR = 0.03  # of what was measured
SECONDS = 10.0  # that a server has to answer
COLUMNS = {
    "memory": "{name}",
    "forecast": lambda row: format_bytes(round(row["forecast"])),
    "measured": lambda row: format_bytes(round(row["measured"])),
    "off by": "{off:+.2%}",
    "of all": "{share:+.2%}",
}
# drawn or measured by a start itself, or without effect on its memory
MAY_DIFFER = {
    "random_seed",
    "max_total_tokens",
    "context_length",
    "mixed_step_limits",
    "piecewise_cuda_graph_tokens",
    "chat_template",
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
    """Starts an engine, or asks the server that `asked` names; prints each part. Exit status: 0 where the total and
    each part that matters to it are within 3 %, else 1. Raises UnsupportedConfig, CheckpointError.
    """
    report = _ask(asked.server, asked.api_key) if asked.server else _start(made)
    if asked.server:
        _same(made, report)
    parts = compare(made, {name: one["value"] for name, one in report.items()})
    good = near(parts)
    if asked.json:
        from thalweg.bench.in_process import configuration
        from thalweg.bench.results import provenance

        result = {
            "near": good,
            "parts": [part._asdict() | {"off": part.off} for part in parts],
            "pages": {"forecast": made.resolved.pages, "measured": report["max_total_tokens"]["value"] // PAGE},
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
    """MemoryPart by part, their sum last. measured: the report of an engine by name."""
    pages = (made.resolved.pages + 1) * made.resolved.sizes.kv_bytes * PAGE
    forecast = {"weights": float(made.resolved.sizes.weight_bytes), "kv": float(pages), "slots": made.slots}
    if made.room is not None:
        forecast |= {"step": made.room.step, "graphs": made.room.graphs, "beside": made.room.beside}
    missing = [name for name in forecast if f"memory_{name}" not in measured]
    if missing:
        raise UnsupportedConfig(
            f"--check: the engine does not report its {', '.join(missing)}: it is another version; start one of this"
        )
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


def _start(made: Forecast) -> dict[str, Any]:
    """The report of an engine in this process."""
    from thalweg.engine.local import LocalEngine

    return dict(LocalEngine(made.resolved.engine).config.report.as_tree())


def _ask(url: str, key: str) -> dict[str, Any]:
    """The report of a running server. Raises UnsupportedConfig."""
    where = url.rstrip("/") + "/resolved"
    request = urllib.request.Request(where, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            found = json.loads(answer.read())
    except (OSError, ValueError) as error:
        raise UnsupportedConfig(
            f"--server {url}: {where} gives no report ({error}); is it a server of Thalweg that is ready, and does it"
            " want --api-key?"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(one, dict) and "value" in one for one in found.values()):
        raise UnsupportedConfig(f"--server {url}: {where} is no report of a server of Thalweg")
    return found


def _same(made: Forecast, report: Mapping[str, Any]) -> None:
    """Raises UnsupportedConfig where the server was started with other settings than were planned for."""
    planned = {one.name: one.value for one in made.resolved.decisions if one.name not in MAY_DIFFER}
    other = [
        f"{name} {report[name]['value']} there and {value} here"
        for name, value in planned.items()
        if name in report and report[name]["value"] != value
    ]
    if other:
        raise UnsupportedConfig(
            f"--server: was started with other settings: {'; '.join(other[:4])}; give --check the flags that it was"
            " given"
        )


def _without_keys(argv: Sequence[str]) -> list[str]:
    hidden = ("--api-key", "--hf-token")
    shown = [
        word.partition("=")[0] + "=***" if word.startswith(tuple(f"{flag}=" for flag in hidden)) else word
        for word in argv
    ]
    return ["***" if before in hidden else word for before, word in zip(["", *shown], shown, strict=False)]
