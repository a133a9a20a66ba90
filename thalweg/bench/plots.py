"""Plots of results with matplotlib, which only `save` imports. The same numbers give the same bytes, so committed plots
do not change by themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from thalweg.bench.errors import BenchError

FORMATS = ("png", "svg")
BLUE, GREEN, RED, GREY = "#2f7fb8", "#3a9a5b", "#c0392b", "#8a97a5"
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

Values = Sequence[float | None]
Interval = tuple[float, float] | None


class Lines(NamedTuple):
    """Lines over numbers, by label."""

    title: str
    label: str  # of the x axis
    places: Sequence[float]
    lines: Mapping[str, Sequence[float]]

    def draw(self, axis: Any) -> None:
        for (label, values), colour in zip(self.lines.items(), CYCLE * len(self.lines), strict=False):
            axis.plot(self.places, values, "o-", color=colour, label=label)
        axis.set_ylim(bottom=0)
        if len(self.lines) > 1:
            axis.legend(fontsize=8)


class Bars(NamedTuple):
    """A bar for each row, the first on top. Several values of a row follow each other in colours of their own."""

    title: str
    label: str  # of the x axis
    rows: Sequence[str]
    values: Mapping[str, Values]  # by label
    intervals: Sequence[Interval] = ()  # of the rows
    colours: Sequence[str] = ()  # of the rows

    def draw(self, axis: Any) -> None:
        left = [0.0] * len(self.rows)
        for (label, values), colour in zip(self.values.items(), CYCLE * len(self.values), strict=False):
            known = [value or 0.0 for value in values]
            axis.barh(range(len(known)), known, left=left, color=self.colours or colour, label=label)
            left = [before + value for before, value in zip(left, known, strict=True)]
        for place, ends in enumerate(self.intervals):
            if ends is not None:
                axis.plot(ends, [place, place], color="black", linewidth=1.5)
        axis.set(yticks=range(len(self.rows)), yticklabels=self.rows)
        axis.invert_yaxis()
        if len(self.values) > 1:
            axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


class Distribution(NamedTuple):
    """The share of the values that are at most x, with marked values by label."""

    title: str
    label: str
    values: Sequence[float]
    marks: Mapping[str, float]

    def draw(self, axis: Any) -> None:
        axis.ecdf(self.values, color=BLUE)
        for (label, value), colour in zip(self.marks.items(), (GREY, RED), strict=False):
            axis.axvline(value, color=colour, label=label)
        axis.legend(fontsize=8)


class Seconds(NamedTuple):
    """A value of each second."""

    title: str
    label: str
    values: Sequence[float]

    def draw(self, axis: Any) -> None:
        axis.stairs(self.values, fill=True, color=BLUE, alpha=0.75)


class Figure(NamedTuple):
    """A picture: panels side by side."""

    suffix: str  # of the file's name
    panels: Sequence[Lines | Bars | Distribution | Seconds]


def has_matplotlib() -> bool:
    return find_spec("matplotlib") is not None


def save(figure: Figure, place: Path, formats: Iterable[str], note: str = "") -> list[Path]:
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
    count, rows = len(figure.panels), max(len(panel.rows) if isinstance(panel, Bars) else 0 for panel in figure.panels)
    size = (max(count, 2) * PANEL_INCHES + 0.4, 0.9 + ROW_INCHES * rows if rows else HEIGHT_INCHES)
    with rc_context(STYLE):
        canvas = Canvas(figsize=size, dpi=DPI, layout="constrained")
        for axis, panel in zip(canvas.subplots(1, count, squeeze=False)[0], figure.panels, strict=True):
            axis.set_title(panel.title, fontsize=9, loc="left", fontweight="bold")
            axis.set_xlabel(panel.label)
            panel.draw(axis)
        paths = [place.with_name(f"{place.name}.{ending}") for ending in formats]
        for path in paths:
            svg = {"Date": None, "Description": note or None}
            canvas.savefig(path, metadata=svg if path.suffix == ".svg" else {"Software": None})
    return paths
