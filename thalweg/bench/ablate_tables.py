"""An ablation as Markdown: the table of its cells, and what each column is worth. Made from the result's JSON alone, so
that the docs can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean, median
from typing import Any

from thalweg.bench.noise import paired

Result = Mapping[str, Any]
Row = Mapping[str, Any]

CONFIDENCE = 0.95
SURE = 5  # rounds from which on Student's t makes intervals of a sensible width
UNKNOWN = (
    "**One round: nothing tells the noise, and two runs of the very same cell may differ as much as these do**;"
    " `--rounds 5` tells it."
)

Measure = Callable[[Row], float | None]  # of one round of a cell


@dataclass(frozen=True, slots=True)
class Group:
    """Rates that stand in one table. means: what they are, in a sentence. measures: by heading."""

    title: str
    means: str
    measures: Mapping[str, Measure]


def markdown(result: Result) -> str:
    """The whole page of one ablation."""
    parts = [head(result), "", *cell_table(result)]
    worth = effects(result)
    if worth:
        parts += ["", *worth]
    return "\n".join(parts) + "\n"


def head(result: Result) -> str:
    """Of what, on what, and under which load, in a sentence."""
    work, device = result["workload"], result["device"]
    where = ", ".join(device["gpus"]) or f"{device['cores']} cores of {device['cpu']}"
    lengths = f"{work['input_len']} tokens in and {work['output_len']} out on average (± {work['spread']:.0%})"
    shared = f", the first {work['shared_prefix']} tokens in common" if work["shared_prefix"] else ""
    each = "one request" if work["waves"] == 1 else f"{work['waves']} requests"
    many = _rounds(result)
    shown = f" Medians of {many} rounds (least – most)." if many > 1 else ""
    return f"`{result['checkpoint']}` on {where}: {lengths}{shared}; {each} for each at a time.{shown}"


def _rounds(result: Result) -> int:
    return max((len(rounds(row)) for row in result["cells"]), default=0)


# ---- the cells ----


def cell_table(result: Result) -> list[str]:
    """A line for each cell that was measured, with its levels, in a table for each group of rates and one of
    accuracies; then why others were not. What was changed one at a time has one column for all.
    """
    columns, cells = result["columns"], result["cells"]
    measured = [row for row in cells if rounds(row)]
    lines: list[str] = []
    for group in groups(result):
        rows = [[*_which(result, row), *(_shown(row, one) for one in group.measures.values())] for row in measured]
        lines += [f"{group.title}: {group.means}", "", *table([*_heads(result), *group.measures], rows), ""]
    if tasks := _tasks(cells):
        rows = [[*_which(result, row), *_accuracies(row, tasks)] for row in measured]
        lines += ["Right answers, with 95 % intervals:", "", *table([*_heads(result), *tasks], rows), ""]
    rest = [f"- {', '.join(_which(result, row))}: {_remark(row)}" for row in cells if row["status"] != "done"]
    lines += ["Not measured, or not all of it:", "", *rest, ""] if rest else []
    return [*lines, _meanings(columns)] if _meanings(columns) else lines[:-1]


def _heads(result: Result) -> list[str]:
    single = result["mode"] == "one-at-a-time"
    return ["changed"] if single else [column["name"] for column in result["columns"]]


def _which(result: Result, row: Row) -> list[str]:
    """What names a cell: how it differs from the base, or its level of each column."""
    bases, labels = [(column["name"], column["base"]) for column in result["columns"]], row["columns"]
    return [apart(bases, labels)] if result["mode"] == "one-at-a-time" else [labels[name] for name, _ in bases]


def apart(bases: Sequence[tuple[str, str]], labels: Mapping[str, str]) -> str:
    """How labels differ from the base's, in a few words. bases: name and label of each column."""
    return ", ".join(f"{name} {labels[name]}" for name, base in bases if labels[name] != base) or "the base"


def _meanings(columns: Sequence[Mapping[str, Any]]) -> str:
    """What on and off are, where that goes without saying no more."""
    said = []
    for column in columns:
        values = dict(zip(column["levels"], column["values"], strict=True))
        if values not in ({"off": "off", "on": "on"}, {name: name for name in values}):
            said.append(f"{column['name']} {', '.join(f'{label}: {value}' for label, value in values.items())}")
    return f"Levels: {'; '.join(said)}." if said else ""


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns are as wide in a terminal."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)) + " |" for row in cells
    ]
    return [lines[0], "| " + " | ".join("-" * width for width in wide) + " |", *lines[1:]]


def _tasks(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(entry["task"] for row in rows for entry in row.get("accuracy", ())))


def _shown(row: Row, measure: Measure) -> str:
    """The median of the rounds; least and most where there are several."""
    found = [value for one in rounds(row).values() if (value := measure(one)) is not None]
    if not found:
        return "–"
    return _rate(median(found)) + (f" ({_rate(min(found))} – {_rate(max(found))})" if len(found) > 1 else "")


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def _accuracies(row: Row, tasks: Sequence[str]) -> Iterator[str]:
    shares = {entry["task"]: entry for entry in row.get("accuracy", ())}
    for task in tasks:
        yield accuracy(shares[task]) if task in shares else "–"


def accuracy(entry: Mapping[str, Any]) -> str:
    """A share with its 95 % interval, or a perplexity."""
    if "perplexity" in entry:
        return f"{entry['perplexity']:.2f}"
    return f"{entry['share']:.1%} ({entry['low_95']:.1%} – {entry['high_95']:.1%})"


def _remark(row: Row) -> str:
    return ": ".join(word for word in (row["status"], row["reason"]) if word)


# ---- what is measured ----


def groups(result: Result) -> list[Group]:
    """The rates of a cell. On a CPU, which others may use meanwhile, by its time too."""
    many = result["workload"]["concurrency"]
    single = {"one request": _of_single(lambda one: one["decode_tokens_per_s"])}
    whole = {f"{count} at a time": _of_batch(count, lambda one: one["throughput"]) for count in many}
    each = {f"each of {count}": _of_batch(count, lambda one: one["decode_per_request"]) for count in many}
    found = [
        Group(
            "Tokens a second", "of decoding, one request alone; else (prompt + output) / time of a run", single | whole
        ),
        Group("Tokens a second of a request", "output tokens / duration, mean of the run's requests", each),
    ]
    if not result["device"]["gpus"]:
        cpu = {"one request": _of_single(lambda one: (one["input_len"] + one["output_len"]) / one["cpu_seconds"])}
        cpu |= {f"{count} at a time": _of_batch(count, _a_cpu_second) for count in many}
        means = "(prompt + output) / CPU time of the process, which other work on the machine disturbs less"
        found.append(Group("Tokens a CPU second", means, cpu))
    return found


def rounds(row: Row) -> dict[int, Row]:
    """What each round has measured of a cell, by the round's number."""
    if "single" not in row:
        return {}
    return {0: row} | {one.get("round", place): one for place, one in enumerate(row.get("again", ()), 1)}


def _of_single(rate: Callable[[Row], float]) -> Measure:
    return lambda row: rate(row["single"])


def _of_batch(many: int, rate: Callable[[Row], float]) -> Measure:
    return lambda row: next((rate(one) for one in row["batches"] if one["concurrency"] == many), None)


def _a_cpu_second(one: Row) -> float:
    return float((one["input_tokens"] + one["output_tokens"]) / one["cpu_seconds"])


# ---- what a column is worth ----


def effects(result: Result) -> list[str]:
    """A table for each group of rates, with a line for each column and level beside its first: the ratio of the rates
    with it and without it, over all pairs of cells that differ in nothing else and were both measured. Empty where no
    pair was.
    """
    pairs = {
        name: found for name, *which in _beside(result["columns"]) if (found := list(_pairs(result["cells"], *which)))
    }
    if not pairs:
        return []
    many = max(len(_ratios(one, lambda row: 1.0)) for one in pairs.values())
    lines = [
        "What each column is worth: the rate with it / the rate without it, the geometric mean.",
        "",
        _noise(many),
        "",
    ]
    for group in groups(result):
        rows = [[name, *(worth(found, one) or "–" for one in group.measures.values())] for name, found in pairs.items()]
        lines += [f"{group.title}:", "", *table(["column", *group.measures], rows), ""]
    return lines[:-1]


def _noise(many: int) -> str:
    """What of the ratios is noise, in words."""
    if many < 2:
        return UNKNOWN
    interval = (
        f"In brackets the {100 * CONFIDENCE:.0f} % interval over {many} rounds, each round's cells against each other"
    )
    few = f" Of {many} rounds they are wide: `--rounds {SURE}` makes them narrower." if many < SURE else ""
    return (
        f"{interval}; **~ has 1 in its interval: it may be noise**. About one in twenty of the others is noise"
        f" too.{few}"
    )


def _beside(columns: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """(in words, column, level without it, level with it)."""
    for column in columns:
        first, *others = column["levels"]
        if column["base"] not in column["levels"]:
            first, others = column["base"], column["levels"]
        for level in others:
            name = column["name"] if level == "on" else f"{column['name']} {level}, not {first}"
            yield name, column["name"], first, level


def _pairs(rows: Sequence[Row], name: str, first: str, level: str) -> Iterator[tuple[Row, Row]]:
    """(without, with) of the cells that differ in this column alone."""

    def rest(row: Row) -> tuple[tuple[str, str], ...]:
        return tuple((key, value) for key, value in row["columns"].items() if key != name)

    without = {rest(row): row for row in rows if row["columns"][name] == first and rounds(row)}
    for row in rows:
        if row["columns"][name] == level and rounds(row) and rest(row) in without:
            yield without[rest(row)], row


def _ratios(pairs: Sequence[tuple[Row, Row]], measure: Measure) -> list[list[float]]:
    """Of each round the ratios of its pairs; a round counts where it has as many of them as any."""
    found: dict[int, list[float]] = {}
    for without, with_it in pairs:
        before, after = rounds(without), rounds(with_it)
        for turn in before.keys() & after.keys():
            if (a := measure(before[turn])) and (b := measure(after[turn])):
                found.setdefault(turn, []).append(b / a)
    most = max(map(len, found.values()), default=0)
    return [ratios for ratios in found.values() if len(ratios) == most]


def worth(pairs: Sequence[tuple[Row, Row]], measure: Measure) -> str:
    """The ratio, the geometric mean over the pairs, with its interval over the rounds, and "~" before one that may be
    1. Of a single round the ratio alone, with least and most of the pairs where there are several. "" where nothing was
    measured.
    """
    found = _ratios(pairs, measure)
    means = [exp(fmean(map(log, ratios))) for ratios in found]
    if not means:
        return ""
    if len(means) == 1:
        (each,) = found
        spread = f" ({min(each):.2f} – {max(each):.2f} of {len(each)} pairs)" if len(each) > 1 else ""
        return f"{means[0]:.2f}{spread}"
    ratio = paired([1.0] * len(means), means, CONFIDENCE, "")
    assert ratio.low is not None and ratio.high is not None
    mark = "~ " if ratio.low <= 1 <= ratio.high else ""
    return f"{mark}{ratio.value:.2f} ({ratio.low:.2f} – {ratio.high:.2f})"
