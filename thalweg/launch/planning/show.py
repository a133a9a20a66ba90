"""The tables of `thalweg plan`, made of the forecast's report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console

from thalweg.core.format import format_bytes
from thalweg.launch import report as resolver
from thalweg.launch.report import ONE_GPU, make_table

Report = Mapping[str, Any]

LISTED = 8  # layouts in the table
PARTS = {
    "weights": "weights",
    "beside": "driver and libraries",
    "step": "the largest step",
    "graphs": "CUDA graphs",
    "slots": "requests' state",
    "reserve": "reserve",
}


def _if_served(cell: str, scale: float = 1.0) -> Callable[[Report], str]:
    """A cell of a layout's number, such as "{tpot:.2f}"; "" where the layout does not serve the load."""

    def show(layout: Report) -> str:
        numbers = {name: scale * value for name, value in layout.items() if isinstance(value, int | float)}
        return cell.format_map(numbers) if layout["requests"] else ""

    return show


def _milliseconds(seconds: float) -> str:
    """With three significant digits below 1, two decimals above."""
    return f"{1e3 * seconds:.3g}" if seconds < 1e-3 else f"{1e3 * seconds:,.2f}"


def _mostly(bound: Report) -> str:
    """The two kinds of phase that take longest."""
    top = sorted(bound["phases"].items(), key=lambda phase: -phase[1])[:2]
    return ", ".join(f"{name} {seconds / bound['seconds']:.0%}" for name, seconds in top if seconds)


def _pays(cost: Report) -> str:
    if cost["ratio"] >= cost["most"]:
        return f"never pays off: a step gives a request {cost['most']} tokens at most"
    return f"pays off when a step gives a request more than {cost['ratio']:.2f} tokens"


BOUNDS = {
    "requests": "{batch:,}",
    "tokens": "{new:,}",
    "context": "{context:,}",
    "experts read": "{experts:.0f}",
    "ms": lambda bound: _milliseconds(bound["seconds"]),
    "estimate": lambda bound: _milliseconds(bound["estimate"]) if bound["estimate"] else "",
    "tokens/s": "{rate:,.0f}",
    "mostly": _mostly,
}
DRAFTS = {
    "drafts": "{drafts}",
    "ms a step": lambda cost: _milliseconds(cost["seconds"]),
    "step time / plain step": "{ratio:.2f}",
    "": _pays,
}
LAYOUTS = {
    "layout": "{name}",
    "GB a GPU": lambda layout: f"{layout['memory_of_a_gpu']['weights'] / 1e9:.1f}",
    "holds": lambda layout: f"{layout['kv_tokens_per_cache'] * layout['caches']:,}",
    "requests": _if_served("{requests:,.0f}"),
    "TPOT ms": _if_served("{tpot:.2f} ~ {tpot_estimate:.2f}", 1e3),
    "TTFT ms": _if_served("{ttft:.1f} ~ {ttft_estimate:.1f}", 1e3),
    "out tok/s": _if_served("{output_throughput:,.0f} ~ {output_estimate:,.0f}"),
    "sending": lambda layout: f"{layout['sending'] / layout['tpot']:.0%}" if layout["sending"] else "",
    "": "{trouble}",
}


def show(report: Report, console: Console) -> None:
    """Prints it, the advice last."""
    name, load = report["machine"]["name"], _load(report["load"])
    resolver.show(report, console, _facts(report))
    if report["decode_bounds"]:
        on_cpu = report["decisions"]["device"]["value"] == "cpu"
        where = "one process" if on_cpu else report["bounds_layout"]
        console.print(
            make_table(f"\nLower bounds of decode steps, {where}", BOUNDS, report["decode_bounds"], notes=1),
            make_table("\nLower bounds of a prompt alone", BOUNDS, report["prefill_bounds"], notes=1),
            "No program is faster: each phase reads its weights and context once, or computes at the machine's rate.",
        )
    if report["drafts"]:
        asked = "" if report["drafts_asked"] else " (--speculative-algorithm NEXTN, which was not asked for)"
        console.print(
            make_table(f"\nDrafts by {report['drafts_by']}, under {load}{asked}", DRAFTS, report["drafts"], notes=1)
        )
    if layouts := report["layouts"]:
        console.print(make_table(f"\nLayouts of {name} under {load}", LAYOUTS, layouts[:LISTED], left=1, notes=1))
        if len(layouts) > LISTED:
            console.print(f"... {len(layouts) - LISTED} more: --json")
        _show_advice(report, console)


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "machine", _machine(report["machine"])
    if report["why_not_one_device"]:
        reason = report["why_not_one_device"]
        yield "one device", f"cannot: {reason}. The choices below go by all GPUs together"
    if memory := report["memory"]:
        layout = report["bounds_layout"]
        parts = " - ".join(f"{_bytes(memory[part])} {name}" for part, name in PARTS.items())
        where = f"each GPU of {layout}: " if layout != ONE_GPU else ""
        yield "memory", f"{where}{_bytes(memory['free'])} free - {parts} = {_bytes(memory['room'])} for the KV cache"
        if memory["room"] - memory["kv"] >= memory["page"]:
            yield (
                "host memory",
                f"{_bytes(memory['host'])} for each GPU hold the latents of {_bytes(memory['kv'])} there",
            )


def _bytes(count: float) -> str:
    return format_bytes(round(count))


def _machine(machine: Report) -> str:
    name, top = machine["name"], machine["ceilings"]
    if top is None:
        return f"{name}: its rates are not known, so there are no lower bounds; --machine plans for a known one"
    if "chip" not in machine:
        rates = f"reads {top['read'] / 1e9:.0f} GB/s, multiplies {top['bf16'] / 1e9:.0f} GFLOP/s of float32"
        return f"{name}: {rates} (measured just now)"
    chip, flops = machine["chip"], f"{top['bf16'] / 1e12:,.0f} TFLOP/s bf16, {top['fp8'] / 1e12:,.0f} FP8"
    flops += f", {top['fp4'] / 1e12:,.0f} FP4" if top["fp4"] else ""
    rates = f"reads {top['read'] / 1e12:.2f} TB/s, {flops}, {chip['fabric']} {chip['link'] / 1e9:.0f} GB/s a way"
    if machine["gpus"] > machine["gpus_of_node"]:
        rates += f"; nodes of {machine['gpus_of_node']}, {machine['network'] / 1e9:.0f} GB/s a GPU between them"
    return f"{machine['gpus']} x {chip['driver']}: {chip['memory'] / 2**30:.0f} GiB, {rates}"


def _load(load: Report) -> str:
    requests = f"{load['rate']:g} a second" if load["rate"] else "as many as may be"
    if load["concurrency"]:
        requests = f"{load['concurrency']:,} at a time"
    targets = [f"{name.upper()} {1e3 * load[name]:g} ms" for name in ("tpot", "ttft") if load[name]]
    lengths = f"requests of {load['input']:,} tokens in and {load['output']:,} out"
    return f"{lengths}, {requests}" + (f" (targets: {', '.join(targets)})" if targets else "")


def _show_advice(report: Report, console: Console) -> None:
    best = report["best"]
    if best is None:
        console.print(f"\nNo layout of {report['machine']['name']} serves this: {report['layouts'][0]['trouble']}.")
        return
    trouble = report["layouts"][0]["trouble"]
    missed = f"; it misses a target: {trouble}" if trouble else ""
    console.print(f"\n[bold]Best:[/] {best['layout']}{missed}")
    console.print(best["command"], soft_wrap=True, markup=False)
