"""The forecast of `thalweg plan` as tables and as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thalweg.config.options import Options
from thalweg.core.format import format_bytes
from thalweg.core.plan import PAGE
from thalweg.launch.planning.commands import command
from thalweg.launch.planning.draft_cost import DrafterPlanner
from thalweg.launch.planning.forecast import Floor, Forecast, not_yet
from thalweg.launch.planning.gpu_memory import GpuMemory
from thalweg.launch.planning.layouts import ONE
from thalweg.launch.planning.search import LayoutForecast
from thalweg.launch.planning.weights import PlannedModel
from thalweg.launch.report import as_json as resolved_json
from thalweg.launch.report import choices, sizes

LISTED = 8  # layouts in the table
MEASURED = ("max_total_tokens", "context_length")  # decisions that go by what memory is left


def as_json(made: Forecast, config: Options) -> dict[str, Any]:
    """Everything as plain values; seconds, bytes, and tokens a second."""
    report = resolved_json(made.laid or made.resolved) | {"model": config.model.model}
    if made.laid is None:
        for name in ("pages", "kv_tokens", "kv_bytes", "concurrent_full_contexts"):
            report[name] = None
        for name in MEASURED:
            report["decisions"].pop(name, None)
    elif made.gpu is not None:
        report["kv_bytes"] = round(made.laid.pages * made.gpu.page)
    return report | {
        "fits_one_device": not made.alone,
        "why_not_one_device": made.alone,
        "machine": _machine(made),
        "flops_a_token": PlannedModel(made.facts).on(ONE).flops_a_token(),
        "memory": None if made.gpu is None or made.laid is None else _room(made.gpu),
        "caches": made.layout.caches,
        "holds": [{"length": length, "sequences": count} for length, count in holds(made)],
        "layout_of_floors": made.layout.name,
        "decode_floors": [dataclasses.asdict(floor) for floor in made.decode],
        "prefill_floors": [dataclasses.asdict(floor) for floor in made.prefill],
        "drafts": [dataclasses.asdict(one) for one in made.drafts],
        "drafts_by": "" if made.drafter is None else made.drafter.title,
        "drafts_asked": made.drafter is not None and made.drafter.is_asked,
        "load": dataclasses.asdict(made.load),
        "layouts": [_outcome(one) for one in made.outcomes],
        "best": None if made.best is None else _advice(made, made.best, config),
        "best_that_runs": None if made.runs is None else _advice(made, made.runs, config),
    }


def _machine(made: Forecast) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name_of(made), "ceilings": made.top and dataclasses.asdict(made.top)}
    if made.hardware is not None:
        chip = dataclasses.asdict(made.hardware.chip)
        found |= {"gpus": made.hardware.gpus, "chip": chip | {"sources": dict(made.hardware.chip.sources)}}
    return found


def _room(room: GpuMemory) -> dict[str, Any]:
    return dataclasses.asdict(room) | {"kv": room.pages * room.page, "pages": room.pages, "tokens": room.tokens}


def _outcome(one: LayoutForecast) -> dict[str, Any]:
    return {
        "name": one.layout.name,
        **dataclasses.asdict(one.layout),
        "not_yet": not_yet(one.layout),
        "trouble": one.trouble,
        "requests": one.requests,
        "tpot": one.tpot,
        "ttft": one.ttft,
        "output_throughput": one.output,
        "total_throughput": one.total,
        "sending": one.sent,
        "memory_of_a_gpu": _room(one.room),
        "kv_tokens_per_cache": one.holds,
        "caches": one.layout.caches,
    }


def _advice(made: Forecast, one: LayoutForecast, config: Options) -> dict[str, Any]:
    return {"layout": one.layout.name, "not_yet": not_yet(one.layout), "command": command(config, one)}


def name_of(made: Forecast) -> str:
    if made.hardware is not None:
        return made.hardware.name
    return made.machine.gpus[0] if made.resolved.engine.device == "cuda" else made.machine.cpu


def holds(made: Forecast) -> list[tuple[int, int]]:
    """(tokens of a sequence, how many such the caches of the layout hold together)."""
    if made.laid is None:
        return []
    pages, longest = made.laid.pages, made.laid.context
    lengths = sorted({length for length in made.contexts if length < longest} | {longest})
    return [(length, pages // -(-length // PAGE) * made.layout.caches) for length in lengths]


# ---- tables ----


def show(made: Forecast, config: Options, console: Console) -> None:
    """Prints it, the advice last."""
    console.print(_facts(made, config))
    console.print(
        "\n[bold]Choices[/] of one device, each with its reason"
        + (" (they go by all GPUs together)" if made.alone else "")
    )
    console.print(choices(_decisions(made)))
    if made.decode:
        _show_floors(made, console)
    if made.outcomes:
        console.print(f"\n[bold]Layouts[/] of {name_of(made)} under {_load(made)}")
        console.print(_layouts(made))
        _show_advice(made, config, console)


def _decisions(made: Forecast) -> list[Any]:
    if made.laid is not None:
        return list(made.laid.decisions)
    return [one for one in made.resolved.decisions if one.name not in MEASURED]


def _facts(made: Forecast, config: Options) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _fact_rows(made, config):
        table.add_row(name, escape(text))
    return table


def _fact_rows(made: Forecast, config: Options) -> Iterator[tuple[str, str]]:
    resolved = made.resolved
    yield "model", f"{config.model.model} ({resolved.architecture})"
    yield from sizes(resolved.sizes)
    yield "machine", _about(made)
    if made.alone:
        yield "one device", f"cannot: {made.alone}"
    if made.laid is None:
        return
    many, caches = made.layout.gpus > 1, made.layout.caches
    if made.gpu is not None:
        yield "memory", (f"each GPU of {made.layout.name}: " if many else "") + _memory(made.gpu)
    tokens = made.laid.pages * PAGE
    kv = resolved.sizes.kv_bytes if made.gpu is None else made.gpu.page / PAGE
    told = f"{made.laid.pages:,} pages x {PAGE} tokens x {kv:,.0f} B = {format_bytes(round(tokens * kv))}"
    where = (" on each GPU" if many else "") + (f", {caches} caches" if caches > 1 else "")
    yield "kv cache", told + where
    lengths = "; ".join(f"{count:,} of {length:,}" for length, count in holds(made))
    yield "holds", f"{tokens * caches:,} tokens: sequences of so many: {lengths}"


def _memory(room: GpuMemory) -> str:
    parts = {
        "weights": room.weights,
        "driver and libraries": room.beside,
        "the largest step": room.step,
        "CUDA graphs": room.graphs,
        "requests' state": room.slots,
        "reserve": room.reserve,
    }
    told = " - ".join(f"{format_bytes(round(value))} {name}" for name, value in parts.items())
    return (
        f"{format_bytes(round(room.free))} free - {told} = {format_bytes(round(max(room.left, 0.0)))} for the KV cache"
    )


def _about(made: Forecast) -> str:
    top, hardware = made.top, made.hardware
    if top is None:
        return f"{name_of(made)}: its rates are not known, so there are no floors; --machine plans for one that is"
    if hardware is None:
        return (
            f"{name_of(made)}: reads {top.read / 1e9:.0f} GB/s, multiplies {top.bf16 / 1e9:.0f} GFLOP/s of float32"
            " (measured just now)"
        )
    chip = hardware.chip
    told = (
        f"{chip.memory / 2**30:.0f} GiB, reads {top.read / 1e12:.2f} TB/s, {top.bf16 / 1e12:,.0f} TFLOP/s bf16,"
        f" {top.fp8 / 1e12:,.0f} FP8"
    )
    return f"{hardware.gpus} x {chip.driver}: {told}, NVLink {chip.link / 1e9:.0f} GB/s a way"


def _show_floors(made: Forecast, console: Console) -> None:
    laid = f" on {name_of(made)} as {made.layout.name}" if made.hardware is not None else ""
    console.print(f"\n[bold]Floors of decoding[/]{laid}: ms a step, and tokens/s of all requests together, by context")
    console.print(_decode(made))
    console.print("\n[bold]Floors of a prompt[/] alone: ms to its first token, and prompt tokens/s")
    console.print(_prefill(made))
    if made.drafts and made.drafter is not None:
        console.print(_drafted(made, made.drafter))
        console.print(_drafts(made, made.drafter))
    console.print(
        "[dim]No program is faster than a floor: each phase reads its weights and context once, or computes at the"
        " machine's rate.[/]"
    )


def _decode(made: Forecast) -> Table:
    contexts = sorted({floor.context for floor in made.decode})
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("requests", justify="right")
    if made.facts.moe is not None:
        table.add_column(f"experts of {made.facts.moe.experts} read", justify="right")
    for context in contexts:
        table.add_column(f"{context:,}", justify="right")
    table.add_column(f"mostly, at {contexts[-1]:,}")
    for batch in sorted({floor.batch for floor in made.decode}):
        row = [floor for floor in made.decode if floor.batch == batch]
        experts = [f"{row[0].experts:.0f}"] if made.facts.moe is not None else []
        cells = [f"{1e3 * floor.seconds:.2f} ({floor.rate:,.0f})" for floor in row]
        table.add_row(f"{batch:,}", *experts, *cells, _mostly(row[-1]))
    return table


def _prefill(made: Forecast) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("tokens", "ms", "tokens/s"):
        table.add_column(head, justify="right")
    table.add_column("mostly")
    for floor in made.prefill:
        table.add_row(f"{floor.new:,}", f"{1e3 * floor.seconds:,.1f}", f"{floor.rate:,.0f}", _mostly(floor))
    return table


def _drafted(made: Forecast, drafter: DrafterPlanner) -> str:
    """The line over a table of drafts."""
    load = _load(made)
    if not drafter.has_weights:
        return f"\n[bold]Drafts[/] by {drafter.title}, under {load}: they cost no more than that a step verifies them"
    told = f"by {drafter.title}, under {load}: a step verifies them and makes as many anew"
    if drafter.tree.is_tree:
        told = (
            f"by {drafter.title}, a tree of {drafter.tree.num_drafts}, under {load}: a step verifies them and grows them"
            " anew"
        )
    unasked = "" if drafter.is_asked else " (--speculative-algorithm NEXTN, which was not asked for)"
    return f"\n[bold]Drafts[/] {told}{unasked}"


def _drafts(made: Forecast, drafter: DrafterPlanner) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("drafts", "ms a step", "a plain step takes 1"):
        table.add_column(head, justify="right")
    table.add_column("")
    for one in made.drafts:
        pays = f"pays when a step brings a request more than {one.ratio:.2f} tokens"
        most = 1 + (drafter.tree.max_depth if drafter.tree.is_tree else one.drafts)
        if one.ratio >= most:
            pays = f"pays never: a step brings a request {most} tokens at most"
        table.add_row(str(one.drafts), f"{1e3 * one.seconds:.2f}", f"{one.ratio:.2f}", pays)
    return table


def _mostly(floor: Floor) -> str:
    """The two kinds of phase that take longest."""
    top = sorted(floor.phases.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {100 * seconds / floor.seconds:.0f} %" for name, seconds in top if seconds)


def _layouts(made: Forecast) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("layout", "GB a GPU", "holds", "requests", "TPOT ms", "TTFT ms", "out tok/s", "sending"):
        table.add_column(head, justify="left" if head == "layout" else "right", no_wrap=True)
    table.add_column("")
    for one in made.outcomes[:LISTED]:
        notes = [note for note in (one.trouble, "not built yet" if not_yet(one.layout) else "") if note]
        cells: Sequence[str] = [
            f"{one.room.weights / 1e9:.1f}",
            f"{one.holds * one.layout.caches:,}",
            "",
            "",
            "",
            "",
            "",
        ]
        if one.fits:
            sent = f"{100 * one.sent / one.tpot:.0f} %" if one.sent else ""
            times = f"{1e3 * one.tpot:.2f}", f"{1e3 * one.ttft:.1f}", f"{one.output:,.0f}"
            cells = [*cells[:2], f"{one.requests:,}", *times, sent]
        table.add_row(one.layout.name, *cells, "; ".join(notes))
    if len(made.outcomes) > LISTED:
        table.add_row(f"... {len(made.outcomes) - LISTED} more: --json", *[""] * 8)
    return table


def _load(made: Forecast) -> str:
    load = made.load
    many = (
        f"{load.concurrency:,} at a time"
        if load.concurrency
        else f"{load.rate:g} a second"
        if load.rate
        else "as many as may be"
    )
    targets = [f"TPOT {1e3 * load.tpot:g} ms" if load.tpot else "", f"TTFT {1e3 * load.ttft:g} ms" if load.ttft else ""]
    wished = ", ".join(target for target in targets if target)
    return f"requests of {load.input:,} tokens in and {load.output:,} out, {many}" + (
        f" (targets: {wished})" if wished else ""
    )


def _show_advice(made: Forecast, config: Options, console: Console) -> None:
    best, runs = made.best, made.runs
    if best is None:
        console.print(f"\nNo layout of {name_of(made)} serves this: {made.outcomes[0].trouble}.")
        return
    why = not_yet(best.layout)
    missed = f"; it misses a target: {best.trouble}" if best.trouble else ""
    if not why:
        console.print(f"\n[bold]Best:[/] {best.layout.name}{missed}")
        console.print(command(config, best), soft_wrap=True, markup=False)
        return
    console.print(f"\n[bold]Best:[/] {best.layout.name}{missed}. Not runnable yet ({escape(why)}); it will be:")
    console.print("# " + command(config, best).replace("\n", "\n# "), soft_wrap=True, markup=False)
    if runs is None:
        console.print("Nothing that this version runs has the memory for this model and load.")
        return
    console.print(
        f"\n[bold]Best of what runs today:[/] {runs.layout.name}, {runs.output:,.0f} tok/s"
        + (f"; {runs.trouble}" if runs.trouble else "")
    )
    console.print(command(config, runs), soft_wrap=True, markup=False)
