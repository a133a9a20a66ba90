"""The forecast of `thalweg plan` as tables and as plain values, with the command line that starts a layout."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thalweg.config.options import Options
from thalweg.config.tree import command_line, non_defaults, settings
from thalweg.core.format import format_bytes
from thalweg.core.plan import PAGE
from thalweg.core.report import Decision
from thalweg.launch.planning.draft_cost import DrafterPlanner
from thalweg.launch.planning.forecast import Forecast, not_yet
from thalweg.launch.planning.gpu_memory import GpuMemory
from thalweg.launch.planning.layouts import ONE
from thalweg.launch.planning.search import Floor, LayoutForecast
from thalweg.launch.report import as_json as resolved_json
from thalweg.launch.report import choices, facts_table, sizes

LISTED = 8  # layouts in the table
DEFAULT_RUNNING = 256  # what the resolver gives a GPU
MEMORY_DECISIONS = ("max_total_tokens", "context_length")


def as_json(made: Forecast, options: Options) -> dict[str, Any]:
    """Everything as plain values; seconds, bytes, and tokens a second."""
    report = resolved_json(made.laid or made.resolved) | {"model": options.model.model}
    if made.laid is None:
        report |= dict.fromkeys(("pages", "kv_tokens", "kv_bytes", "concurrent_full_contexts"))
        for name in MEMORY_DECISIONS:
            report["decisions"].pop(name, None)
    elif made.gpu is not None:
        report["kv_bytes"] = round(made.laid.pages * made.gpu.page)
    machine: dict[str, Any] = {"name": name_of(made), "ceilings": made.planning.top and asdict(made.planning.top)}
    if made.planning.hardware is not None:
        machine |= asdict(made.planning.hardware)
    drafter = made.drafter
    return report | {
        "fits_one_device": not made.alone,
        "why_not_one_device": made.alone,
        "machine": machine,
        "flops_a_token": made.planning.model.on(ONE).flops_a_token(),
        "memory": None if made.gpu is None or made.laid is None else _memory(made.gpu),
        "caches": made.layout.caches,
        "holds": [{"length": length, "sequences": count} for length, count in holds(made)],
        "layout_of_floors": made.layout.name,
        "decode_floors": list(map(asdict, made.decode)),
        "prefill_floors": list(map(asdict, made.prefill)),
        "drafts": list(map(asdict, made.drafts)),
        "drafts_by": "" if drafter is None else drafter.title,
        "drafts_asked": drafter is not None and drafter.is_asked,
        "load": asdict(made.load),
        "layouts": list(map(_outcome, made.outcomes)),
        "best": _advice(made.best(), options),
        "best_that_runs": _advice(made.best(only_running=True), options),
    }


def _memory(memory: GpuMemory) -> dict[str, Any]:
    pages = {"kv": memory.pages * memory.page, "pages": memory.pages, "tokens": memory.tokens}
    return asdict(memory) | pages


def _outcome(outcome: LayoutForecast) -> dict[str, Any]:
    layout = outcome.layout
    values = {"name": layout.name, **asdict(layout), "not_yet": not_yet(layout), "caches": layout.caches}
    values |= {"memory_of_a_gpu": _memory(outcome.room), "kv_tokens_per_cache": outcome.room.tokens}
    return values | {name: value for name, value in asdict(outcome).items() if name not in ("layout", "room")}


def _advice(outcome: LayoutForecast | None, options: Options) -> dict[str, Any] | None:
    if outcome is None:
        return None
    layout = outcome.layout
    return {"layout": layout.name, "not_yet": not_yet(layout), "command": command(options, outcome)}


def name_of(made: Forecast) -> str:
    if made.planning.hardware is not None:
        return made.planning.hardware.name
    return made.machine.gpus[0] if made.resolved.engine.device == "cuda" else made.machine.cpu


def holds(made: Forecast) -> list[tuple[int, int]]:
    """(tokens of a sequence, how many such the caches of the layout hold together)."""
    if made.laid is None:
        return []
    pages, longest = made.laid.pages, made.laid.context
    lengths = sorted({length for length in made.contexts if length < longest} | {longest})
    return [(length, pages // -(-length // PAGE) * made.layout.caches) for length in lengths]


# ---- tables ----


def show(made: Forecast, options: Options, console: Console) -> None:
    """Prints it, the advice last."""
    console.print(facts_table(_facts(made, options)))
    together = " (they go by all GPUs together)" if made.alone else ""
    console.print(f"\n[bold]Choices[/] of one device, each with its reason{together}")
    console.print(choices(_decisions(made)))
    if made.decode:
        _show_floors(made, console)
    if made.outcomes:
        console.print(f"\n[bold]Layouts[/] of {name_of(made)} under {_load(made)}")
        console.print(_layouts(made))
        _show_advice(made, options, console)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Columns of numbers; a first head "layout" and a last one "" or "mostly ..." are of text."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for number, head in enumerate(heads):
        is_text = head == "layout" or not head or head.startswith("mostly")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=not is_text or number == 0)
    for row in rows:
        table.add_row(*row)
    return table


def _decisions(made: Forecast) -> list[Decision]:
    if made.laid is not None:
        return list(made.laid.decisions)
    return [decision for decision in made.resolved.decisions if decision.name not in MEMORY_DECISIONS]


def _facts(made: Forecast, options: Options) -> Iterator[tuple[str, str]]:
    resolved = made.resolved
    yield "model", f"{options.model.model} ({resolved.architecture})"
    yield from sizes(resolved.sizes)
    yield "machine", _machine_text(made)
    if made.alone:
        yield "one device", f"cannot: {made.alone}"
    if made.laid is None:
        return
    has_many, caches = made.layout.gpus > 1, made.layout.caches
    if made.gpu is not None:
        yield "memory", (f"each GPU of {made.layout.name}: " if has_many else "") + _memory_text(made.gpu)
    tokens = made.laid.pages * PAGE
    kv = resolved.sizes.kv_bytes if made.gpu is None else made.gpu.page / PAGE
    where = (" on each GPU" if has_many else "") + (f", {caches} caches" if caches > 1 else "")
    yield "kv cache", f"{made.laid.pages:,} pages x {PAGE} tokens x {kv:,.0f} B = {_bytes(tokens * kv)}{where}"
    lengths = "; ".join(f"{count:,} of {length:,}" for length, count in holds(made))
    yield "holds", f"{tokens * caches:,} tokens: sequences of so many: {lengths}"


def _bytes(count: float) -> str:
    return format_bytes(round(count))


def _memory_text(memory: GpuMemory) -> str:
    parts = {
        "weights": memory.weights,
        "driver and libraries": memory.beside,
        "the largest step": memory.step,
        "CUDA graphs": memory.graphs,
        "requests' state": memory.slots,
        "reserve": memory.reserve,
    }
    listed = " - ".join(f"{_bytes(value)} {name}" for name, value in parts.items())
    return f"{_bytes(memory.free)} free - {listed} = {_bytes(max(memory.left, 0.0))} for the KV cache"


def _machine_text(made: Forecast) -> str:
    top, hardware = made.planning.top, made.planning.hardware
    if top is None:
        return f"{name_of(made)}: its rates are not known, so there are no floors; --machine plans for one that is"
    if hardware is None:
        rates = f"reads {top.read / 1e9:.0f} GB/s, multiplies {top.bf16 / 1e9:.0f} GFLOP/s of float32"
        return f"{name_of(made)}: {rates} (measured just now)"
    chip, flops = hardware.chip, f"{top.bf16 / 1e12:,.0f} TFLOP/s bf16, {top.fp8 / 1e12:,.0f} FP8"
    rates = f"reads {top.read / 1e12:.2f} TB/s, {flops}, NVLink {chip.link / 1e9:.0f} GB/s a way"
    return f"{hardware.gpus} x {chip.driver}: {chip.memory / 2**30:.0f} GiB, {rates}"


def _show_floors(made: Forecast, console: Console) -> None:
    where = f" on {name_of(made)} as {made.layout.name}" if made.planning.hardware is not None else ""
    console.print(f"\n[bold]Floors of decoding[/]{where}: ms a step, and tokens/s of all requests together, by context")
    console.print(_decode(made))
    console.print("\n[bold]Floors of a prompt[/] alone: ms to its first token, and prompt tokens/s")
    prompts = (
        (f"{floor.new:,}", f"{1e3 * floor.seconds:,.1f}", f"{floor.rate:,.0f}", _mostly(floor))
        for floor in made.prefill
    )
    console.print(_table(("tokens", "ms", "tokens/s", "mostly"), prompts))
    if made.drafts and made.drafter is not None:
        console.print(*_drafts(made, made.drafter), sep="\n")
    console.print(
        "[dim]No program is faster than a floor: each phase reads its weights and context once, or computes at the"
        " machine's rate.[/]"
    )


def _decode(made: Forecast) -> Table:
    contexts, moe = sorted({floor.context for floor in made.decode}), made.facts.moe
    experts = [] if moe is None else [f"experts of {moe.experts} read"]
    rows = []
    for batch in sorted({floor.batch for floor in made.decode}):
        floors = [floor for floor in made.decode if floor.batch == batch]
        cells = [f"{1e3 * floor.seconds:.2f} ({floor.rate:,.0f})" for floor in floors]
        rows.append([f"{batch:,}", *(f"{floors[0].experts:.0f}" for _ in experts), *cells, _mostly(floors[-1])])
    heads = ["requests", *experts, *(f"{context:,}" for context in contexts), f"mostly, at {contexts[-1]:,}"]
    return _table(heads, rows)


def _mostly(floor: Floor) -> str:
    """The two kinds of phase that take longest."""
    top = sorted(floor.phases.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {100 * seconds / floor.seconds:.0f} %" for name, seconds in top if seconds)


def _drafts(made: Forecast, drafter: DrafterPlanner) -> tuple[str, Table]:
    tree = drafter.tree
    title = f"\n[bold]Drafts[/] by {drafter.title}" + (f", a tree of {tree.num_drafts}" if tree.is_tree else "")
    cost = "a step verifies them and makes as many anew" if drafter.has_weights else "they cost their verification"
    title += f", under {_load(made)}: {cost}"
    if not drafter.is_asked:
        title += " (--speculative-algorithm NEXTN, which was not asked for)"
    rows = []
    for one in made.drafts:
        most = 1 + (tree.max_depth if tree.is_tree else one.drafts)
        pays = f"pays when a step brings a request more than {one.ratio:.2f} tokens"
        never = f"pays never: a step brings a request {most} tokens at most"
        note = never if one.ratio >= most else pays
        rows.append((str(one.drafts), f"{1e3 * one.seconds:.2f}", f"{one.ratio:.2f}", note))
    return title, _table(("drafts", "ms a step", "a plain step takes 1", ""), rows)


def _layouts(made: Forecast) -> Table:
    heads = ("layout", "GB a GPU", "holds", "requests", "TPOT ms", "TTFT ms", "out tok/s", "sending", "")
    rows = [_layout_row(outcome) for outcome in made.outcomes[:LISTED]]
    if len(made.outcomes) > LISTED:
        rows.append([f"... {len(made.outcomes) - LISTED} more: --json", *[""] * 8])
    return _table(heads, rows)


def _layout_row(outcome: LayoutForecast) -> list[str]:
    layout, times = outcome.layout, [""] * 5
    notes = "; ".join(note for note in (outcome.trouble, "not built yet" if not_yet(layout) else "") if note)
    if outcome.fits:
        sent = f"{100 * outcome.sending / outcome.tpot:.0f} %" if outcome.sending else ""
        latencies = f"{1e3 * outcome.tpot:.2f}", f"{1e3 * outcome.ttft:.1f}"
        times = [f"{outcome.requests:,}", *latencies, f"{outcome.output_throughput:,.0f}", sent]
    return [layout.name, f"{outcome.room.weights / 1e9:.1f}", f"{outcome.room.tokens * layout.caches:,}", *times, notes]


def _load(made: Forecast) -> str:
    load = made.load
    requests = f"{load.rate:g} a second" if load.rate else "as many as may be"
    if load.concurrency:
        requests = f"{load.concurrency:,} at a time"
    targets = {"TPOT": load.tpot, "TTFT": load.ttft}
    wished = ", ".join(f"{name} {1e3 * seconds:g} ms" for name, seconds in targets.items() if seconds)
    lengths = f"requests of {load.input:,} tokens in and {load.output:,} out"
    return f"{lengths}, {requests}" + (f" (targets: {wished})" if wished else "")


def _show_advice(made: Forecast, options: Options, console: Console) -> None:
    best, runs = made.best(), made.best(only_running=True)
    if best is None:
        console.print(f"\nNo layout of {name_of(made)} serves this: {made.outcomes[0].trouble}.")
        return
    reason, missed = not_yet(best.layout), f"; it misses a target: {best.trouble}" if best.trouble else ""
    title, text = f"\n[bold]Best:[/] {best.layout.name}{missed}", command(options, best)
    if reason:
        title += f". Not runnable yet ({escape(reason)}); it will be:"
        text = "# " + text.replace("\n", "\n# ")
    console.print(title)
    console.print(text, soft_wrap=True, markup=False)
    if reason and runs is None:
        console.print("Nothing that this version runs has the memory for this model and load.")
    elif reason and runs is not None:
        trouble = f"; {runs.trouble}" if runs.trouble else ""
        rate = f"{runs.output_throughput:,.0f} tok/s"
        console.print(f"\n[bold]Best of what runs today:[/] {runs.layout.name}, {rate}{trouble}")
        console.print(command(options, runs), soft_wrap=True, markup=False)


def command(config: Options, one: LayoutForecast) -> str:
    """What starts it: one server, or one for each copy, on GPUs and ports of their own. Settings that the user gave
    stay.
    """
    layout = one.layout
    words = ["thalweg", "serve", _folder(config.model.model), *layout.flags()]
    own = {
        name: value
        for name, value in non_defaults(config).items()
        if name != "model" and settings()[name].section != "parallel"
    }
    running = -(-one.requests // layout.copies)
    if "max_running_requests" not in own and running > DEFAULT_RUNNING:
        words += ["--max-running-requests", str(-(-running // PAGE) * PAGE)]
    words += command_line(own)
    if layout.copies == 1:
        return shlex.join(words)
    each = layout.tp * layout.pp
    first = "$i" if each == 1 else f"$(seq -s, $(({each}*i)) $(({each}*i+{each - 1})))"
    return (
        f"for i in $(seq 0 {layout.copies - 1}); do\n"
        f"  CUDA_VISIBLE_DEVICES={first} {shlex.join(words)} --port $((30000+i)) &\ndone"
    )


def _folder(model: str) -> str:
    """What can be served: of a config.json its folder, of a configuration by another name nothing yet."""
    path = Path(model)
    if path.suffix != ".json":
        return model
    return str(path.parent) if path.name == "config.json" else "MODEL"
