"""`thalweg bench report`: tables (Markdown) and plots (PNG, SVG) of results, from their JSON alone."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from thalweg.bench import ablate_tables, plots
from thalweg.bench.compare import percent
from thalweg.bench.plots import FORMATS, Draw, PlotError
from thalweg.bench.readings import NOT_WHOLE, Json, ReadError, kind, load, rows_of
from thalweg.bench.usage import Parser

ROW_INCHES, HEAD_INCHES = 0.24, 0.9  # of a plot with a line for each row


@dataclass(frozen=True, slots=True)
class Figure:
    """suffix: of the file's name. height: in inches."""

    suffix: str
    draw: Draw
    panels: int
    height: float = plots.HEIGHT


@dataclass(frozen=True, slots=True)
class Section:
    """What is shown of one result."""

    table: list[str]
    figures: list[Figure]


def markdown(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; numbers are rounded to what is worth reading and stand right."""
    numeric = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(heads))]
    ruler = (" ---: " if right else " --- " for right in numeric)
    lines = [f"| {' | '.join(heads)} |", "|" + "|".join(ruler) + "|"]
    return [*lines, *(f"| {' | '.join(_cell(value) for value in row)} |" for row in rows)]


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


SERVED = (
    ("rate", "request_rate"), ("concurrency", "max_concurrency"), ("done", "completed"), ("failed", "failed"),
    ("req/s", "request_throughput"), ("goodput", "goodput"), ("in tok/s", "input_throughput"), ("out tok/s", "output_throughput"),
    ("TTFT p50 ms", "median_ttft_ms"), ("p99", "p99_ttft_ms"), ("TPOT p50 ms", "median_tpot_ms"), ("p99", "p99_tpot_ms"),
    ("ITL p50 ms", "median_itl_ms"), ("p99", "p99_itl_ms"), ("cache hits", "cache_hit_rate"), ("possible", "cache_hit_possible"),
    ("accept length", "accept_length"),
)  # fmt: skip
TURNS = (
    ("turn", "turn"), ("answered", "completed"), ("prompt tokens", "mean_input_tokens"), ("cache hits", "cache_hit_rate"),
    ("TTFT p50 ms", "median_ttft_ms"), ("p99", "p99_ttft_ms"), ("TPOT p50 ms", "median_tpot_ms"),
)  # fmt: skip


def _columns(rows: Sequence[Json], columns: Sequence[tuple[str, str]]) -> list[str]:
    """The columns that some row has; of the cache, only where something was or could have been found."""
    shown = [
        (head, key)
        for head, key in columns
        if any(row.get(key) if key.startswith("cache_") else row.get(key) is not None for row in rows)
    ]
    return markdown([head for head, _ in shown], [[row.get(key) for _, key in shown] for row in rows])


def _serve(result: Json) -> Section:
    rows = rows_of(result)
    if not rows:
        raise ReadError("a result without any measurement: it ended before there was one")
    lines, figures = _columns(rows, SERVED), list[Figure]()
    moving = {row[plots.sweep_axis(rows)] for row in rows}
    if len(moving) > 1 and None not in moving and "inf" not in moving:
        figures.append(Figure("sweep", plots.sweep(result), len(plots.SWEEPS)))
    elif rows[0].get("samples", {}).get("ttft_ms"):
        figures.append(Figure("latency", plots.latencies(rows[0]), 4))
    for row in rows:
        if row.get("by_turn"):
            lines += ["", *_columns(row["by_turn"], TURNS)]
            figures.append(Figure("turns", plots.by_turn(row), 3))
            break
    return Section(lines, figures)


def _offline(result: Json) -> Section:
    columns = (
        ("requests", "successful_requests"), ("seconds", "total_latency"), ("in tok/s", "input_throughput"), ("out tok/s", "output_throughput"),
        ("total tok/s", "total_throughput"), ("CPU us an output token", "cpu_us_per_output_token"),
    )  # fmt: skip
    rows = rows_of(result)
    return Section(_columns(rows, columns), [Figure("output", plots.throughput_over_time(rows[:4]), min(len(rows), 4))])


def _one_batch(result: Json) -> Section:
    heads = ("batch", "in", "out", "prefill s", "prefill tok/s", "decode ms", "decode tok/s", "share of the floor")
    rows = [
        (
            row["batch_size"], row["input_len"], row["output_len"], row["prefill_latency"], row["prefill_throughput"],
            1000 * row["median_decode_latency"], row["median_decode_throughput"], row.get("decode_share"),
        )
        for row in result["results"]
    ]  # fmt: skip
    return Section(markdown(heads, rows), [Figure("batches", plots.one_batch(result["results"]), 3)])


def _startup(result: Json) -> Section:
    starts = result["starts"]
    names = list(dict.fromkeys(phase["name"] for start in starts for phase in start["phases"]))
    rows = []
    for start in starts:
        took = {phase["name"]: phase["seconds"] for phase in start["phases"]}
        whole = (start["start"], start["ready_seconds"], start["first_token_seconds"])
        rows.append((*whole, *(took.get(name) for name in names), start["cpu_seconds"]))
    heads = ("start", "ready s", "first token s", *names, "CPU s")
    height = HEAD_INCHES + 2 * ROW_INCHES * max(len(starts), len(names) // 2)
    return Section(markdown(heads, rows), [Figure("phases", plots.startup(starts), 2, height)])


def _compare(result: Json) -> Section:
    changes = result["changes"]
    rows = []
    for one in changes:
        known = one["low"] is not None
        interval = f"{percent(one['low'])} … {percent(one['high'])}" if known else ""
        numbers = (one["a"], one["b"], one["unit"], percent(one["change"]), interval)
        rows.append((one["point"], one["name"], *numbers, one["verdict"]))
    lines = markdown(("point", "measured", "A", "B", "unit", "change", "interval", "verdict"), rows)
    height = HEAD_INCHES + ROW_INCHES * min(len(changes), plots.MOST_BARS)
    return Section(
        [*lines, "", *(f"- {word}" for word in result["words"])], [Figure("changes", plots.changes(changes), 2, height)]
    )


def _eval(result: Json) -> Section:
    rows = [row for row in result["results"] if "share" in row and row.get("total")]
    shown = [
        (row["task"], row["hits"], row["total"], f"{row['share']:.1%}", f"{row['low_95']:.1%} … {row['high_95']:.1%}")
        for row in rows
    ]
    lines = markdown(("task", "right", "of", "share", "95 % interval"), shown)
    return Section(lines, [Figure("tasks", plots.shares(rows), 2, HEAD_INCHES + ROW_INCHES * len(rows))])


def _kernels(result: Json) -> Section:
    """What failed is told below the table."""
    good = [row for row in result["rows"] if not row["failed"]]
    heads = ("operation", "case", "backend", "us", "GB/s", "TFLOP/s", "share of its ceiling")
    rows = [
        (row["operation"], row["case"], row["backend"], row["us"], row["gbs"], row["tflops"], row["share"])
        for row in good
    ]
    failed = [
        f"- {row['operation']}, {row['case']}, {row['backend']}: {row['failed']}"
        for row in result["rows"]
        if row["failed"]
    ]
    shown = plots.longest_cases(good)
    figures = [Figure("kernels", plots.kernels(shown), 3, HEAD_INCHES + ROW_INCHES * len(shown))] if shown else []
    return Section([*markdown(heads, rows), *(["", *failed] if failed else [])], figures)


def _ablate(result: Json) -> Section:
    """Its picture lies beside the result: `thalweg ablate` draws it."""
    worth = ablate_tables.effects(result)
    return Section(
        [ablate_tables.head(result), "", *ablate_tables.cell_table(result), *(["", *worth] if worth else [])], []
    )


READERS: Mapping[str, Callable[[Json], Section]] = {
    "bench serve": _serve,
    "bench offline": _offline,
    "bench one-batch": _one_batch,
    "bench startup": _startup,
    "bench compare": _compare,
    "bench kernels": _kernels,
    "eval": _eval,
    "ablate": _ablate,
}


def section(result: Json) -> Section:
    """Raises ReadError for a result of another command, or one that misses what its command writes."""
    reader = READERS.get(kind(result))
    if reader is None:
        raise ReadError(
            f"nothing is drawn of {result.get('command', 'a result without a command')!r}; of {', '.join(READERS)},"
            " it is"
        )
    try:
        return reader(result)
    except NOT_WHOLE as error:
        raise ReadError(f"not a whole result of `{kind(result)}`: {error!r} is missing or of another kind") from error


def source(name: str, result: Json) -> list[str]:
    """Where the numbers come from, in two lines."""
    device, found = result.get("device", {}), result.get("versions", {})
    machine = ", ".join(device.get("gpus") or [f"{device.get('cpu', 'unknown')}, {device.get('cores', '?')} cores"])
    lines = [
        f"`{name}`: {machine}; Thalweg {found.get('thalweg', '?')} at `{str(result.get('commit', ''))[:12]}`,"
        f" {result.get('date', '')}"
    ]
    lines += ["", f"```sh\n{result.get('command', '')}\n```"]
    if result.get("partial"):
        lines += ["", f"**Partial**: {result.get('ended')}"]
    return lines


def report(files: Sequence[Path], out: Path, formats: Sequence[str]) -> list[Path]:
    """Writes `report.md` and the plots of all results into `out`; what was written. Raises ReadError, PlotError,
    OSError.
    """
    out.mkdir(parents=True, exist_ok=True)
    lines, written = ["# Results", ""], list[Path]()
    for file in files:
        results = load(file)
        for number, result in enumerate(results):
            stem = file.stem if len(results) == 1 else f"{file.stem}_{number + 1}"
            try:
                told, made = _told(file.name, stem, result, out, formats)
            except ReadError as error:
                raise ReadError(f"{file}: {error}") from error
            lines, written = lines + told, written + made
    page = out / "report.md"
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return [page, *written]


def _told(name: str, stem: str, result: Json, out: Path, formats: Sequence[str]) -> tuple[list[str], list[Path]]:
    """The lines of one result, and the plots that were written. Raises ReadError for one that misses what its plots
    show.
    """
    shown, written = section(result), list[Path]()
    try:
        lines = [f"## {result.get('tag') or stem}", "", *source(name, result), "", *shown.table, ""]
        for figure in shown.figures if formats else ():
            made = plots.save(figure.draw, figure.panels, out / f"{stem}_{figure.suffix}", formats, figure.height)
            written += made
            lines += [f"![{figure.suffix}]({made[-1].name})", ""]
    except NOT_WHOLE as error:
        raise ReadError(f"not a whole result of `{kind(result)}`: {error!r} in what is drawn") from error
    return lines, written


def _parser() -> Parser:
    parser = Parser(
        prog="thalweg bench report",
        description=(
            "Tables and plots of results of bench serve, offline, one-batch, startup, compare, kernels, of eval and"
            " ablate."
        ),
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="results; .jsonl has one in each line")
    add(
        "--out",
        type=Path,
        default=Path("report"),
        metavar="FOLDER",
        help="where report.md and the plots go (default: %(default)s)",
    )
    add(
        "--format",
        nargs="+",
        choices=("md", *FORMATS),
        default=list(FORMATS),
        help="of the plots; md: tables alone (default: png svg)",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0: written; 1: a file is no result, cannot be written, or there is nothing to draw with."""
    args = _parser().parse_args(list(sys.argv[1:] if argv is None else argv))
    try:
        for path in report(args.files, args.out, [one for one in FORMATS if one in args.format]):
            print(path)
    except (ReadError, PlotError, OSError) as error:
        print(f"thalweg bench report: {error}", file=sys.stderr)
        return 1
    return 0
