"""The plots of results, with matplotlib, which only this file imports. The same numbers give the same bytes, so
committed pictures do not change by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from thalweg.bench.readings import Json, rows_of

Draw = Callable[[Any], None]  # on a matplotlib Figure
FORMATS = ("png", "svg")
BLUE, ORANGE, GREEN, RED, GREY = "#2f7fb8", "#d9822b", "#3a9a5b", "#c0392b", "#8a97a5"
CYCLE = (BLUE, ORANGE, GREEN, RED, "#7b5ea7", "#a8785c", GREY, "#4bb3b3", "#b5b03c")
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
PANEL, HEIGHT, DPI = 3.6, 2.9, 144  # inches of a panel, dots an inch
MOST_BARS = 40
MOST_CHANGE = 3.0  # beyond the fourfold a bar ends: the rest would be too small to see


class PlotError(Exception):
    """There is nothing to draw with; the message says what to install."""


def save(draw: Draw, panels: int, place: Path, formats: Sequence[str], height: float = HEIGHT) -> list[Path]:
    """Draws `panels` panels side by side and writes `place` with each ending of `formats`. Raises PlotError,
    OSError.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(
            "plots need matplotlib: pip install 'thalweg[bench]', or ask for tables alone with --format md"
        ) from error
    written = []
    with rc_context(STYLE):
        figure = Figure(figsize=(PANEL * panels + 0.4, height), dpi=DPI, layout="constrained")
        draw(figure)
        for ending in formats:
            path = place.with_name(f"{place.name}.{ending}")
            figure.savefig(path, metadata={"Date": None} if ending == "svg" else {"Software": None})
            written.append(path)
    return written


def _panels(figure: Any, titles: Sequence[str]) -> list[Any]:
    axes = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=9, loc="left", fontweight="bold")
    return axes


def latencies(row: Json) -> Draw:
    """What share of the requests had at most which TTFT, TPOT and latency, and output tokens over time."""

    def draw(figure: Any) -> None:
        axes = _panels(figure, ("TTFT", "TPOT", "end to end", "output"))
        for axis, name in zip(axes, ("ttft", "tpot", "e2e_latency"), strict=False):
            values = sorted(row["samples"][f"{name}_ms"])
            axis.step(values, [(i + 1) / len(values) for i in range(len(values))], where="post", color=BLUE)
            for q, colour in (("median", GREY), ("p99", RED)):
                axis.axvline(row[f"{q}_{name}_ms"], color=colour, linewidth=0.9, label=q)
            axis.set(xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
            axis.legend(loc="lower right", fontsize=8)
        _over_time(axes[3], row["tokens_by_second"])

    return draw


def _over_time(axis: Any, series: Sequence[float]) -> None:
    axis.stairs(series, fill=True, color=BLUE, alpha=0.75)
    axis.set(xlabel="seconds after the start", ylabel="tokens in each second", ylim=(0, None))


def throughput_over_time(rows: Sequence[Json]) -> Draw:
    """Output tokens in each second of each pass."""

    def draw(figure: Any) -> None:
        for axis, row in zip(_panels(figure, [f"pass {row['repeat'] + 1}" for row in rows]), rows, strict=True):
            _over_time(axis, row["tokens_by_second"])

    return draw


SWEEPS = (
    ("throughput, tokens/s", (("output_throughput", "output", BLUE),)),
    ("TTFT, ms", (("median_ttft_ms", "median", BLUE), ("p99_ttft_ms", "p99", RED))),
    ("TPOT, ms", (("median_tpot_ms", "median", BLUE), ("p99_tpot_ms", "p99", RED))),
)


def sweep(result: Json) -> Draw:
    """Throughput and latencies over the request rate, or over the concurrency where that is what changes. Repeats are
    dots, their mean a line.
    """
    rows = rows_of(result)
    axis_name = sweep_axis(rows)

    def draw(figure: Any) -> None:
        for axis, (_, lines) in zip(_panels(figure, [title for title, _ in SWEEPS]), SWEEPS, strict=True):
            for key, label, colour in lines:
                places = [float(row[axis_name]) for row in rows]
                values = [float(row[key]) for row in rows]
                axis.plot(places, values, ".", color=colour, alpha=0.5, markersize=5)
                means = {place: [v for p, v in zip(places, values, strict=True) if p == place] for place in places}
                axis.plot(
                    sorted(means), [sum(means[p]) / len(means[p]) for p in sorted(means)], color=colour, label=label
                )
            axis.set(xlabel=axis_name.replace("_", " ") + (" (req/s)" if "rate" in axis_name else ""), ylim=(0, None))
            axis.legend(fontsize=8)

    return draw


def sweep_axis(rows: Sequence[Json]) -> str:
    """What changes from point to point: the rate, unless that is the same everywhere."""
    return "request_rate" if len({row["request_rate"] for row in rows}) > 1 else "max_concurrency"


def by_turn(row: Json) -> Draw:
    """TTFT, prompt length and the share found in the cache, turn by turn."""
    turns: Sequence[Mapping[str, float]] = row["by_turn"]

    def draw(figure: Any) -> None:
        axes = _panels(figure, ("TTFT of each turn, ms", "prompt tokens", "share found in the cache"))
        places = [turn["turn"] for turn in turns]
        axes[0].plot(places, [turn["median_ttft_ms"] for turn in turns], "o-", color=BLUE, label="median")
        axes[0].plot(places, [turn["p99_ttft_ms"] for turn in turns], "o-", color=RED, label="p99")
        axes[0].legend(fontsize=8)
        axes[1].bar(places, [turn["mean_input_tokens"] for turn in turns], color=BLUE)
        axes[2].bar(places, [turn["cache_hit_rate"] for turn in turns], color=GREEN)
        axes[2].set(ylim=(0, 1))
        for axis in axes:
            axis.set(xlabel="turn", xticks=places, ylim=(0, 1 if axis is axes[2] else None))

    return draw


def one_batch(rows: Sequence[Json]) -> Draw:
    """Decode over the batch size, one line for each pair of lengths, and the floor where it is known."""

    def draw(figure: Any) -> None:
        axes = _panels(figure, ("decode, tokens/s", "decode step, ms", "prefill, tokens/s"))
        lengths = sorted({(row["input_len"], row["output_len"]) for row in rows})
        for colour, (inputs, outputs) in zip(CYCLE, lengths, strict=False):
            mine = [row for row in rows if (row["input_len"], row["output_len"]) == (inputs, outputs)]
            batches, label = [row["batch_size"] for row in mine], f"{inputs} in, {outputs} out"
            axes[0].plot(batches, [row["median_decode_throughput"] for row in mine], "o-", color=colour, label=label)
            axes[1].plot(
                batches, [1000 * row["median_decode_latency"] for row in mine], "o-", color=colour, label=label
            )
            axes[2].plot(batches, [row["prefill_throughput"] for row in mine], "o-", color=colour, label=label)
            if all("decode_floor" in row for row in mine):
                floor = [1000 * row["decode_floor"] for row in mine]
                axes[1].plot(batches, floor, "--", color=colour, label="floor")
        batches = sorted({row["batch_size"] for row in rows})
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.minorticks_off()
            axis.set(xlabel="batch size", ylim=(0, None), xticks=batches, xticklabels=[str(one) for one in batches])
            axis.legend(fontsize=8)

    return draw


def startup(starts: Sequence[Json]) -> Draw:
    """Each start as a bar of its phases."""

    def draw(figure: Any) -> None:
        (axis,) = _panels(figure, ("from the command to the first token",))
        colours: dict[str, str] = {}
        for place, start in enumerate(starts):
            left = 0.0
            for phase in start["phases"]:
                name = phase["name"]
                label = None if name in colours else name
                colour = colours.setdefault(name, CYCLE[len(colours) % len(CYCLE)])
                axis.barh(place, phase["seconds"], left=left, color=colour, label=label)
                left += phase["seconds"]
        axis.set(yticks=range(len(starts)), yticklabels=[start["start"] for start in starts], xlabel="seconds")
        axis.invert_yaxis()
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)

    return draw


def longest_cases(rows: Sequence[Json]) -> list[Json]:
    """Of each operation the case that takes longest, by every backend that ran it."""
    longest: dict[str, Json] = {}
    for row in rows:
        if row["us"] > longest.get(row["operation"], {"us": 0.0})["us"]:
            longest[row["operation"]] = row
    return [row for row in rows if row["case"] == longest[row["operation"]]["case"]]


def kernels(rows: Sequence[Json]) -> Draw:
    """The share of its ceiling that each kernel reaches, a colour for each backend."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))

    def draw(figure: Any) -> None:
        (axis,) = _panels(figure, ("share of the time that reading and multiplying take at best",))
        for backend, colour in zip(backends, CYCLE, strict=False):
            mine = [(place, row["share"]) for place, row in enumerate(rows) if row["backend"] == backend]
            axis.barh([place for place, _ in mine], [share for _, share in mine], color=colour, label=backend)
        axis.set(
            yticks=range(len(rows)), yticklabels=[f"{row['operation']}, {row['case']}" for row in rows], xlim=(0, 1.02)
        )
        axis.invert_yaxis()
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)

    return draw


VERDICT_COLOURS = {"better": GREEN, "worse": RED}


def changes(found: Sequence[Json]) -> Draw:
    """Each change with its interval; what is beyond noise is coloured."""
    shown = found[:MOST_BARS]

    def draw(figure: Any) -> None:
        (axis,) = _panels(figure, ("change from A to B, %",))
        for place, one in enumerate(shown):
            colour = VERDICT_COLOURS.get(one["verdict"], GREY)
            if one["low"] is not None:
                low, high = (100 * min(one[end], MOST_CHANGE) for end in ("low", "high"))
                axis.plot([low, high], [place, place], color=colour, linewidth=2)
            axis.plot([100 * min(one["change"], MOST_CHANGE)], [place], "o", color=colour)
        axis.axvline(0.0, color="black", linewidth=0.8)
        points = len({one["point"] for one in shown})
        labels = [one["name"] if points == 1 else f"{one['name']} ({one['point']})" for one in shown]
        axis.set(yticks=range(len(shown)), yticklabels=labels)
        axis.invert_yaxis()

    return draw


def shares(rows: Sequence[Json]) -> Draw:
    """Tasks with their 95 % intervals."""

    def draw(figure: Any) -> None:
        (axis,) = _panels(figure, ("share of right answers",))
        for place, row in enumerate(rows):
            axis.plot([row["low_95"], row["high_95"]], [place, place], color=BLUE, linewidth=2)
            axis.plot([row["share"]], [place], "o", color=BLUE)
        axis.set(yticks=range(len(rows)), yticklabels=[row["task"] for row in rows], xlim=(-0.02, 1.02))
        axis.invert_yaxis()

    return draw
