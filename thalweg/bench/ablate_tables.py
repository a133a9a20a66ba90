"""An ablation as Markdown: the table of its cells, and what each column is worth. Made from the result's JSON alone, so that the docs can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import exp, log
from statistics import fmean
from typing import Any

Result = Mapping[str, Any]
Row = Mapping[str, Any]

RATES = "Tokens a second: of decoding, one request alone; (prompt + output) / time of a run; output tokens / duration, mean of its requests."
A_CPU_SECOND = (
    " A CPU second: (prompt + output) / CPU time of the process, which other work on the machine disturbs less."
)


def markdown(result: Result) -> str:
    """The whole page of one ablation."""
    parts = [head(result), "", *cell_table(result)]
    worth = effects(result)
    if worth:
        parts += ["", "What each column is worth, the ratio of the rates with it and without it:", "", *worth]
    return "\n".join(parts) + "\n"


def head(result: Result) -> str:
    """Of what, on what, and under which load, in a sentence."""
    work, device = result["workload"], result["device"]
    where = ", ".join(device["gpus"]) or f"{device['cores']} cores of {device['cpu']}"
    lengths = f"{work['input_len']} tokens in and {work['output_len']} out on average (± {work['spread']:.0%})"
    shared = f", the first {work['shared_prefix']} tokens in common" if work["shared_prefix"] else ""
    each = "one request" if work["waves"] == 1 else f"{work['waves']} requests"
    rounds = max((len(runs(row)) for row in result["cells"]), default=1)
    best = f" Best of {rounds} rounds." if rounds > 1 else ""
    return f"`{result['checkpoint']}` on {where}: {lengths}{shared}; {each} for each at a time.{best}"


def cell_table(result: Result) -> list[str]:
    """A line for each cell: its levels, rates, shares; or why there are none. What was changed one at a time has one column for all."""
    columns, tasks = result["columns"], _tasks(result["cells"])
    bases = [(column["name"], column["base"]) for column in columns]
    single = result["mode"] == "one-at-a-time"
    heads = ["changed"] if single else [name for name, _ in bases]
    heads += [*measures(result), *tasks, "remark"]
    lines = [_line(heads), _line("---" for _ in heads)]
    for row in result["cells"]:
        labels = row["columns"]
        which = [apart(bases, labels)] if single else [labels[name] for name, _ in bases]
        rates = (_rate(measure(row)) for measure in measures(result).values())
        lines.append(_line([*which, *rates, *_accuracies(row, tasks), _remark(row)]))
    legend = RATES + (A_CPU_SECOND if _on_cpu(result) else "")
    return [*lines, "", f"{legend} {_meanings(columns)}".rstrip()]


def _on_cpu(result: Result) -> bool:
    return not result["device"]["gpus"]


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
    return f"{'; '.join(said)}." if said else ""


def _line(cells: Sequence[str] | Iterator[str]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _tasks(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(entry["task"] for row in rows for entry in row.get("accuracy", ())))


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


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
    return "" if row["status"] == "done" else f"{row['status']}: {row['reason']}"


# ---- what a column is worth ----

Measure = Callable[[Row], float | None]


def measures(result: Result) -> dict[str, Measure]:
    """Heading → a cell's rate, the best of its rounds, None where it was not measured. On a CPU, which others may use meanwhile, by its time too."""
    cpu = _on_cpu(result)
    found: dict[str, Measure] = {"one request": _of_single(lambda one: one["decode_tokens_per_s"])}
    if cpu:
        found["one, a CPU second"] = _of_single(lambda one: (one["input_len"] + one["output_len"]) / one["cpu_seconds"])
    for many in result["workload"]["concurrency"]:
        found[f"{many} at a time"] = _of_batch(many, lambda one: one["throughput"])
        found[f"each of {many}"] = _of_batch(many, lambda one: one["decode_per_request"])
        if cpu:
            found[f"{many}, a CPU second"] = _of_batch(many, _a_cpu_second)
    return found


def runs(row: Row) -> list[Row]:
    """What each round has measured of a cell."""
    return [row, *row.get("again", ())] if "single" in row else []


def _of_single(rate: Callable[[Row], float]) -> Measure:
    return lambda row: max((rate(run["single"]) for run in runs(row)), default=None)


def _of_batch(many: int, rate: Callable[[Row], float]) -> Measure:
    def best(row: Row) -> float | None:
        batches = [one for run in runs(row) for one in run["batches"] if one["concurrency"] == many]
        return max((rate(one) for one in batches), default=None)

    return best


def _a_cpu_second(one: Row) -> float:
    return float((one["input_tokens"] + one["output_tokens"]) / one["cpu_seconds"])


def effects(result: Result) -> list[str]:
    """A line for each column and level beside its first: the geometric mean of the ratios over all pairs of cells that differ in
    nothing else and were both measured; least and most where there are several. Empty where no pair was."""
    heads, lines = measures(result), []
    for column in result["columns"]:
        first, *others = column["levels"]
        first = column["base"] if column["base"] not in column["levels"] else first
        for level in others if first == column["levels"][0] else column["levels"]:
            pairs = list(_pairs(result["cells"], column["name"], first, level))
            shown = [_ratio(pairs, measure) for measure in heads.values()]
            if any(shown):
                what = column["name"] if level == "on" else f"{column['name']} {level}, not {first}"
                lines.append(_line([what, *(text or "–" for text in shown)]))
    return [_line(["column", *heads]), _line("---" for _ in range(len(heads) + 1)), *lines] if lines else []


def _pairs(rows: Sequence[Row], name: str, first: str, level: str) -> Iterator[tuple[Row, Row]]:
    """(without, with) of the cells that differ in this column alone."""

    def rest(row: Row) -> tuple[tuple[str, str], ...]:
        return tuple((key, value) for key, value in row["columns"].items() if key != name)

    without = {rest(row): row for row in rows if row["columns"][name] == first}
    for row in rows:
        if row["columns"][name] == level and rest(row) in without:
            yield without[rest(row)], row


def _ratio(pairs: Sequence[tuple[Row, Row]], measure: Measure) -> str:
    ratios = [b / a for without, with_it in pairs if (a := measure(without)) and (b := measure(with_it))]
    if not ratios:
        return ""
    middle = f"{exp(fmean(map(log, ratios))):.2f}"
    return middle if len(ratios) == 1 else f"{middle} ({min(ratios):.2f} – {max(ratios):.2f})"
