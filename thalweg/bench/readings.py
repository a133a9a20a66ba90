"""What a result file says, whatever command wrote it: points with named measurements, each with its repeats or
samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.bench.ablate_tables import apart, groups, rounds

Json = Mapping[str, Any]
NOT_WHOLE = (LookupError, TypeError, AttributeError, ValueError)  # what reading JSON of another shape ends in


class ReadError(Exception):
    """A file that is no result; names it, and the line where there are lines."""


@dataclass(slots=True)
class Reading:
    """One measurement at one point.

    unit: of the values. higher: whether more is better. values: one for each repeat. samples: of a single run, of each
    request or whatever `what` says (`of` says what is taken of them: mean, median, p99) or of each second (`of` is
    rate). hits: (hits, total) of a share. seeded: the i-th repeat had the same work in every run with these settings.
    """

    unit: str
    higher: bool
    values: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    of: str = ""
    hits: tuple[int, int] | None = None
    seeded: bool = False
    what: str = "requests"


Point = dict[str, Reading]
Points = dict[str, Point]


def load(path: Path) -> list[Json]:
    """The results of a file: one, or one for each line of a `.jsonl`. Raises ReadError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReadError(f"cannot read {path}: {error}") from error
    if path.suffix != ".jsonl":
        return [_object(text, str(path))]
    found = [
        _object(line, f"{path}, line {number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()
    ]
    if not found:
        raise ReadError(f"{path}: no results in it")
    return found


def _object(text: str, where: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ReadError(f"{where}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ReadError(f"{where}: a result is a JSON object")
    return value


def kind(result: Json) -> str:
    """The command that wrote it, "bench serve" for a result of SGLang's tool; "" where it cannot be told."""
    words = str(result.get("command", "")).split()[:3]
    if words[:1] == ["thalweg"]:
        return " ".join(words[1:3] if words[1:2] == ["bench"] else words[1:2])
    return "bench serve" if "mean_ttft_ms" in result else ""


def points(results: Sequence[Json]) -> Points:
    """All points of the results, repeats of one point brought together. Raises ReadError for what no reader knows or
    can read.
    """
    found: Points = {}
    for result in results:
        reader = READERS.get(kind(result))
        if reader is None:
            known = ", ".join(READERS)
            raise ReadError(f"no result of {known}: its command is {result.get('command', 'not told')!r}")
        try:
            for name, point in reader(result):
                _add(found.setdefault(name, {}), point)
        except NOT_WHOLE as error:
            raise ReadError(f"not a whole result of `{kind(result)}`: {error!r}") from error
    if not found:
        raise ReadError("a result without any measurement: it ended before there was one")
    return found


def _add(into: Point, more: Point) -> None:
    for name, reading in more.items():
        if name not in into:
            into[name] = reading
        else:
            into[name].values += reading.values
            into[name].samples = []  # of a single run only


def rows_of(result: Json) -> list[Json]:
    """The rows of a serving result: its points, or itself."""
    rows = result.get("points")
    return rows if isinstance(rows, list) else [result]


_RATES = ("request_throughput", "output_throughput", "goodput")
_UNITS = {"request_throughput": "req/s", "goodput": "req/s"}
_STATISTICS = ("mean", "median", "p99")


def _serve(result: Json) -> Iterator[tuple[str, Point]]:
    for row in rows_of(result):
        concurrency = row.get("max_concurrency") or "any"
        point: Point = {}
        for name in _RATES:
            if isinstance(row.get(name), int | float):
                point[name] = Reading(_UNITS.get(name, "tok/s"), True, [float(row[name])], seeded=True)
        if "output_throughput" in point:
            point["output_throughput"].samples = [float(one) for one in row.get("tokens_by_second", ())]
            point["output_throughput"].of = "rate"
        samples = row.get("samples", {})
        for latency in ("ttft", "tpot", "itl", "e2e_latency"):
            for of in _STATISTICS:
                if isinstance(value := row.get(f"{of}_{latency}_ms"), int | float):
                    drawn = [float(one) for one in samples.get(f"{latency}_ms", ())]
                    point[f"{of}_{latency}"] = Reading("ms", False, [float(value)], drawn, of, seeded=True)
        for name, higher in (("accept_length", True), ("cache_hit_rate", True)):
            if isinstance(row.get(name), int | float) and row[name]:
                point[name] = Reading("", higher, [float(row[name])], seeded=True)
        yield f"rate {row.get('request_rate', 'inf')}, concurrency {concurrency}", point


def _offline(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("points", ()):
        point = {
            name: Reading("tok/s", True, [float(row[name])], seeded=True)
            for name in ("output_throughput", "total_throughput")
        }
        point["output_throughput"].samples = [float(one) for one in row["tokens_by_second"]]
        point["output_throughput"].of = "rate"
        point["cpu_us_per_output_token"] = Reading("us", False, [float(row["cpu_us_per_output_token"])], seeded=True)
        yield "all prompts", point


def _one_batch(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("results", ()):
        runs = row.get("runs") or [row]
        point = {
            name: Reading("ms", False, [1000 * float(run[name]) for run in runs])
            for name in ("prefill_latency", "median_decode_latency", "total_latency")
        }
        decode = point["median_decode_latency"]
        decode.samples = [1000 * float(seconds) for seconds in row.get("decode_latencies", ())]
        decode.of, decode.what = "median", "steps"
        yield f"batch {row['batch_size']}, {row['input_len']} in, {row['output_len']} out", point


def _startup(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("starts", ()):
        names = ("ready_seconds", "first_token_seconds", "cpu_seconds")
        point = {name: Reading("s", False, [float(row[name])]) for name in names}
        for phase in row["phases"]:
            point[f"phase: {phase['name']}"] = Reading("s", False, [float(phase["seconds"])])
        yield f"{row['start']} start", point


def _kernels(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("rows", ()):
        if row.get("us") and not row.get("failed"):
            rounds = [float(one) for one in row.get("rounds_us", ())]
            time = Reading("us", False, [float(row["us"])], rounds, "median", what="rounds")
            yield f"{row['operation']}, {row['case']}, {row['backend']}", {"time": time}


def _eval(result: Json) -> Iterator[tuple[str, Point]]:
    for row in result.get("results", ()):
        if isinstance(row.get("hits"), int) and row.get("total"):
            yield (
                str(row["task"]),
                {"share": Reading("", True, [row["hits"] / row["total"]], hits=(row["hits"], row["total"]))},
            )


def _ablate(result: Json) -> Iterator[tuple[str, Point]]:
    """A cell is a point, its rounds are repeats: the same work in each."""
    bases = [(column["name"], column["base"]) for column in result["columns"]]
    for row in result["cells"]:
        point: Point = {}
        for group in groups(result):
            for name, measure in group.measures.items():
                values = [float(value) for one in rounds(row).values() if (value := measure(one))]
                if values:
                    point[f"{name}, a CPU second" if "CPU" in group.title else name] = Reading("tok/s", True, values)
        for entry in row.get("accuracy", ()):
            if entry.get("total") and "hits" in entry:
                hits = int(entry["hits"]), int(entry["total"])
                point[str(entry["task"])] = Reading("", True, [hits[0] / hits[1]], hits=hits)
        if point:
            yield apart(bases, row["columns"]), point


READERS = {
    "bench serve": _serve,
    "bench offline": _offline,
    "bench one-batch": _one_batch,
    "bench startup": _startup,
    "bench kernels": _kernels,
    "eval": _eval,
    "ablate": _ablate,
}
