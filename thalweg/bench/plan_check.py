"""`thalweg plan --check`: the memory that was forecast against the memory that an engine has taken."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from thalweg.core.errors import UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.core.plan import PAGE

if TYPE_CHECKING:
    from thalweg.launch.planning.forecast import Forecast

NEAR = 0.03  # of what was measured
SECONDS = 10.0  # that a server has to answer
# what a start draws or measures itself, and what does not change its memory
FREE = {
    "random_seed",
    "max_total_tokens",
    "context_length",
    "mixed_step_limits",
    "piecewise_cuda_graph_tokens",
    "chat_template",
}


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one thing in memory, as forecast and as measured."""

    name: str
    forecast: float
    measured: float

    @property
    def off(self) -> float:
        """By what share of the measured the forecast is wrong."""
        return (self.forecast - self.measured) / self.measured if self.measured else 0.0 if not self.forecast else 1.0


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
            "parts": [asdict(part) | {"off": part.off} for part in parts],
            "pages": {"forecast": made.resolved.pages, "measured": report["max_total_tokens"]["value"] // PAGE},
            **provenance("plan", _open(argv), configuration(made.resolved)),
        }
        print(json.dumps(result, indent=2))
    else:
        console.print(_table(parts))
        console.print("within 3 %" if good else "[red]more than 3 % apart[/]")
    return 0 if good else 1


def compare(made: Forecast, measured: Mapping[str, Any]) -> list[Part]:
    """Part by part, their sum last. measured: the report of an engine by name."""
    pages = (made.resolved.pages + 1) * made.resolved.sizes.kv_bytes * PAGE
    forecast = {"weights": float(made.resolved.sizes.weight_bytes), "kv": float(pages), "slots": made.slots}
    if made.room is not None:
        forecast |= {"step": made.room.step, "graphs": made.room.graphs, "beside": made.room.beside}
    missing = [name for name in forecast if f"memory_{name}" not in measured]
    if missing:
        raise UnsupportedConfig(
            f"--check: the engine does not tell its {', '.join(missing)}: it is another version; start one of this"
        )
    parts = [Part(name, value, float(measured[f"memory_{name}"])) for name, value in forecast.items()]
    return [*parts, Part("total", sum(part.forecast for part in parts), sum(part.measured for part in parts))]


def near(parts: Sequence[Part]) -> bool:
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
    except (OSError, ValueError, urllib.error.HTTPError) as error:
        raise UnsupportedConfig(
            f"--server {url}: {where} gives no report ({error}); is it a server of Thalweg that is ready, and does it"
            " want --api-key?"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(one, dict) and "value" in one for one in found.values()):
        raise UnsupportedConfig(f"--server {url}: {where} is no report of a server of Thalweg")
    return found


def _same(made: Forecast, report: Mapping[str, Any]) -> None:
    """Raises UnsupportedConfig where the server was started with other settings than were planned for."""
    planned = {one.name: one.value for one in made.resolved.decisions if one.name not in FREE}
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


def _open(argv: Sequence[str]) -> list[str]:
    """The words of the command without keys."""
    hidden = ("--api-key", "--hf-token")
    before = ["", *argv]
    return [
        "***" if last in hidden else word
        for last, word in zip(before, argv, strict=False)
        if "=" not in word or word.partition("=")[0] not in hidden
    ]


def _table(parts: Sequence[Part]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("memory")
    for head in ("forecast", "measured", "off by", "of all"):
        table.add_column(head, justify="right")
    total = parts[-1].measured
    for part in parts:
        apart = (part.forecast - part.measured) / total if total else 0.0
        shown = (format_bytes(round(value)) for value in (part.forecast, part.measured))
        table.add_row(part.name, *shown, f"{100 * part.off:+.2f} %", f"{100 * apart:+.2f} %")
    return table
