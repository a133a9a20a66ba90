"""Plots of results with matplotlib, which only `save` imports. The same numbers give the same bytes, so committed plots
do not change by themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from thalweg.bench.ablation_tables import differences_from_base, rate_groups, rates_of, rounds_of
from thalweg.bench.errors import BenchError
from thalweg.bench.result_files import Json, serving_rows

FORMATS = ("png", "svg")
BLUE, GREEN, RED, GREY, PALE = "#2f7fb8", "#3a9a5b", "#c0392b", "#8a97a5", "#b8cfe0"
CYCLE = (BLUE, RED, "#d9822b", GREEN, "#7b5ea7", "#a8785c", GREY, "#4bb3b3", "#b5b03c")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "thalweg",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.grid": True,
    "grid.color": "#e4e8ec",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
PANEL_INCHES, HEIGHT_INCHES, ROW_INCHES, DPI = 3.6, 2.9, 0.24, 144
MOST_BARS = 40
MOST_CHANGE = 3.0  # a bar ends at four times A: beyond it the others would be too small to see

Values = Sequence[float | None]
Interval = tuple[float, float] | None


class Series(NamedTuple):
    """Values of one colour, one for each place of a panel."""

    label: str
    values: Values
    colour: str = ""  # "": the next one
    intervals: Sequence[Interval] = ()


class Panel(NamedTuple):
    """One set of axes. kind: "lines" over numbers; "bars", "stacked" bars and "points" beside row labels, the first on
    top; "steps" of each second; "distribution" of values.
    """

    title: str
    kind: str
    series: Sequence[Series]
    places: Sequence[Any] = ()  # numbers, or the labels of rows
    label: str = ""  # of the x axis
    top: float | None = None  # where the axis of the values ends
    log: bool = False


class Figure(NamedTuple):
    """A picture: panels side by side."""

    suffix: str  # of the file's name
    panels: Sequence[Panel]
    width: int = 0  # in panels; 0: their number


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def save(figure: Figure, place: Path, formats: Sequence[str], note: str = "") -> list[Path]:
    """Writes `place` with each ending of `formats`. note: the description in an SVG. Raises BenchError without
    matplotlib, OSError.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise BenchError(
            "plots need matplotlib: pip install 'thalweg[bench]', or ask for tables alone with --format md"
        ) from error
    rows = max(len(panel.places) if panel.kind in ("bars", "stacked", "points") else 0 for panel in figure.panels)
    size = (figure.width or len(figure.panels)) * PANEL_INCHES + 0.4, 0.9 + ROW_INCHES * rows if rows else HEIGHT_INCHES
    with rc_context(STYLE):
        canvas = Canvas(figsize=size, dpi=DPI, layout="constrained")
        for axis, panel in zip(canvas.subplots(1, len(figure.panels), squeeze=False)[0], figure.panels, strict=True):
            axis.set_title(panel.title, fontsize=9, loc="left", fontweight="bold")
            _draw(axis, panel)
        paths = [place.with_name(f"{place.name}.{ending}") for ending in formats]
        for path in paths:
            svg = {"Date": None, "Description": note or None}
            canvas.savefig(path, metadata=svg if path.suffix == ".svg" else {"Software": None})
    return paths


def _draw(axis: Any, panel: Panel) -> None:
    in_rows = panel.kind in ("bars", "stacked", "points")
    left = [0.0] * len(panel.places)
    for number, series in enumerate(panel.series):
        colour, style = series.colour or CYCLE[number % len(CYCLE)], {"label": series.label}
        known = [(place, value) for place, value in enumerate(series.values) if value is not None]
        if panel.kind == "lines":
            xs = [panel.places[place] for place, _ in known]
            axis.plot(
                xs, [value for _, value in known], "--" if series.label == "floor" else "o-", color=colour, **style
            )
        elif panel.kind == "steps":
            axis.stairs(series.values, fill=True, color=colour, alpha=0.75)
        elif panel.kind == "distribution":
            axis.ecdf(series.values, color=colour) if number == 0 else axis.axvline(
                series.values[0], color=colour, **style
            )
        elif panel.kind == "points":
            axis.plot([value for _, value in known], [place for place, _ in known], "o", color=colour)
        else:
            places, values = [place for place, _ in known], [value for _, value in known]
            axis.barh(places, values, left=[left[place] for place in places], color=colour, **style)
            for place, value in known if panel.kind == "stacked" else ():
                left[place] += value
        for place, ends in enumerate(series.intervals):
            if ends is not None:
                axis.plot(ends, [place, place], color=colour if panel.kind == "points" else "black", linewidth=1.5)
    axis.set(xlabel=panel.label, **{"xlim" if in_rows else "ylim": (None if panel.kind == "points" else 0, panel.top)})
    if in_rows:
        axis.set(yticks=range(len(panel.places)), yticklabels=panel.places)
        axis.invert_yaxis()
    if panel.log:
        axis.set_xscale("log", base=2)
        axis.minorticks_off()
        axis.set(xticks=sorted(set(panel.places)), xticklabels=map(str, sorted(set(panel.places))))
    if len(panel.series) > 1 and panel.kind != "points":
        axis.legend(fontsize=8, **({"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if in_rows else {}))


def latencies(row: Json) -> Figure:
    """The share of the requests with at most this TTFT, TPOT and latency; output tokens over time."""
    panels = []
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e_latency", "end to end")):
        marks = [Series(mark, [row[f"{mark}_{name}_ms"]], colour) for mark, colour in (("median", GREY), ("p99", RED))]
        series = [Series("", row["samples"][f"{name}_ms"]), *marks]
        panels.append(Panel(title, "distribution", series, label="ms", top=1.02))
    return Figure("latency", [*panels, _over_time("output", row)])


def _over_time(title: str, row: Json) -> Panel:
    label = "tokens of each second after the start"
    return Panel(title, "steps", [Series("output", row["tokens_by_second"])], label=label)


def throughput_over_time(rows: Sequence[Json]) -> Figure:
    """Output tokens of each second of each pass."""
    return Figure("output", [_over_time(f"pass {row['repeat'] + 1}", row) for row in rows])


def sweep_axis(rows: Sequence[Json]) -> str:
    """What changes from point to point: the rate, unless it is the same everywhere."""
    return "request_rate" if len({row["request_rate"] for row in rows}) > 1 else "max_concurrency"


PERCENTILES = ("median", "p99")


def sweep(result: Json) -> Figure:
    """Throughput and latencies over the request rate or the concurrency, means over the repeats."""
    rows = serving_rows(result)
    axis = sweep_axis(rows)
    places = sorted({float(row[axis]) for row in rows})

    def series(label: str, key: str) -> Series:
        return Series(label, [fmean(float(row[key]) for row in rows if float(row[axis]) == place) for place in places])

    label = axis.replace("_", " ") + (" (req/s)" if "rate" in axis else "")
    panels = [Panel("throughput, tokens/s", "lines", [series("output", "output_throughput")], places, label)]
    for name in ("ttft", "tpot"):
        lines = [series(mark, f"{mark}_{name}_ms") for mark in PERCENTILES]
        panels.append(Panel(f"{name.upper()}, ms", "lines", lines, places, label))
    return Figure("sweep", panels)


def by_turn(row: Json) -> Figure:
    """TTFT, prompt length and cache hits, turn by turn."""

    def panel(title: str, keys: Sequence[str], top: float | None = None) -> Panel:
        series = [Series(key.split("_")[0], [turn[key] for turn in row["by_turn"]]) for key in keys]
        return Panel(title, "lines", series, [turn["turn"] for turn in row["by_turn"]], "turn", top)

    return Figure("turns", [
        panel("TTFT of each turn, ms", ["median_ttft_ms", "p99_ttft_ms"]),
        panel("prompt tokens", ["mean_input_tokens"]),
        panel("share found in the cache", ["cache_hit_rate"], 1.0),
    ])  # fmt: skip


def one_batch(rows: Sequence[Json]) -> Figure:
    """Decode and prefill over the batch size, a line for each pair of lengths, and the floor where it is known."""
    batches = sorted({row["batch_size"] for row in rows})
    lengths = dict.fromkeys((row["input_len"], row["output_len"]) for row in rows)

    def panel(title: str, keys: Sequence[str], scale: float = 1.0) -> Panel:
        series = []
        for pair in lengths:
            mine = {row["batch_size"]: row for row in rows if (row["input_len"], row["output_len"]) == pair}
            for key in keys:
                values = [scale * mine[batch][key] if key in mine.get(batch, {}) else None for batch in batches]
                series.append(Series("floor" if "floor" in key else f"{pair[0]} in, {pair[1]} out", values))
        return Panel(title, "lines", series, batches, "batch size", log=True)

    floors = ["decode_floor"] if any("decode_floor" in row for row in rows) else []
    return Figure("batches", [
        panel("decode, tokens/s", ["median_decode_throughput"]),
        panel("decode step, ms", ["median_decode_latency", *floors], 1000),
        panel("prefill, tokens/s", ["prefill_throughput"]),
    ])  # fmt: skip


def startup(starts: Sequence[Json]) -> Figure:
    """Each start as a bar of its phases."""
    seconds = [{phase["name"]: phase["seconds"] for phase in start["phases"]} for start in starts]
    series = [
        Series(name, [each.get(name) for each in seconds])
        for name in dict.fromkeys(n for each in seconds for n in each)
    ]
    labels = [start["start"] for start in starts]
    return Figure("phases", [Panel("from the command to the first token", "stacked", series, labels, "seconds")], 2)


def longest_cases(rows: Sequence[Json]) -> list[Json]:
    """For each operation the case that takes longest, by every backend that ran it."""
    longest: dict[str, Json] = {}
    for row in rows:
        if row["us"] > longest.get(row["operation"], {"us": 0.0})["us"]:
            longest[row["operation"]] = row
    return [row for row in rows if row["case"] == longest[row["operation"]]["case"]]


def kernels(rows: Sequence[Json]) -> Figure:
    """The share of its ceiling that each kernel reaches, a colour for each backend."""
    series = [
        Series(backend, [row["share"] if row["backend"] == backend else None for row in rows])
        for backend in dict.fromkeys(row["backend"] for row in rows)
    ]
    labels = [f"{row['operation']}, {row['case']}" for row in rows]
    title = "share of the time that reading and multiplying take at best"
    return Figure("kernels", [Panel(title, "bars", series, labels, top=1.02)], 3)


def changes(found: Sequence[Json]) -> Figure:
    """Each change with its interval; those beyond noise are coloured."""
    shown = found[:MOST_BARS]

    def percent(one: Json, key: str) -> float:
        return float(100 * min(one[key], MOST_CHANGE))

    def series(colour: str, verdicts: Sequence[str]) -> Series:
        values: list[float | None] = [None] * len(shown)
        ends: list[Interval] = [None] * len(shown)
        for place, one in enumerate(shown):
            if one["verdict"] in verdicts:
                values[place] = percent(one, "change")
                ends[place] = None if one["low"] is None else (percent(one, "low"), percent(one, "high"))
        return Series("", values, colour, ends)

    others = {one["verdict"] for one in shown} - {"better", "worse"}
    points = len({one["point"] for one in shown})
    labels = [one["name"] if points == 1 else f"{one['name']} ({one['point']})" for one in shown]
    groups = [series(GREEN, ["better"]), series(RED, ["worse"]), series(GREY, sorted(others))]
    return Figure("changes", [Panel("change from A to B, %", "points", groups, labels)], 2)


def shares(rows: Sequence[Json]) -> Figure:
    """Tasks with their 95 % intervals."""
    series = Series("", [row["share"] for row in rows], BLUE, [(row["low_95"], row["high_95"]) for row in rows])
    return Figure(
        "tasks", [Panel("share of right answers", "points", [series], [row["task"] for row in rows], top=1.02)], 2
    )


def digest(result: Json) -> str:
    """Identifies the cells of an ablation, in the description of its plot."""
    return sha256(json.dumps([result["columns"], result["cells"]]).encode()).hexdigest()


def save_ablation(result: Json, place: Path) -> None:
    """Writes `place`.svg. Raises BenchError without matplotlib, OSError."""
    save(ablation(result), place, ("svg",), digest(result))


def ablation(result: Json) -> Figure:
    """A panel for each rate, a bar for each measured cell: the median, with a line from the least to the most of its
    rounds. The fastest bar is dark.
    """
    rows = [row for row in result["cells"] if rounds_of(row)]
    labels = [differences_from_base(result["columns"], row["columns"]) for row in rows]
    missing, panels = len(result["cells"]) - len(rows), list[Panel]()
    note = f"tokens a second, {result['checkpoint']}" + (
        f"; {missing} more could not run or were not measured" if missing else ""
    )
    for group in rate_groups(result):
        for name, rate in group.rates.items():
            rounds = [rates_of(row, rate) for row in rows]
            medians = [median(each) if each else None for each in rounds]
            fastest = max((value for value in medians if value is not None), default=0.0)
            dark = [value if value == fastest else None for value in medians]
            ends = [(min(each), max(each)) if len(each) > 1 else None for each in rounds]
            series = [
                Series("fastest", dark, BLUE),
                Series("others", [v if v != fastest else None for v in medians], PALE, ends),
            ]
            panels.append(
                Panel(
                    group.full_name(name),
                    "bars",
                    series,
                    [""] * len(rows) if panels else labels,
                    "" if panels else note,
                )
            )
    return Figure("", panels)
