"""Reading result files of any command: points with named measurements, each with its repeats or samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.bench.ablation_tables import differences_from_base, rate_groups, rounds_of
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
    values: list[float] = field(default_factory=list)  # one of each repeat
    samples: list[float] = field(default_factory=list)  # of a single run: of each `sampled`, or of each second
    statistic: str = ""  # what is taken of the samples: mean, median, p99; rate: tokens of each second
    hits: tuple[int, int] | None = None  # (hits, total) of a share
    seeded: bool = False  # the i-th repeat has the same work in every run with these settings
    sampled: str = "requests"


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
                _merge(merged.setdefault(name, {}), point)
        except INCOMPLETE as error:
            raise ResultFileError(f"incomplete result of `{command_of(result)}`: {error!r}") from error
    if not merged:
        raise ResultFileError("a result without any measurement: the run ended before the first one")
    return merged


def _merge(into: Point, more: Point) -> None:
    for name, measurement in more.items():
        if name in into:
            into[name].values += measurement.values
            into[name].samples = []  # of a single run only
        else:
            into[name] = measurement


def serving_rows(result: Json) -> list[Json]:
    """The points of a serving result: one, or those of a sweep."""
    rows = result.get("points")
    return rows if isinstance(rows, list) else [result]


def _floats(values: Iterable[Any], scale: float = 1.0) -> list[float]:
    return [scale * float(value) for value in values]


def _serve(result: Json) -> Iterator[tuple[str, Point]]:
    for row in serving_rows(result):
        known = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        point: Point = {}
        for name, unit in (("request_throughput", "req/s"), ("output_throughput", "tok/s"), ("goodput", "req/s")):
            if name in known:
                point[name] = Measurement(unit, True, [known[name]], seeded=True)
        if "output_throughput" in point:
            point["output_throughput"].samples = _floats(row.get("tokens_by_second", ()))
            point["output_throughput"].statistic = "rate"
        for latency in ("ttft", "tpot", "itl", "e2e_latency"):
            for statistic in ("mean", "median", "p99"):
                if (value := known.get(f"{statistic}_{latency}_ms")) is not None:
                    samples = _floats(row.get("samples", {}).get(f"{latency}_ms", ()))
                    point[f"{statistic}_{latency}"] = Measurement("ms", False, [value], samples, statistic, seeded=True)
        for name in ("accept_length", "cache_hit_rate"):
            if known.get(name):
                point[name] = Measurement("", True, [known[name]], seeded=True)
        yield f"rate {row.get('request_rate', 'inf')}, concurrency {row.get('max_concurrency') or 'any'}", point


def _offline(result: Json) -> Iterator[tuple[str, Point]]:
    units = {"output_throughput": "tok/s", "total_throughput": "tok/s", "cpu_us_per_output_token": "us"}
    for row in result.get("points", ()):
        point = {
            name: Measurement(unit, unit != "us", _floats([row[name]]), seeded=True) for name, unit in units.items()
        }
        point["output_throughput"].samples = _floats(row["tokens_by_second"])
        point["output_throughput"].statistic = "rate"
        yield "all prompts", point


def _one_batch(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("results", ()):
        runs = row.get("runs") or [row]
        names = ("prefill_latency", "median_decode_latency", "total_latency")
        point = {name: Measurement("ms", False, _floats((run[name] for run in runs), 1000)) for name in names}
        decode = point["median_decode_latency"]
        decode.samples, decode.statistic = _floats(row.get("decode_latencies", ()), 1000), "median"
        decode.sampled = "steps"
        yield f"batch {row['batch_size']}, {row['input_len']} in, {row['output_len']} out", point


def _startup(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("starts", ()):
        seconds = {name: row[name] for name in ("ready_seconds", "first_token_seconds", "cpu_seconds")}
        seconds |= {f"phase: {phase['name']}": phase["seconds"] for phase in row["phases"]}
        yield f"{row['start']} start", {name: Measurement("s", False, _floats([one])) for name, one in seconds.items()}


def _kernels(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("rows", ()):
        if row.get("us") and not row.get("failed"):
            rounds = _floats(row.get("rounds_us", ()))
            time = Measurement("us", False, _floats([row["us"]]), rounds, "median", sampled="rounds")
            yield f"{row['operation']}, {row['case']}, {row['backend']}", {"time": time}


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
            for name, rate in group.rates.items():
                if values := [float(value) for one in rounds_of(row).values() if (value := rate(one))]:
                    point[group.full_name(name)] = Measurement("tok/s", True, values)
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
