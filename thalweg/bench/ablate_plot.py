"""An ablation as a picture: SVG, a bar for each cell and rate. No library draws it, so it is there wherever Thalweg is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from thalweg.bench.ablate_tables import apart, measures

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
    """The picture as SVG. The fastest cell of each rate is dark; cells of which nothing was measured are counted below."""
    rows: Sequence[Row] = [row for row in result["cells"] if "single" in row]
    without = len(result["cells"]) - len(rows)
    panels = [(name, [measure(row) for row in rows]) for name, measure in measures(result).items()]
    width = LABELS + len(panels) * (BARS + GAP)
    height = TOP + ROW * len(rows) + (36 if without else 14)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(8, 20, f"{result['checkpoint']}: tokens a second", weight="bold"),
    ]
    bases = [(column["name"], column["base"]) for column in result["columns"]]
    lines += [_text(LABELS - 10, _middle(i), apart(bases, row["columns"]), "end") for i, row in enumerate(rows)]
    for place, (name, values) in enumerate(panels):
        lines += _panel(LABELS + place * (BARS + GAP), name, values, rows)
    if without:
        lines.append(_text(8, height - 10, f"{without} more could not run or were not measured", fill=PALE))
    return "\n".join((*lines, "</svg>")) + "\n"


def _panel(left: int, name: str, values: Sequence[float | None], rows: Sequence[Row]) -> Iterator[str]:
    top = max((value for value in values if value), default=1.0)
    yield _text(left, TOP - 12, name, weight="bold")
    for i, value in enumerate(values):
        y = TOP + i * ROW
        if value is None:
            yield _text(left, _middle(i), rows[i]["status"], fill=PALE)
            continue
        wide = max(1.0, value / top * (BARS - 70))
        fill = FILL if value == top else SLOW
        yield f'<rect x="{left}" y="{y + 3}" width="{wide:.1f}" height="{ROW - 6}" fill="{fill}"/>'
        yield _text(left + wide + 5, _middle(i), f"{value:,.0f}" if value >= 100 else f"{value:.1f}")


def _middle(i: int) -> float:
    return TOP + i * ROW + ROW / 2 + 4


def _text(x: float, y: float, text: str, anchor: str = "start", fill: str = INK, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">{escape(text)}</text>'
