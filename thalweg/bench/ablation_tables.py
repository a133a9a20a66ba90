"""An ablation as Markdown and as a plot: its cells and the effect of each column, from the result's JSON alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from thalweg.bench import display
from thalweg.bench.display import markdown_table
from thalweg.bench.plots import Bars, Figure, save
from thalweg.bench.statistics import paired

Json = Mapping[str, Any]
Rounds = dict[int, float]  # a rate by the number of the round

CONFIDENCE = 0.95
GOOD_ROUNDS = 5  # from here on Student's t gives intervals of a useful width
ONE_ROUND = (
    "**One round: the noise is unknown, and two runs of the same cell may differ as much as these do**;"
    " `--rounds 5` measures it."
)


SGLANG_COLUMNS: dict[
    str, tuple[str, Callable[[Any], bool]]
] = {  # heading → setting, and whether a value has the feature
    "Torch Compile": ("torch_compile", bool),
    "Cuda Graph": ("cuda_graph_mode", lambda mode: mode != "none"),
    "Radix Cache": ("radix_cache", bool),
    "Flashinfer-mla": ("attention_backend", lambda name: name == "flashinfer"),
    "Next-N": ("speculative_algorithm", lambda name: name == "NEXTN"),
    "EP-MoE": ("ep_size", lambda size: (size or 1) > 1),
    "DP-Attention": ("dp_size", lambda size: (size or 1) > 1),
}
SGLANG_RATES = (
    "Client concurrency",
    "Avg Throughput (p+d, token/s)",
    "Per-request Output Throughput (token/s)",
    "total req",
    "max-running-requests",
)
SENTENCE = re.compile(r"[;.] ")  # ends what is shown of a reason; the rest stands below the tables
MARKS = {True: "✅", False: "➖"}
NO_COMPILE = "Torch Compile: Thalweg has none, because its captured steps are faster than what torch.compile makes."


class RateGroup(NamedTuple):
    """Rates of one table."""

    title: str
    meaning: str
    batch: Callable[[Json], float]  # of a run of several requests
    single: Callable[[Json], float] | None  # of one request alone
    heading: str = "{} at a time"  # of a batch
    suffix: str = ""  # tells its rates from those of other groups


def _tokens(measured: Json, unit: str) -> int:
    return int(measured[f"input_{unit}"] + measured[f"output_{unit}"])


RATES = (
    RateGroup(
        "Tokens a second",
        "decoding of one request alone; else (prompt + output) / time of a run",
        lambda batch: float(batch["throughput"]),
        lambda one: float(one["decode_tokens_per_s"]),
    ),
    RateGroup(
        "Tokens a second of a request",
        "output tokens / duration, mean of the run's requests",
        lambda batch: float(batch["decode_per_request"]),
        None,
        "each of {}",
    ),
)
CPU_RATES = RateGroup(
    "Tokens a CPU second",
    "(prompt + output) / CPU time of all processes, which other work on the machine disturbs less",
    lambda batch: float(_tokens(batch, "tokens") / batch["cpu_seconds"]),
    lambda one: float(_tokens(one, "len") / one["cpu_seconds"]),
    suffix=", a CPU second",
)


def rate_groups(result: Json) -> tuple[RateGroup, ...]:
    """The rates of a cell. Results of a CPU have CPU time too."""
    return RATES if result["device"]["gpus"] else (*RATES, CPU_RATES)


def rounds_of(row: Json) -> dict[int, Json]:
    """The measurements of each round of a cell, by its number."""
    if "single" not in row:
        return {}
    return {0: row} | {one.get("round", place): one for place, one in enumerate(row.get("again", ()), 1)}


def rates_of(rows: Sequence[Json], group: RateGroup) -> dict[str, list[Rounds]]:
    """The rates of each cell by heading."""
    found: dict[str, list[Rounds]] = {}
    for place, row in enumerate(rows):
        for number, one in rounds_of(row).items():
            rates = {} if group.single is None else {"one request": group.single(one["single"])}
            rates |= {group.heading.format(batch["concurrency"]): group.batch(batch) for batch in one["batches"]}
            for head, rate in rates.items():
                found.setdefault(head, [{} for _ in rows])[place][number] = rate
    return found


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
    return [summary(result), "", *sglang_table(result), "", *cell_table(result), *(["", *worth] if worth else [])]


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


def sglang_table(result: Json) -> list[str]:
    """SGLang's DeepSeek ablation (sgl-project/sglang#3956) with its columns: a line for each cell and concurrency."""
    base = {name: decision["value"] for name, decision in result["configuration"]["decisions"].items()}
    shown = {setting for setting, _ in SGLANG_COLUMNS.values()}
    others = [column["name"] for column in result["columns"] if column["setting"] not in shown]
    has_query = any("query" in row for row in result["cells"])
    has_floor = any(batch.get("share_of_floor") for row in result["cells"] for batch in row.get("batches", ()))
    has_drafts = any(row.get("ran", {}).get("accept_length") for row in result["cells"])
    rows = []
    for row in result["cells"]:
        runs, settings = rounds_of(row), {**base, **row["decisions"], **row["wishes"]}
        marks = [MARKS[is_on(settings.get(setting))] for setting, is_on in SGLANG_COLUMNS.values()]
        features = [*marks, *(row["columns"][name] for name in others)]
        query = ("✅" if row["query"]["right"] else "❌") if "query" in row else "–"
        accepted = row.get("ran", {}).get("accept_length")
        extra = [query] * has_query + [f"{accepted:.2f}" if accepted else "–"] * has_drafts
        if not runs:
            reason = SENTENCE.split(row["reason"] or row["status"])[0]
            rows.append([f"❌ {reason}", "–", *extra, *features, *["–"] * (5 + has_floor)])
        for place, batch in enumerate(runs[0]["batches"] if runs else ()):
            alone = _median({number: one["single"]["decode_tokens_per_s"] for number, one in runs.items()})
            known = {number: one["batches"][place] for number, one in runs.items() if place < len(one["batches"])}
            rates = [
                _median({number: one[rate] for number, one in known.items()})
                for rate in ("throughput", "decode_per_request")
            ]
            floors = {number: 100 * share for number, one in known.items() if (share := one.get("share_of_floor"))}
            rates += [_median(floors)] * has_floor
            sizes = [batch["requests"], settings["max_running_requests"]]
            rows.append(["✅", alone, *extra, *features, batch["concurrency"], *rates, *sizes])
    heads = ["Runnable", "TPS@1", *["Answer"] * has_query, *["Accept length"] * has_drafts, *SGLANG_COLUMNS, *others]
    compiled = any(row["decisions"].get("torch_compile") for row in result["cells"])  # in results of early versions
    return [
        *markdown_table([*heads, *SGLANG_RATES[:3], *["Share of floor, %"] * has_floor, *SGLANG_RATES[3:]], rows),
        *([] if compiled else ["", NO_COMPILE]),
    ]


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
        if rates := rates_of(measured, group):
            rows = [[*names(row), *map(_median, cells)] for row, *cells in zip(measured, *rates.values(), strict=True)]
            lines += [f"{group.title}: {group.meaning}", "", *markdown_table([*heads, *rates], rows), ""]
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


def _median(rounds: Rounds) -> str:
    """With least and most where there are several."""
    values = rounds.values()
    if not values:
        return "–"
    spread = f" ({_number(min(values))} – {_number(max(values))})" if len(values) > 1 else ""
    return _number(median(values)) + spread


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def accuracy(entry: Json) -> str:
    """A share with its 95 % interval, or a perplexity."""
    result, interval = display.accuracy(entry)
    return f"{result} ({interval})" if "share" in entry else result


Pairs = Sequence[tuple[int, int]]  # places of cells: without a feature and with it


def effects(result: Json) -> list[str]:
    """A table for each group of rates: for each column and level beside its first, the ratio of the rates with it and
    without it, over all pairs of measured cells that differ in nothing else. Empty where there is no pair.
    """
    measured, pairs = [row for row in result["cells"] if rounds_of(row)], dict[str, Pairs]()
    places = {tuple(sorted(row["columns"].items())): place for place, row in enumerate(measured)}
    for column in result["columns"]:
        name, (first, *others) = column["name"], column["levels"]
        if column["base"] not in column["levels"]:
            first, others = column["base"], column["levels"]
        for level in others:
            found = [
                (places[without], place)
                for place, row in enumerate(measured)
                if row["columns"][name] == level
                if (without := tuple(sorted((row["columns"] | {name: first}).items()))) in places
            ]
            if found:
                pairs[name if level == "on" else f"{name} {level}, not {first}"] = found
    if not pairs:
        return []
    tables, rounds = list[str](), 0
    for group in rate_groups(result):
        if rates := rates_of(measured, group):
            ratios = [[_ratios(each, cells) for cells in rates.values()] for each in pairs.values()]
            rounds = max(rounds, *(len(each) for row in ratios for each in row))
            rows = [[name, *map(_effect, row)] for name, row in zip(pairs, ratios, strict=True)]
            tables += [f"{group.title}:", "", *markdown_table(["column", *rates], rows), ""]
    about = "Effect of each column: the rate with it / the rate without it, geometric mean."
    return [about, "", _noise(rounds), "", *tables[:-1]]


def _noise(rounds: int) -> str:
    """The uncertainty of the ratios."""
    if rounds < 2:
        return ONE_ROUND
    few = f" {rounds} rounds make them wide: `--rounds {GOOD_ROUNDS}` makes them narrower."
    return (
        f"In brackets the {CONFIDENCE:.0%} interval over {rounds} rounds, each round's cells against each other; **~"
        f" has 1 in its interval: it may be noise**. About one in twenty of the others is noise too."
        f"{few if rounds < GOOD_ROUNDS else ''}"
    )


def _ratios(pairs: Pairs, cells: Sequence[Rounds]) -> list[list[float]]:
    """The ratios of each round's pairs, of the rounds that have the most of them."""
    by_round: dict[int, list[float]] = {}
    for before, after in ((cells[without], cells[with_it]) for without, with_it in pairs):
        for number in before.keys() & after.keys():
            if before[number] and after[number]:
                by_round.setdefault(number, []).append(after[number] / before[number])
    most = max(map(len, by_round.values()), default=0)
    return [ratios for ratios in by_round.values() if len(ratios) == most]


def _effect(rounds: Sequence[Sequence[float]]) -> str:
    """The geometric mean over the pairs with its interval over the rounds, "~" before one that may be 1. Of a single
    round the least and most of the pairs instead.
    """
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
    """Writes `place`.svg: a panel for each rate; nothing where none is measured. Raises BenchError without matplotlib,
    OSError.
    """
    drawn = figure(result)
    if drawn.panels:
        save(drawn, place, ("svg",), digest(result))


def figure(result: Json) -> Figure:
    """A bar for each measured cell: the median, with a line from the least to the most of its rounds."""
    rows = [row for row in result["cells"] if rounds_of(row)]
    labels = [differences_from_base(result["columns"], row["columns"]) for row in rows]
    missing, panels = len(result["cells"]) - len(rows), list[Bars]()
    note = f"tokens a second, {result['checkpoint']}"
    note += f"; {missing} more could not run or were not measured" if missing else ""
    for group in rate_groups(result):
        for head, cells in rates_of(rows, group).items():
            medians = [median(rounds.values()) if rounds else None for rounds in cells]
            ends = [(min(rounds.values()), max(rounds.values())) if len(rounds) > 1 else None for rounds in cells]
            beside = ("", [""] * len(rows)) if panels else (note, labels)  # the first panel labels the rows of all
            panels.append(Bars(head + group.suffix, *beside, {"": medians}, ends))
    return Figure("", panels)
