"""`thalweg bench report`: tables (Markdown) and plots (PNG, SVG) of results, from their JSON alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from thalweg.bench import ablation_tables, plots
from thalweg.bench.command import CommandParser, add_flags, command
from thalweg.bench.compare import interval, percent
from thalweg.bench.display import accuracy, field_table, fields, markdown_table
from thalweg.bench.errors import BenchError
from thalweg.bench.metrics import SERVED, TURNS
from thalweg.bench.plots import FORMATS, GREEN, GREY, RED, Bars, Distribution, Figure, Lines, Seconds
from thalweg.bench.result_files import INCOMPLETE, Json, ResultFileError, command_of, load, serving_rows

MARKS = ("median", "p99")
MOST_BARS = 40
MOST_CHANGE = 3.0  # a bar ends at four times A: beyond it the others would be too small to see


@dataclass(frozen=True, slots=True)
class ReportSection:
    """The report of one result."""

    table: list[str]
    figures: list[Figure]


OFFLINE = fields("""
requests                successful_requests
seconds                 total_latency
in tok/s                input_throughput
out tok/s               output_throughput
total tok/s             total_throughput
CPU us an output token  cpu_us_per_output_token
""")
BATCHES = fields("""
batch               batch_size
in                  input_len
out                 output_len
prefill s           prefill_latency
prefill tok/s       prefill_throughput
decode ms           decode_ms
decode tok/s        median_decode_throughput
share of the limit  decode_share
""")
FLAGS = """
--out     path=report        folder of report.md and the plots
--format  format...=png svg  of the plots; md: tables alone
"""
KERNELS = fields("""
operation             operation
case                  case
backend               backend
us                    us
GB/s                  gbs
TFLOP/s               tflops
share of its ceiling  share
""")


def _serve(result: Json) -> ReportSection:
    """A plot over the rate or the concurrency where one of them moves, else of the latencies; one over the turns of
    conversations.
    """
    rows = serving_rows(result)
    if not rows:
        raise ResultFileError("a result without any measurement: the run ended before the first one")
    lines, figures = field_table(rows, SERVED), list[Figure]()
    moving = next((key for key in ("request_rate", "max_concurrency") if len({row[key] for row in rows}) > 1), "")
    places = {row[moving] for row in rows} if moving else set()
    if places and not places & {None, "inf"}:
        figures.append(_sweep(rows, moving))
    elif (row := rows[0]).get("samples", {}).get("ttft_ms"):
        panels = [
            Distribution(title, "ms", row["samples"][f"{name}_ms"], {mark: row[f"{mark}_{name}_ms"] for mark in MARKS})
            for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e_latency", "end to end"))
        ]
        output = Seconds("output", "tokens of each second after the start", row["tokens_by_second"])
        figures.append(Figure("latency", [*panels, output]))
    if turns := next((row["by_turn"] for row in rows if row.get("by_turn")), None):
        lines += ["", *field_table(turns, TURNS)]
        figures.append(Figure("turns", [
            _lines("TTFT of each turn, ms", "turn", turns, {mark: f"{mark}_ttft_ms" for mark in MARKS}),
            _lines("prompt tokens", "turn", turns, {"mean": "mean_input_tokens"}),
            _lines("share found in the cache", "turn", turns, {"hits": "cache_hit_rate"}),
        ]))  # fmt: skip
    return ReportSection(lines, figures)


def _sweep(rows: Sequence[Json], moving: str) -> Figure:
    """Throughput and latencies, means over the repeats."""
    keys = ["output_throughput", *(f"{mark}_{name}_ms" for name in ("ttft", "tpot") for mark in MARKS)]
    places = sorted({float(row[moving]) for row in rows})
    repeats = {place: [row for row in rows if float(row[moving]) == place] for place in places}
    means = [
        {moving: place, **{key: fmean(float(row[key]) for row in same) for key in keys}}
        for place, same in repeats.items()
    ]
    panels = [_lines("throughput, tokens/s", moving, means, {"output": "output_throughput"})]
    for name in ("ttft", "tpot"):
        panels.append(_lines(f"{name.upper()}, ms", moving, means, {mark: f"{mark}_{name}_ms" for mark in MARKS}))
    return Figure("sweep", panels)


def _lines(title: str, key: str, rows: Sequence[Json], columns: Mapping[str, str]) -> Lines:
    """columns: fields by label, over the field `key`."""
    lines = {label: [row[column] for row in rows] for label, column in columns.items()}
    return Lines(title, key.replace("_", " "), [row[key] for row in rows], lines)


def _offline(result: Json) -> ReportSection:
    rows = [[row[key] for key in OFFLINE.values()] for row in serving_rows(result)]
    return ReportSection(markdown_table(list(OFFLINE), rows), [])


def _one_batch(result: Json) -> ReportSection:
    rows = [row | {"decode_ms": 1000 * row["median_decode_latency"]} for row in result["results"]]
    return ReportSection(field_table(rows, BATCHES), [])


def _startup(result: Json) -> ReportSection:
    starts, rows = result["starts"], []
    for start in starts:
        seconds = {phase["name"]: phase["seconds"] for phase in start["phases"]}
        ends = {"ready s": start["ready_seconds"], "first token s": start["first_token_seconds"]}
        rows.append({"start": start["start"], **ends, **seconds, "CPU s": start["cpu_seconds"]})
    phases = dict.fromkeys(phase["name"] for start in starts for phase in start["phases"])
    heads = {name: name for name in ("start", "ready s", "first token s", *phases, "CPU s")}
    labels, values = [row["start"] for row in rows], {phase: [row.get(phase) for row in rows] for phase in phases}
    bars = Bars("from the command to the first token", "seconds", labels, values)
    return ReportSection(field_table(rows, heads), [Figure("phases", [bars])])


def _compare(result: Json) -> ReportSection:
    """The plot has the first changes with their intervals."""
    rows, found = [], result["changes"]
    for one in found:
        change = percent(one["change"]), interval(one["low"], one["high"]), one["verdict"]
        rows.append([one["point"], one["name"], one["a"], one["b"], one["unit"], *change])
    lines = markdown_table(("point", "measured", "A", "B", "unit", "change", "interval", "verdict"), rows)

    def cut(change: float) -> float:
        return 100 * min(change, MOST_CHANGE)

    shown, points = found[:MOST_BARS], len({one["point"] for one in found[:MOST_BARS]})
    labels = [one["name"] if points == 1 else f"{one['name']} ({one['point']})" for one in shown]
    ends = [None if one["low"] is None else (cut(one["low"]), cut(one["high"])) for one in shown]
    colours = [{"better": GREEN, "worse": RED}.get(one["verdict"], GREY) for one in shown]
    values = {"change": [cut(one["change"]) for one in shown]}
    bars = Bars("change from A to B", "%", labels, values, ends, colours)
    return ReportSection([*lines, "", *(f"- {word}" for word in result["words"])], [Figure("changes", [bars])])


def _eval(result: Json) -> ReportSection:
    rows = [[row["task"], row.get("items", row["total"]), *accuracy(row)] for row in result["results"]]
    return ReportSection(markdown_table(("task", "items", "result", "95 % interval"), rows), [])


def _kernels(result: Json) -> ReportSection:
    """Failures are listed below the table."""
    failed = [
        f"- {row['operation']}, {row['case']}, {row['backend']}: {row['failed']}"
        for row in result["rows"]
        if row["failed"]
    ]
    good = [row for row in result["rows"] if not row["failed"]]
    return ReportSection([*field_table(good, KERNELS), *(["", *failed] if failed else [])], [])


def _ablate(result: Json) -> ReportSection:
    """`thalweg ablate` writes its plot beside the result."""
    return ReportSection(ablation_tables.sections(result), [])


READERS: Mapping[str, Callable[[Json], ReportSection]] = {
    "bench serve": _serve,
    "bench offline": _offline,
    "bench one-batch": _one_batch,
    "bench startup": _startup,
    "bench compare": _compare,
    "bench kernels": _kernels,
    "eval": _eval,
    "ablate": _ablate,
}


def section(result: Json) -> ReportSection:
    """Raises ResultFileError for a result of another command, one of INCOMPLETE for one that lacks fields."""
    reader = READERS.get(command_of(result))
    if reader is None:
        command = result.get("command", "a result without a command")
        raise ResultFileError(f"no report of {command!r}; there is one of {', '.join(READERS)}")
    return reader(result)


def source(name: str, result: Json) -> list[str]:
    """Machine, version, date and command of a result."""
    device, versions = result.get("device", {}), result.get("versions", {})
    machine = ", ".join(device.get("gpus") or [f"{device.get('cpu', 'unknown')}, {device.get('cores', '?')} cores"])
    version = f"Thalweg {versions.get('thalweg', '?')} at `{str(result.get('commit', ''))[:12]}`"
    lines = [f"`{name}`: {machine}; {version}, {result.get('date', '')}", ""]
    lines += [f"```sh\n{result.get('command', '')}\n```"]
    return [*lines, "", f"**Partial**: {result.get('ended')}"] if result.get("partial") else lines


def report(files: Sequence[Path], out: Path, formats: Sequence[str]) -> list[Path]:
    """Writes `report.md` and the plots of all results into `out`; returns the paths. Raises BenchError, OSError."""
    out.mkdir(parents=True, exist_ok=True)
    lines, written = ["# Results", ""], list[Path]()
    for file in files:
        results = load(file)
        for number, result in enumerate(results, 1):
            stem = file.stem if len(results) == 1 else f"{file.stem}_{number}"
            try:
                shown = section(result)
                lines += [f"## {result.get('tag') or stem}", "", *source(file.name, result), "", *shown.table, ""]
                for figure in shown.figures if formats else ():
                    written += plots.save(figure, out / f"{stem}_{figure.suffix}", formats)
                    lines += [f"![{figure.suffix}]({written[-1].name})", ""]
            except ResultFileError as error:
                raise ResultFileError(f"{file}: {error}") from error
            except INCOMPLETE as error:
                raise ResultFileError(f"{file}: incomplete result of `{command_of(result)}`: {error!r}") from error
    page = out / "report.md"
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return [page, *written]


@command("thalweg bench report")
def main(argv: list[str]) -> int:
    """0: written; 1: a file is no result or cannot be written, or matplotlib is missing."""
    description = (
        "Tables and plots of results of bench serve, offline, one-batch, startup, compare, kernels, eval and ablate."
    )
    parser = CommandParser(prog="thalweg bench report", description=description)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="results; a .jsonl has one in each line")
    add_flags(parser, "", FLAGS, format=("md", *FORMATS))
    args = parser.parse_args(argv)
    try:
        paths = report(args.files, args.out, [name for name in FORMATS if name in args.format])
    except OSError as error:
        raise BenchError(f"cannot write the report: {error}") from error
    print("\n".join(map(str, paths)))
    return 0
