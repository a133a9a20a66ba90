"""Markdown tables from committed results: a kind of result is a function from its JSON to lines, and `say` puts any of them in a few words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from thalweg.bench.ablate_tables import accuracy, cell_table, effects
from thalweg.bench.ablate_tables import head as ablation_head
from thalweg.bench.report import section

Result = Mapping[str, Any]
Lines = list[str]


def line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Lines:
    return [line(heads), line("---" for _ in heads), *(line(row) for row in rows)]


def where(result: Result) -> str:
    """The device in words."""
    device = result.get("device", "")
    if isinstance(device, str):
        return device
    return (
        ", ".join(device["gpus"])
        or f"{device['cores']} {'core' if device['cores'] == 1 else 'cores'} of {device['cpu']}"
    )


# ---- one function a kind ----


def report(result: Result) -> Lines:
    """What `thalweg bench report` shows: bench serve, offline, one-batch, startup, compare."""
    return section(result).table


def evaluation(result: Result) -> Lines:
    rows = []
    for one in result["results"]:
        if "share" in one:
            shown = [f"{one['share']:.1%}", f"{one['low_95']:.1%} – {one['high_95']:.1%}"]
        elif "perplexity" in one:
            shown = [f"{one['perplexity']:.1f}", f"{one['bits_per_byte']:.3f} bits a byte"]
        else:
            shown = [f"{one['value']:.4g}", "" if one["stderr"] is None else f"standard error {one['stderr']:.2g}"]
        rows.append([one["task"], one.get("items", one["total"]), *shown])
    return table(["task", "items", "result", "95 % interval"], rows)


def ablation(result: Result) -> Lines:
    worth = effects(result)
    after = ["", "The ratio of the rates with each column and without it:", "", *worth] if worth else []
    return [ablation_head(result), "", *cell_table(result), *after]


def compare_transformers(result: Result) -> Lines:
    rows = []
    for one in result["results"]:
        rates = one["output_tokens_per_s"]
        other = one["fastest_other"]
        rows.append(
            [one["batch_size"], f"{rates['thalweg']:,.0f}", other, f"{rates[other]:,.0f}", f"{one['ratio']:.1f}"]
        )
    return table(["rows", "Thalweg tok/s", "the fastest other", "its tok/s", "ratio"], rows)


def load(result: Result) -> Lines:
    rows = [[one["name"], one["measured"], one["limit"], "yes" if one["ok"] else "**no**"] for one in result["checks"]]
    return table(["promise", "measured", "limit", "kept"], rows)


def structured(result: Result) -> Lines:
    rows = [
        [one["batch"], "on" if one["overlap"] else "off", f"{one['free_steps_per_second']:.1f}",
         f"{one['grammar_steps_per_second']:.1f}", f"{one['kept']:.3f}"]
        for one in result["results"]
    ]  # fmt: skip
    return table(["rows", "overlap", "steps/s without grammars", "with", "kept"], rows)


def prefill(result: Result) -> Lines:
    rows = [
        [one["rows"], one["tokens"], f"{one['ms']:.1f}", f"{one['floor_ms']:.1f}", f"{one['share']:.2f}"]
        for one in result["rows"]
    ]
    return table(["prompts", "tokens of each", "ms", "floor ms", "share of the floor"], rows)


def kernels(result: Result) -> Lines:
    """Of each operation the case that takes longest, by every backend that ran it."""
    largest: dict[str, Result] = {}
    for one in result["rows"]:
        if not one["failed"] and one["us"] > largest.get(one["operation"], {"us": 0.0})["us"]:
            largest[one["operation"]] = one
    rows = [
        [
            one["operation"],
            one["case"],
            one["backend"],
            f"{one['us']:,.1f}",
            f"{one['gbs']:,.1f}",
            f"{one['tflops']:.3g}",
            f"{one['share']:.2f}",
        ]
        for one in result["rows"]
        if not one["failed"] and one["case"] == largest[one["operation"]]["case"]
    ]
    return table(["operation", "its longest case", "backend", "µs", "GB/s", "TFLOP/s", "share of its ceiling"], rows)


def roofline(result: Result) -> Lines:
    """The parts of each step, the most costly first."""
    lines: Lines = []
    for step in (step for run in result["runs"] for step in run["steps"]):
        parts = sorted(step["parts"], key=lambda part: -part["us"])
        rows = [
            [part["operation"], f"{part['us']:,.0f}", f"{part['us'] / step['us']:.0%}", _floor(part["floor_us"])]
            for part in parts
        ]
        lines += [
            "",
            f"A step of {step['rows']} rows and {step['tokens']} tokens, {step['us'] / 1e3:,.2f} ms under the profiler:",
            "",
        ]
        lines += table(["operation", "µs", "of the step", "floor µs"], rows)
    return lines[1:]


def _floor(us: float | None) -> str:
    return "–" if us is None else f"{us:,.1f}"


def tune(result: Result) -> Lines:
    rows = [
        [one["operation"], one["case"], one["candidates"], f"{one['default_us']:,.1f}", f"{one['us']:,.1f}",
         "the default" if one["choice"] == one["default"] else ", ".join(map(str, one["choice"]))]
        for one in result["rows"]
    ]  # fmt: skip
    return table(["operation", "case", "tried", "default µs", "best µs", "choice"], rows)


def plan_check(result: Result) -> Lines:
    rows = [
        [one["name"], f"{one['forecast']:,.0f}", f"{one['measured']:,.0f}", f"{one['off']:.2%}"]
        for one in result["parts"]
    ]
    return table(["part", "planned bytes", "measured bytes", "off"], rows)


KINDS: dict[str, Callable[[Result], Lines]] = {
    "report": report,
    "eval": evaluation,
    "ablation": ablation,
    "compare-transformers": compare_transformers,
    "load": load,
    "structured": structured,
    "prefill": prefill,
    "kernels": kernels,
    "roofline": roofline,
    "tune": tune,
    "plan-check": plan_check,
}


# ---- a result in a few words ----


def say(result: Result) -> str:
    """What a line of docs/support.md says of its result; "" for a kind that has no few words."""
    if "cells" in result:
        states = [one["status"] for one in result["cells"]]
        return f"{states.count('done')} of {len(states)} combinations run"
    if "checks" in result:
        return f"{sum(one['ok'] for one in result['checks'])} of {len(result['checks'])} promises kept"
    if "output_throughput" in result:
        many = result["max_concurrency"] or "any number"
        return f"{result['output_throughput']:,.0f} tok/s out at {many}, TTFT {result['median_ttft_ms']:.0f} ms"
    rows = result.get("results") or result.get("rows") or []
    if rows and "median_decode_latency" in rows[0]:
        return "decode step " + ", ".join(
            f"{1e3 * one['median_decode_latency']:.2f} ms × {one['batch_size']}" for one in rows
        )
    if rows and "task" in rows[0]:
        return ", ".join(f"{one['task']} {accuracy(one)}" for one in rows if "share" in one)
    if rows and "ratio" in rows[0]:
        return ", ".join(f"{one['ratio']:.1f} × transformers at {one['batch_size']}" for one in rows)
    if rows and "floor_ms" in rows[0]:
        return ", ".join(f"{one['rows']} × {one['tokens']:,} tokens in {one['ms']:.0f} ms" for one in rows[:2])
    return ""
