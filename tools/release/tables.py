"""Markdown tables from committed results: a kind of result is a function from its JSON to lines, and `say` puts any of
them in a few words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from thalweg.bench.ablation_tables import accuracy, sections
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
    counts = Counter(device["gpus"])
    return (
        ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())
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


def formats(result: Result) -> Lines:
    """A row for each format, a column for each task."""
    rows = []
    for one in result["rows"]:
        shown = [f"{task['share']:.1%}" if "share" in task else f"{task['perplexity']:.1f}" for task in one["tasks"]]
        rows.append([one["format"], f"{one['bytes'] / 1e6:.1f}", *shown])
    return table(["format", "MB", *(task["task"] for task in result["rows"][0]["tasks"])], rows)


def ablation(result: Result) -> Lines:
    return sections(result)


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
    return table(["check", "measured", "limit", "passed"], rows)


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
    return table(["prompts", "tokens of each", "ms", "limit ms", "share of the limit"], rows)


def kernels(result: Result) -> Lines:
    """Of each operation the case that takes longest, by every backend that ran it."""
    longest: dict[str, Result] = {}
    good = [one for one in result["rows"] if not one["failed"]]
    for one in good:
        if one["us"] > longest.get(one["operation"], {"us": 0.0})["us"]:
            longest[one["operation"]] = one
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
        for one in good
        if one["case"] == longest[one["operation"]]["case"]
    ]
    return table(["operation", "its longest case", "backend", "µs", "GB/s", "TFLOP/s", "share of its ceiling"], rows)


def roofline(result: Result) -> Lines:
    """The parts of each step, the most costly first."""
    lines: Lines = []
    for step in (step for run in result["runs"] for step in run["steps"]):
        parts = sorted(step["parts"], key=lambda part: -part["us"])
        rows = [
            [part["operation"], f"{part['us']:,.0f}", f"{part['us'] / step['us']:.0%}", _limit(part["floor_us"])]
            for part in parts
        ]
        lines += [
            "",
            (
                f"A step of {step['rows']} rows and {step['tokens']} tokens, {step['us'] / 1e3:,.2f} ms under the"
                " profiler:"
            ),
            "",
        ]
        lines += table(["operation", "µs", "of the step", "limit µs"], rows)
    return lines[1:]


def _limit(us: float | None) -> str:
    return "–" if us is None else f"{us:,.1f}"


def tune(result: Result) -> Lines:
    rows = [
        [one["operation"], one["case"], one["candidates"], f"{one['default_us']:,.1f}", f"{one['us']:,.1f}",
         "the default" if one["choice"] == one["default"] else ", ".join(map(str, one["choice"]))]
        for one in result["rows"]
    ]  # fmt: skip
    return table(["operation", "case", "tried", "default µs", "best µs", "choice"], rows)


def before_after(result: Result) -> Lines:
    rows = []
    for model, of in result["models"].items():
        start = [f"{sum(of['start_s'][when]) / len(of['start_s'][when]):.1f}" for when in ("before", "after")]
        for count, times in of["rows"].items():
            cells = [model, count]
            for name in ("first_token_ms", "decode_ms"):
                cells += [f"{median(sum(times[name][when], [])):.4g}" for when in ("before", "after")]
            rows.append([*cells, *start])
    heads = [
        "model",
        "rows",
        "first token ms, before",
        "after",
        "decode ms, before",
        "after",
        "start s, before",
        "after",
    ]
    return table(heads, rows)


def plan_check(result: Result) -> Lines:
    rows = [
        [one["name"], f"{one['forecast']:,.0f}", f"{one['measured']:,.0f}", f"{one['off']:.2%}"]
        for one in result["parts"]
    ]
    return table(["part", "planned bytes", "measured bytes", "off"], rows)


def acceptance(result: Result) -> Lines:
    """A row for each task and way of drawing; for each rule and number of drafts tokens of a verification, and the
    share accepted by depth.
    """
    rows = result["acceptance"]
    sampled = any(one["temperature"] for one in rows)
    rules = len({one["rule"] for one in rows}) > 1
    heads = list(dict.fromkeys(_column(one, rules) for one in rows))
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for one in rows:
        key = (one["task"], *([one["temperature"], one["top_p"]] if sampled else []))
        rates = ", ".join(f"{rate:.3f}" for rate in one["accept_rate_by_depth"])
        length = one["accept_length"]
        cells = found.setdefault(key, {"tokens": "", "as plain": ""})
        cells[_column(one, rules)] = "–" if length is None else f"{length:.2f} ({rates})"
        if "same_tokens" in one:
            cells["tokens"] = f"{one['tokens']:,}"
            if one["wrong_answers"]:
                cells["as plain"] = f"**{one['wrong_answers']} answers differ**"
            cells["as plain"] = cells["as plain"] or "all"
    drawn = ["temperature", "top-p"] if sampled else []
    columns = "tokens", *heads, "as plain"
    lines = [[*key, *(cells.get(head, "–") for head in columns)] for key, cells in found.items()]
    return table(["task", *drawn, "tokens", *heads, "as plain decoding"], lines)


def speculation(result: Result) -> Lines:
    """Tokens a second by drafts a step; and where a step's time goes, where it was watched."""
    cells = [f"{one['decode_throughput']:,.0f} ({_brought(one)})" for one in result["speculation"]]
    return _by_drafts(result, cells) + _parts(result)


def speculation_steps(result: Result) -> Lines:
    """Milliseconds of a step by drafts a step, and how many tokens it must bring to be as fast as plain decoding;
    tokens a second by what was accepted; and where a step's time goes.
    """
    rows = result["speculation"]
    plain = {(one["input_len"], one["batch_size"]): one["step_latency"] for one in rows if not one["width"]}
    cells = [_step(one, plain[one["input_len"], one["batch_size"]]) for one in rows]
    speeds = [f"{one['decode_throughput']:,.0f}" for one in rows]
    told = ["", f"Tokens a second, where {result['accept_length']:g} are accepted if there are as many:", ""]
    return [*_by_drafts(result, cells), *told, *_by_drafts(result, speeds), *_parts(result)]


def _step(row: Result, plain: float) -> str:
    """plain: seconds of a step without drafts. What the engine chooses has steps of several kinds: of those also what
    they brought.
    """
    ms, needed = f"{1e3 * row['step_latency']:.2f}", f"{row['step_latency'] / plain:.2f}"
    if not row["width"]:
        return ms
    if row["width"] > 0:
        return f"{ms} ({needed})"
    brings = row["decode_throughput"] * row["step_latency"] / row["batch_size"]
    return f"{ms} ({needed}, brings {brings:.2f}; drafts in {_drafting(row):.0%})"


def _brought(row: Result) -> str:
    """Tokens of a verification, and how many of the steps were some where that was chosen."""
    brought = f"{row['accept_length']:.2f}"
    if row["width"] >= 0:
        return brought
    return f"{brought} in {_drafting(row):.0%} of steps" if row["drafted_tokens"] else "no drafts"


def _drafting(row: Result) -> float:
    """Share of the steps that made drafts."""
    steps: list[int] = row["steps_by_num_drafts"]
    return sum(steps[1:]) / max(1, sum(steps))


def speculation_best(*results: Result) -> Lines:
    """Of several models: tokens a second without drafts, and with the number of them that brings most, by requests."""
    many = list(dict.fromkeys(one["batch_size"] for result in results for one in result["speculation"]))
    shown = [batch for batch in many if batch in SUMMED]
    rows = []
    for result in results:
        cells = [_best(result["speculation"], batch) for batch in shown]
        context = result["speculation"][0]["input_len"]
        rows.append([result["model"], f"{context:,}", *cells])
    heads = [f"{batch} request{'s' * (batch > 1)}" for batch in shown]
    return table(["model", "context", *heads], rows)


SUMMED = (1, 8, 32, 128)  # requests


def _best(rows: Sequence[Result], batch: int) -> str:
    """Of the first context, and of numbers that were fixed."""
    rates = {
        one["width"]: (one["decode_throughput"], _drafts(one))
        for one in rows
        if one["batch_size"] == batch and one["input_len"] == rows[0]["input_len"] and one["width"] >= 0
    }
    if not rates:
        return "–"
    (plain, _), (most, name) = rates[0], max(rates.values())
    gain = most / plain - 1
    return f"{plain:,.0f} → {most:,.0f} (+{gain:.0%}, {name})" if gain else f"{plain:,.0f} (plain)"


def _by_drafts(result: Result, cells: Sequence[str]) -> Lines:
    """A column for each width and tree, a row for each context and number of requests. cells: of each row of the
    result.
    """
    rows = result["speculation"]
    heads = list(dict.fromkeys(map(_drafts, rows)))
    found: dict[tuple[int, int], dict[str, str]] = {}
    for one, cell in zip(rows, cells, strict=True):
        found.setdefault((one["input_len"], one["batch_size"]), {})[_drafts(one)] = cell
    lines = [[f"{length:,}", many, *map(known.get, heads)] for (length, many), known in found.items()]
    return table(["context", "requests", *heads], lines)


def _parts(result: Result) -> Lines:
    """Of one request."""
    watched = [one for one in result["speculation"] if "overhead_seconds" in one and one["batch_size"] == 1]
    if not watched:
        return []
    names = {name: head for name, head in PARTS.items() if name in watched[0]}
    parts = [[_drafts(one), f"{one['input_len']:,}", *(f"{1e6 * one[name]:,.0f}" for name in names)] for one in watched]
    alone = "each forward by itself" if LEARNED in names else "with waits around each forward"
    return ["", f"One request, µs of a step, {alone}:", "", *table(["drafts", "context", *names.values()], parts)]


LEARNED = "learn_seconds"
PARTS = {
    "verify_seconds": "the model",
    "draft_seconds": "the drafter",
    LEARNED: "its KV writes",
    "simulation_seconds": "simulated acceptance",
    "overhead_seconds": "the rest",
}


def soak(result: Result) -> Lines:
    """Minutes at saturation: memory at its tightest, and whether it ever ran out."""
    heads = [
        "seconds",
        "requests",
        "tokens in",
        "tokens out",
        "pages",
        "free at the least",
        "reserve",
        "tries again of the allocator",
        "out of memory",
    ]
    free, kept = (f"{result[name] / 1e9:.2f} GB" for name in ("free_at_least", "reserve"))
    counts = [f"{result[name]:,.0f}" for name in ("seconds", "requests", "prompt_tokens", "output_tokens", "pages")]
    return table(heads, [[*counts, free, kept, result["allocator_retries"], result["out_of_memory"]]])


def recomputed(result: Result) -> Lines:
    """A long generation beside its tokens as a prompt, and pages of that computed once more: what is kept of each
    layer, and logits.
    """
    rows = [
        [one["name"], one["layer"] if one["name"] != "logits" else "",
         f"{one['error_median']:.2%}", f"{one['error_p99']:.2%}", f"{one['error_max']:.2%}",
         f"{one['noise_median']:.2%}", f"{one['noise_p99']:.2%}", one["broken"], "yes" if one["fine"] else "**no**"]
        for one in result["parts"]
    ]  # fmt: skip
    apart = ["generated: median", "99 %", "most", "page by page: median", "99 %"]
    return table(["kept", "layer", *apart, "broken", "within bounds"], rows)


def _drafts(row: Result) -> str:
    width = row["width"]
    if row["shape"].endswith(f"x{width}"):
        return f"tree {row['shape']}"
    return "plain" if not width else "chosen" if width < 0 else f"{width} {'draft' if width == 1 else 'drafts'}"


def _column(row: Result, rules: bool) -> str:
    return f"{row['rule']}, {_drafts(row)}" if rules else _drafts(row)


def scheduling(result: Result) -> Lines:
    """Goodput of the scheduler's prompt shares over that of the best fixed chunk."""
    cells = result["shares_of_best_chunk"]
    rows = []
    for trace, limits in dict.fromkeys((one["trace"], one["limits"]) for one in cells):
        own = [one for one in cells if (one["trace"], one["limits"]) == (trace, limits)]
        pairs = [f"{one['by cost']:.2f} / {one[f'by cost, targets of {limits}']:.2f}" for one in own]
        rows.append([trace, limits, " · ".join(str(one["best"].split()[-1]) for one in own), *pairs])
    loads = dict.fromkeys(f"load {one['load']:g}" for one in cells)
    return table(["trace", "limits", "best chunk at each load", *loads], rows)


def assignment(result: Result) -> Lines:
    """Largest over mean work of data-parallel ranks: a row for each rule, a column for each number of ranks."""
    work = {(one["policy"], one["ranks"]): one["work"] for one in result["assignment"]}
    counts = list(dict.fromkeys(ranks for _, ranks in work))
    rows = [
        [policy, *(f"{work[policy, ranks]:.3f}" for ranks in counts)]
        for policy in dict.fromkeys(policy for policy, _ in work)
    ]
    return table(["rule", *(f"{ranks} ranks" for ranks in counts)], rows)


def served_by_ranks(result: Result) -> Lines:
    """Data-parallel ranks that run agreed steps on a simulated device."""
    heads = ["ranks", "load", "rule", "seconds", "computed", "held", "step time", "padded", "cached", "first token s"]
    rows = [
        [one["ranks"], one["load"] or "at once", one["policy"], f"{one['seconds']:.0f}", f"{one['computed']:.3f}",
         f"{one['held']:.2f}", f"{one['waited']:.2f}", f"{one['padded']:.2f}", f"{one['cached']:.0%}",
         f"{one['ttft']:.1f}"]
        for one in result["served"]
    ]  # fmt: skip
    return table(heads, rows)


def agreement(result: Result) -> Lines:
    """Microseconds of a round, a row for each number of ranks."""
    cost = result["agreement"]
    alone = [[one["ranks"], f"{one['coordinate_us']:.1f}", f"{one['exchange_us']:.1f}"] for one in cost["alone"]]
    between = {one["ranks"]: f"{one['median_us']:.0f} / {one['p99_us']:.0f}" for one in cost["processes"]}
    counts = sorted({*between, *(ranks for ranks, *_ in alone)})
    of = {ranks: rest for ranks, *rest in alone}
    rows = [[ranks, *of.get(ranks, ("", "")), between.get(ranks, "")] for ranks in counts]
    return table(["ranks", "agreed step µs", "write and read µs", "between processes µs, median / 99 %"], rows)


def expert_balance(result: Result) -> Lines:
    """Mean load of a GPU over the largest, before and after experts move."""
    rows = [
        [one["gpus"], one["redundant"], one["zipf"], one["before"], one["after"], one["after_on_later_tokens"],
         one["all_layers_ms"], one["one_layer_ms"]]
        for one in result["experts"]
    ]  # fmt: skip
    heads = [
        "GPUs",
        "redundant",
        "Zipf",
        "before",
        "after",
        "on later tokens",
        "58 layers ms",
        "one layer and moves ms",
    ]
    return table(heads, rows)


def plans(result: Result) -> Lines:
    """Layouts of `thalweg plan` on several nodes."""
    rows = [
        [one["gpus"], one["name"], f"{one['requests']:,}", f"{1e3 * one['tpot']:.1f}", f"{1e3 * one['ttft']:.0f}",
         f"{one['output_throughput']:,.0f}", f"{one['sending'] / one['tpot']:.0%}", f"{one['kv_tokens']:,}"]
        for one in result["plans"]
    ]  # fmt: skip
    return table(["GPUs", "layout", "requests", "TPOT ms", "TTFT ms", "out tok/s", "sending", "KV tokens"], rows)


def collectives(result: Result) -> Lines:
    """A row for each way, a column for each number of rows."""
    counts = list(dict.fromkeys(one["rows"] for one in result["rows"]))
    us = {(one["way"], one["rows"]): one["us"] for one in result["rows"] if not one["failed"]}
    errors = {way: max(one["error"] for one in result["rows"] if one["way"] == way) for way, _ in us}
    rows = [
        [way, *(f"{us[way, count]:.1f}" if (way, count) in us else "–" for count in counts), f"{errors[way]:.4f}"]
        for way in errors
    ]
    return table(["way", *(f"{count} {'row' if count == 1 else 'rows'}" for count in counts), "largest error"], rows)


def index_scores(result: Result) -> Lines:
    """A row for each load that both backends computed."""
    rows = [
        [load, f"{by['triton']['us']:,.1f}", f"{by['deep_gemm']['us']:,.1f}", f"{by['deep_gemm']['share']:.2f}"]
        for load, by in _by_backend(result).items()
        if by.keys() == {"triton", "deep_gemm"}
    ]
    return table(["tokens", "Triton µs", "DeepGEMM µs", "its share of the limit"], rows)


def index_choice(result: Result) -> Lines:
    """A row for each load of the choice: microseconds of each backend, and of ours over FlashInfer's."""
    loads = {load.removeprefix("choice, "): by for load, by in _by_backend(result).items() if "flashinfer" in by}
    rows = [
        [load, *(f"{by[name]['us']:,.1f}" for name in ("triton", "flashinfer", "torch.topk")),
         f"{by['triton']['us'] / by['flashinfer']['us']:.2f}"]
        for load, by in loads.items()
    ]  # fmt: skip
    return table(["rows x context", "Triton µs", "FlashInfer µs", "torch.topk µs", "Triton / FlashInfer"], rows)


def _by_backend(result: Result) -> dict[str, dict[str, Result]]:
    """By load, and then by backend. Names are "LOAD, BACKEND"."""
    found: dict[str, dict[str, Result]] = {}
    for one in result["rows"]:
        load, _, backend = one["name"].rpartition(", ")
        found.setdefault(load, {})[backend] = one
    return found


def coded(result: Result) -> Lines:
    """For each kind of weights of experts: the time as a share of FP8's, and the share of the limit."""
    return _by_tokens(
        (one["case"].removeprefix("experts "), f"{one['to_fp8']:.2f} · {one['share']:.2f}")
        for one in result["rows"]
        if one["case"].startswith("experts w")
    )


def int8_peers(result: Result) -> Lines:
    """For each library and operation: microseconds, and the share of the limit."""
    return _by_tokens((one["case"], f"{one['us']:,.1f} · {one['share']:.2f}") for one in result["rows"] if "us" in one)


def _by_tokens(shown: Iterable[tuple[str, str]]) -> Lines:
    """A row for each number of tokens, a column for each name. shown: ("NAME, TOKENS", what the cell shows)."""
    cells: dict[str, dict[str, str]] = {}
    for case, text in shown:
        name, _, tokens = case.rpartition(", ")
        cells.setdefault(tokens, {})[name] = text
    names = list(dict.fromkeys(name for by in cells.values() for name in by))
    return table(
        ["tokens", *names],
        [[f"{int(tokens):,}", *(by.get(name, "–") for name in names)] for tokens, by in cells.items()],
    )


KINDS: dict[str, Callable[[Result], Lines]] = {
    "report": report,
    "eval": evaluation,
    "formats": formats,
    "ablation": ablation,
    "compare-transformers": compare_transformers,
    "load": load,
    "structured": structured,
    "prefill": prefill,
    "kernels": kernels,
    "roofline": roofline,
    "tune": tune,
    "before-after": before_after,
    "plan-check": plan_check,
    "acceptance": acceptance,
    "speculation": speculation,
    "speculation-steps": speculation_steps,
    "recomputed": recomputed,
    "soak": soak,
    "scheduling": scheduling,
    "assignment": assignment,
    "served-by-ranks": served_by_ranks,
    "agreement": agreement,
    "expert-balance": expert_balance,
    "plans": plans,
    "collectives": collectives,
    "index-scores": index_scores,
    "index-choice": index_choice,
    "coded": coded,
    "int8-peers": int8_peers,
}

SEVERAL: dict[str, Callable[..., Lines]] = {
    "speculation-best": speculation_best
}  # kinds of several results in one table


# ---- a result in a few words ----


def say(result: Result) -> str:
    """What a line of docs/support.md says of its result; "" for a kind that has no few words."""
    if "cells" in result:
        states = [one["status"] for one in result["cells"]]
        return f"{states.count('done')} of {len(states)} combinations run"
    if "checks" in result:
        return f"{sum(one['ok'] for one in result['checks'])} of {len(result['checks'])} checks passed"
    if "output_throughput" in result:
        many = result["max_concurrency"] or "any number"
        return f"{result['output_throughput']:,.0f} tok/s out at {many}, TTFT {result['median_ttft_ms']:.0f} ms"
    rows = result.get("results") or result.get("rows") or []
    if rows and "median_decode_latency" in rows[0]:
        has_lengths = len({one["input_len"] for one in rows}) > 1
        return "decode step " + ", ".join(
            f"{1e3 * one['median_decode_latency']:.2f} ms × {one['batch_size']}"
            + f" at {one['input_len']:,}" * has_lengths
            for one in rows
        )
    if rows and "task" in rows[0]:
        return ", ".join(f"{one['task']} {accuracy(one)}" for one in rows if "share" in one)
    if rows and "ratio" in rows[0]:
        return ", ".join(f"{one['ratio']:.1f} × transformers at {one['batch_size']}" for one in rows)
    if rows and "floor_ms" in rows[0]:
        return ", ".join(f"{one['rows']} × {one['tokens']:,} tokens in {one['ms']:.0f} ms" for one in rows[:2])
    return ""
