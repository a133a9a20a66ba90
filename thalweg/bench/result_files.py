"""Reading result files of any command: points with named measurements, each with its repeats or samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thalweg.bench.ablation_tables import differences_from_base, rate_groups, rates_of
from thalweg.bench.errors import ResultError

Json = Mapping[str, Any]
INCOMPLETE = (LookupError, TypeError, AttributeError, ValueError)  # raised by reading JSON of another shape


class ResultFileError(ResultError):
    """A file that is not a result; names it, and the line of a `.jsonl`."""


@dataclass(slots=True)
class Measurement:
    """One quantity at one point."""

    unit: str
    higher: bool  # whether more is better
    values: list[float]  # one of each repeat
    seeded: bool = False  # the i-th repeat has the same work in every run with these settings
    hits: tuple[int, int] | None = None  # (hits, total) of a share


# unit ("-": none), whether more is better, what a value is multiplied with, and the fields that are compared
COMPARED = """
req/s  more  1     request_throughput goodput
tok/s  more  1     output_throughput total_throughput
ms     less  1     mean_ttft_ms median_ttft_ms p99_ttft_ms
ms     less  1     mean_tpot_ms median_tpot_ms p99_tpot_ms
ms     less  1     mean_itl_ms median_itl_ms p99_itl_ms
ms     less  1     mean_e2e_latency_ms median_e2e_latency_ms p99_e2e_latency_ms
-      more  1     accept_length cache_hit_rate
ms     less  1000  prefill_latency median_decode_latency total_latency
s      less  1     ready_seconds first_token_seconds cpu_seconds
us     less  1     us cpu_us_per_output_token
"""
FIELDS = {
    name: (unit.strip("-"), better == "more", float(scale))
    for unit, better, scale, *names in map(str.split, COMPARED.strip().splitlines())
    for name in names
}

Point = dict[str, Measurement]
Points = dict[str, Point]


def load(path: Path) -> list[Json]:
    """The results of a file: one, or one for each line of a `.jsonl`. Raises ResultFileError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResultFileError(f"cannot read {path}: {error}") from error
    if path.suffix != ".jsonl":
        return [_object(text, str(path))]
    lines = enumerate(text.splitlines(), 1)
    results = [_object(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    if not results:
        raise ResultFileError(f"{path}: no results in it")
    return results


def _object(text: str, where: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ResultFileError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ResultFileError(f"{where}: a result is a JSON object")
    return value


def command_of(result: Json) -> str:
    """The command that wrote it, "bench serve" for a result of SGLang's tool; "" where it is unknown."""
    words = str(result.get("command", "")).split()[:3]
    if words[:1] == ["thalweg"]:
        return " ".join(words[1:3] if words[1:2] == ["bench"] else words[1:2])
    return "bench serve" if "mean_ttft_ms" in result else ""


def points(results: Sequence[Json]) -> Points:
    """All points of the results; repeats of a point are merged. Raises ResultFileError for an unknown or incomplete
    result.
    """
    merged: Points = {}
    for result in results:
        reader = READERS.get(command_of(result))
        if reader is None:
            known = ", ".join(READERS)
            raise ResultFileError(f"not a result of {known}: its command is {result.get('command', 'missing')!r}")
        try:
            for name, point in reader(result):
                into = merged.setdefault(name, {})
                for measured, found in point.items():
                    if measured in into:
                        into[measured].values += found.values
                    else:
                        into[measured] = found
        except INCOMPLETE as error:
            raise ResultFileError(f"incomplete result of `{command_of(result)}`: {error!r}") from error
    if not merged:
        raise ResultFileError("a result without any measurement: the run ended before the first one")
    return merged


def serving_rows(result: Json) -> list[Json]:
    """The points of a serving result: one, or those of a sweep."""
    rows = result.get("points")
    return rows if isinstance(rows, list) else [result]


def _point(row: Json, seeded: bool = False) -> Point:
    """The numbers of a row. Raises ValueError where it has none."""
    found = {
        name.removesuffix("_ms"): Measurement(unit, higher, [scale * float(row[name])], seeded)
        for name, (unit, higher, scale) in FIELDS.items()
        if row.get(name)
    }
    if not found:
        raise ValueError(f"none of {', '.join(FIELDS)}")
    return found


def _serve(result: Json) -> Iterator[tuple[str, Point]]:
    for row in serving_rows(result):
        name = f"rate {row.get('request_rate', 'inf')}, concurrency {row.get('max_concurrency') or 'any'}"
        yield name, _point(row, seeded=True)


def _offline(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("points", ()):
        yield "all prompts", _point(row, seeded=True)


def _one_batch(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("results", ()):
        for run in row.get("runs") or [row]:
            yield f"batch {row['batch_size']}, {row['input_len']} in, {row['output_len']} out", _point(run)


def _startup(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("starts", ()):
        phases = {phase["name"]: float(phase["seconds"]) for phase in row["phases"]}
        of_phases = {f"phase: {name}": Measurement("s", False, [seconds]) for name, seconds in phases.items()}
        yield f"{row['start']} start", _point(row) | of_phases


def _kernels(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("rows", ()):
        if row.get("us") and not row.get("failed"):
            yield f"{row['operation']}, {row['case']}, {row['backend']}", _point(row)


def _share(row: Json) -> Measurement:
    hits, total = int(row["hits"]), int(row["total"])
    return Measurement("", True, [hits / total], hits=(hits, total))


def _eval(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("results", ()):
        if isinstance(row.get("hits"), int) and row.get("total"):
            yield str(row["task"]), {"share": _share(row)}


def _ablate(result: Json) -> Iterator[tuple[str, Point]]:
    """A cell is a point; its rounds are repeats with the same work."""
    for row in result["cells"]:
        point: Point = {}
        for group in rate_groups(result):
            for head, (rates,) in rates_of([row], group).items():
                if values := [rate for rate in rates.values() if rate]:
                    point[head + group.suffix] = Measurement("tok/s", True, values)
        for entry in row.get("accuracy", ()):
            if entry.get("total") and "hits" in entry:
                point[str(entry["task"])] = _share(entry)
        if point:
            yield differences_from_base(result["columns"], row["columns"]), point


READERS = {
    "bench serve": _serve,
    "bench offline": _offline,
    "bench one-batch": _one_batch,
    "bench startup": _startup,
    "bench kernels": _kernels,
    "eval": _eval,
    "ablate": _ablate,
}
