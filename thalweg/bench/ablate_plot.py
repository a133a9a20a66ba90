"""An ablation as a picture: SVG, a bar for each cell and rate, with a line from the least to the most of its rounds. No
library draws it, so it is there wherever Thalweg is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from thalweg.bench.ablate_tables import Measure, apart, groups, rounds

Row = Mapping[str, Any]

LABELS, BARS, ROW, TOP, GAP = (
    330,
    260,
    20,
    56,
    36,
)  # pixels: width of the labels and of a panel, height of a row, of the heading, between panels
INK, PALE, FILL, SLOW = "#1c2733", "#8a97a5", "#2f7fb8", "#b8cfe0"


def plot(result: Mapping[str, Any]) -> str:
    """The picture as SVG. The fastest cell of each rate is dark; cells of which nothing was measured are counted
    below.
    """
    rows: Sequence[Row] = [row for row in result["cells"] if rounds(row)]
    without = len(result["cells"]) - len(rows)
    panels = [
        (f"{name}, a CPU second" if "CPU" in group.title else name, [_values(row, measure) for row in rows])
        for group in groups(result)
        for name, measure in group.measures.items()
    ]
    width = LABELS + len(panels) * (BARS + GAP)
    height = TOP + ROW * len(rows) + (36 if without else 14)
    several = any(len(rounds(row)) > 1 for row in rows)
    spread = ", medians; lines from the least to the most of the rounds" if several else ""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(8, 20, f"{result['checkpoint']}: tokens a second{spread}", weight="bold"),
    ]
    bases = [(column["name"], column["base"]) for column in result["columns"]]
    lines += [_text(LABELS - 10, _middle(i), apart(bases, row["columns"]), "end") for i, row in enumerate(rows)]
    for place, (name, values) in enumerate(panels):
        lines += _panel(LABELS + place * (BARS + GAP), name, values, rows)
    if without:
        lines.append(_text(8, height - 10, f"{without} more could not run or were not measured", fill=PALE))
    return "\n".join((*lines, "</svg>")) + "\n"


def _values(row: Row, measure: Measure) -> list[float]:
    """Of all rounds."""
    return [value for one in rounds(row).values() if (value := measure(one)) is not None]


def _panel(left: int, name: str, values: Sequence[Sequence[float]], rows: Sequence[Row]) -> Iterator[str]:
    most = max((max(each) for each in values if each), default=1.0)
    fastest = max((median(each) for each in values if each), default=1.0)
    scale = (BARS - 70) / most
    yield _text(left, TOP - 12, name, weight="bold")
    for i, each in enumerate(values):
        y = TOP + i * ROW
        if not each:
            yield _text(left, _middle(i), rows[i]["status"], fill=PALE)
            continue
        value, low, high = median(each), left + min(each) * scale, left + max(each) * scale
        fill = FILL if value == fastest else SLOW
        yield f'<rect x="{left}" y="{y + 3}" width="{max(1.0, value * scale):.1f}" height="{ROW - 6}" fill="{fill}"/>'
        if len(each) > 1:
            yield f'<path d="M{low:.1f} {y + ROW / 2:g}H{high:.1f}" stroke="{INK}" stroke-width="1.5"/>'
        yield _text(high + 5, _middle(i), f"{value:,.0f}" if value >= 100 else f"{value:.1f}")


def _middle(i: int) -> float:
    return TOP + i * ROW + ROW / 2 + 4


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = INK, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}"'
        f' font-weight="{weight}">{escape(text)}</text>'
    )
