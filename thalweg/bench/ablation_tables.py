"""An ablation as Markdown and as a plot: its cells and the effect of each column, from the result's JSON alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from thalweg.bench.display import markdown_table
from thalweg.bench.plots import Bars, Figure, save
from thalweg.bench.statistics import paired

Json = Mapping[str, Any]
Rate = Callable[[Json], float | None]  # of one round of a cell

CONFIDENCE = 0.95
GOOD_ROUNDS = 5  # from here on Student's t gives intervals of a useful width
ONE_ROUND = (
    "**One round: the noise is unknown, and two runs of the same cell may differ as much as these do**;"
    " `--rounds 5` measures it."
)


class RateGroup(NamedTuple):
    """Rates of one table, by heading."""

    title: str
    meaning: str
    rates: Mapping[str, Rate]

    def full_name(self, rate: str) -> str:
        return f"{rate}, a CPU second" if "CPU" in self.title else rate


def rate_groups(result: Json) -> list[RateGroup]:
    """The rates of a cell. Results of a CPU have CPU time too: other work on the machine disturbs it less."""

    def batches(name: str, rate: Callable[[Json], float]) -> dict[str, Rate]:
        return {name.format(count): partial(_of_batch, count, rate) for count in result["workload"]["concurrency"]}

    groups = [
        RateGroup(
            "Tokens a second",
            "decoding of one request alone; else (prompt + output) / time of a run",
            {"one request": lambda row: float(row["single"]["decode_tokens_per_s"])}
            | batches("{} at a time", lambda batch: float(batch["throughput"])),
        ),
        RateGroup(
            "Tokens a second of a request",
            "output tokens / duration, mean of the run's requests",
            batches("each of {}", lambda batch: float(batch["decode_per_request"])),
        ),
    ]
    if not result["device"]["gpus"]:
        cpu: dict[str, Rate] = {"one request": lambda row: _tokens(row["single"], "len") / row["single"]["cpu_seconds"]}
        cpu |= batches("{} at a time", lambda batch: _tokens(batch, "tokens") / batch["cpu_seconds"])
        meaning = "(prompt + output) / CPU time of the process, which other work on the machine disturbs less"
        groups.append(RateGroup("Tokens a CPU second", meaning, cpu))
    return groups


def _of_batch(count: int, rate: Callable[[Json], float], row: Json) -> float | None:
    return next((rate(batch) for batch in row["batches"] if batch["concurrency"] == count), None)


def _tokens(measured: Json, unit: str) -> float:
    return float(measured[f"input_{unit}"] + measured[f"output_{unit}"])


def rounds_of(row: Json) -> dict[int, Json]:
    """The measurements of each round of a cell, by its number."""
    if "single" not in row:
        return {}
    return {0: row} | {one.get("round", place): one for place, one in enumerate(row.get("again", ()), 1)}


def rates_of(row: Json, rate: Rate) -> list[float]:
    """Of all rounds that have it."""
    return [value for one in rounds_of(row).values() if (value := rate(one)) is not None]


def differences_from_base(columns: Sequence[Json], labels: Mapping[str, str]) -> str:
    """The levels of a cell that the base does not have, in words."""
    changed = [f"{one['name']} {labels[one['name']]}" for one in columns if labels[one["name"]] != one["base"]]
    return ", ".join(changed) or "the base"


def markdown(result: Json) -> str:
    """The whole page of one ablation."""
    return "\n".join(sections(result)) + "\n"


def sections(result: Json) -> list[str]:
    """The page's lines."""
    worth = effects(result)
    return [summary(result), "", *cell_table(result), *(["", *worth] if worth else [])]


def summary(result: Json) -> str:
    """The model, the machine and the load in a sentence."""
    work, device = result["workload"], result["device"]
    machine = ", ".join(device["gpus"]) or f"{device['cores']} cores of {device['cpu']}"
    lengths = f"{work['input_len']} tokens in and {work['output_len']} out on average (± {work['spread']:.0%})"
    shared = f", the first {work['shared_prefix']} tokens in common" if work["shared_prefix"] else ""
    requests = "one request" if work["waves"] == 1 else f"{work['waves']} requests"
    rounds = max((len(rounds_of(row)) for row in result["cells"]), default=0)
    shown = f" Medians of {rounds} rounds (least – most)." if rounds > 1 else ""
    return f"`{result['checkpoint']}` on {machine}: {lengths}{shared}; {requests} for each at a time.{shown}"


def cell_table(result: Json) -> list[str]:
    """A line for each measured cell, in a table for each group of rates and one of accuracies; then the reasons of the
    other cells.
    """
    columns, cells = result["columns"], result["cells"]
    alone = result["mode"] == "one-at-a-time"  # one heading for all columns
    heads = ["changed"] if alone else [column["name"] for column in columns]

    def names(row: Json) -> list[str]:
        levels = row["columns"]
        return [differences_from_base(columns, levels)] if alone else [levels[column["name"]] for column in columns]

    measured, lines = [row for row in cells if rounds_of(row)], list[str]()
    for group in rate_groups(result):
        rows = [[*names(row), *(_median(rates_of(row, rate)) for rate in group.rates.values())] for row in measured]
        lines += [f"{group.title}: {group.meaning}", "", *markdown_table([*heads, *group.rates], rows), ""]
    shares = [{entry["task"]: accuracy(entry) for entry in row.get("accuracy", ())} for row in measured]
    if tasks := list(dict.fromkeys(task for each in shares for task in each)):
        rows = [
            [*names(row), *(known.get(task, "–") for task in tasks)]
            for row, known in zip(measured, shares, strict=True)
        ]
        lines += ["Right answers, with 95 % intervals:", "", *markdown_table([*heads, *tasks], rows), ""]
    missing = [row for row in cells if row["status"] != "done"]
    remarks = [
        f"- {', '.join(names(row))}: {': '.join(filter(None, (row['status'], row['reason'])))}" for row in missing
    ]
    lines += ["Not measured, or not completely:", "", *remarks, ""] if missing else []
    return [*lines, legend] if (legend := _legend(columns)) else lines[:-1]


def _legend(columns: Sequence[Json]) -> str:
    """The values of the levels whose names do not say them."""
    parts = []
    for column in columns:
        values = dict(zip(column["levels"], column["values"], strict=True))
        if any(label != value for label, value in values.items()):
            parts.append(f"{column['name']} {', '.join(f'{label}: {value}' for label, value in values.items())}")
    return f"Levels: {'; '.join(parts)}." if parts else ""


def _median(values: Sequence[float]) -> str:
    """With least and most where there are several."""
    if not values:
        return "–"
    spread = f" ({_number(min(values))} – {_number(max(values))})" if len(values) > 1 else ""
    return _number(median(values)) + spread


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def accuracy(entry: Json) -> str:
    """A share with its 95 % interval, or a perplexity."""
    if "perplexity" in entry:
        return f"{entry['perplexity']:.2f}"
    return f"{entry['share']:.1%} ({entry['low_95']:.1%} – {entry['high_95']:.1%})"


Pairs = Sequence[tuple[Json, Json]]


def effects(result: Json) -> list[str]:
    """A table for each group of rates: for each column and level beside its first, the ratio of the rates with it and
    without it, over all pairs of measured cells that differ in nothing else. Empty where there is no pair.
    """
    measured, pairs = [row for row in result["cells"] if rounds_of(row)], dict[str, Pairs]()
    for column in result["columns"]:
        name, (first, *others) = column["name"], column["levels"]
        if column["base"] not in column["levels"]:
            first, others = column["base"], column["levels"]
        for level in others:
            found = [
                (without, with_it)
                for with_it in measured
                for without in measured
                if with_it["columns"][name] == level and with_it["columns"] == without["columns"] | {name: level}
                if without["columns"][name] == first
            ]
            if found:
                pairs[name if level == "on" else f"{name} {level}, not {first}"] = found
    if not pairs:
        return []
    rounds = max(len(_ratios(each, lambda row: 1.0)) for each in pairs.values())
    lines = ["Effect of each column: the rate with it / the rate without it, geometric mean.", "", _noise(rounds), ""]
    for group in rate_groups(result):
        rows = [[name, *(_effect(each, rate) for rate in group.rates.values())] for name, each in pairs.items()]
        lines += [f"{group.title}:", "", *markdown_table(["column", *group.rates], rows), ""]
    return lines[:-1]


def _noise(rounds: int) -> str:
    """How far the ratios can be trusted."""
    if rounds < 2:
        return ONE_ROUND
    few = f" {rounds} rounds make them wide: `--rounds {GOOD_ROUNDS}` makes them narrower."
    return (
        f"In brackets the {CONFIDENCE:.0%} interval over {rounds} rounds, each round's cells against each other; **~"
        f" has 1 in its interval: it may be noise**. About one in twenty of the others is noise too."
        f"{few if rounds < GOOD_ROUNDS else ''}"
    )


def _ratios(pairs: Pairs, rate: Rate) -> list[list[float]]:
    """The ratios of each round's pairs, of the rounds that have the most of them."""
    by_round: dict[int, list[float]] = {}
    for without, with_it in pairs:
        before, after = rounds_of(without), rounds_of(with_it)
        for number in before.keys() & after.keys():
            if (a := rate(before[number])) and (b := rate(after[number])):
                by_round.setdefault(number, []).append(b / a)
    most = max(map(len, by_round.values()), default=0)
    return [ratios for ratios in by_round.values() if len(ratios) == most]


def _effect(pairs: Pairs, rate: Rate) -> str:
    """The geometric mean over the pairs with its interval over the rounds, "~" before one that may be 1. Of a single
    round the least and most of the pairs instead.
    """
    rounds = _ratios(pairs, rate)
    means = [geometric_mean(ratios) for ratios in rounds]
    if not means:
        return "–"
    if len(means) == 1:
        ratios = rounds[0]
        spread = f" ({min(ratios):.2f} – {max(ratios):.2f} of {len(ratios)} pairs)" if len(ratios) > 1 else ""
        return f"{means[0]:.2f}{spread}"
    ratio = paired([1.0] * len(means), means, CONFIDENCE)
    assert ratio.low is not None and ratio.high is not None
    return f"{'~ ' if ratio.low <= 1 <= ratio.high else ''}{ratio.value:.2f} ({ratio.low:.2f} – {ratio.high:.2f})"


def digest(result: Json) -> str:
    """Identifies the cells of an ablation, in the description of its plot."""
    return sha256(json.dumps([result["columns"], result["cells"]]).encode()).hexdigest()


def save_plot(result: Json, place: Path) -> None:
    """Writes `place`.svg: a panel for each rate. Raises BenchError without matplotlib, OSError."""
    save(figure(result), place, ("svg",), digest(result))


def figure(result: Json) -> Figure:
    """A bar for each measured cell: the median, with a line from the least to the most of its rounds."""
    rows = [row for row in result["cells"] if rounds_of(row)]
    labels = [differences_from_base(result["columns"], row["columns"]) for row in rows]
    missing, panels = len(result["cells"]) - len(rows), list[Bars]()
    note = f"tokens a second, {result['checkpoint']}"
    note += f"; {missing} more could not run or were not measured" if missing else ""
    for group in rate_groups(result):
        for name, rate in group.rates.items():
            rounds = [rates_of(row, rate) for row in rows]
            medians = [median(each) if each else None for each in rounds]
            ends = [(min(each), max(each)) if len(each) > 1 else None for each in rounds]
            beside = ("", [""] * len(rows)) if panels else (note, labels)  # the first panel labels the rows of all
            panels.append(Bars(group.full_name(name), *beside, {"": medians}, ends))
    return Figure("", panels)
