"""The forecast of `thalweg plan`: the resolver's decisions, memory, roofline by batch and context, layouts under a
load, as plain values in seconds, bytes, and tokens a second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from thalweg.config import tree
from thalweg.config.machine import Machine
from thalweg.config.machines import CHIPS, NETWORK, Hardware, hardware_of
from thalweg.config.model import ModelFacts
from thalweg.config.options import Options, ParallelOptions
from thalweg.core.errors import InsufficientMemory, UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.core.kernels import DECISION_NAMES
from thalweg.core.report import USER
from thalweg.launch.hub import locate
from thalweg.launch.planning import processor, search
from thalweg.launch.planning.collectives import collectives
from thalweg.launch.planning.draft_cost import DrafterPlanner, drafter_planner, drafting
from thalweg.launch.planning.gpu_memory import GpuMemory, gpu_memory, slot_bytes, with_pages
from thalweg.launch.planning.layouts import ONE, ParallelLayout, command, why_not
from thalweg.launch.planning.roofline import Ceilings, verified
from thalweg.launch.planning.search import LayoutForecast, PlannedLayout, PlanningInput, Workload
from thalweg.launch.planning.weights import PlannedModel
from thalweg.launch.report import as_json, holding
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved
from thalweg.models.catalog import read_facts

INPUT, OUTPUT = 1024, 256  # tokens of a request by default
GPU_COUNTS = (1, 2, 4, 8, 16, 32)  # of machines that are suggested
WEIGHTS_SHARE = 0.85  # of all memory, that weights may be on a machine that is suggested


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The load and the machine to plan for."""

    load: Workload
    hardware: Hardware | None  # None: this machine
    layout: ParallelLayout | None  # None: the one that serves the load best
    batches: Sequence[int]  # of the roofline
    contexts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Forecast:
    """report: everything, for JSON and tables. The rest is of one device, for `thalweg plan --check`."""

    report: dict[str, Any]
    resolved: Resolved
    memory: GpuMemory | None  # None on a CPU

    @property
    def slots(self) -> float:
        """Bytes of the running requests' state."""
        if self.memory is not None:
            return self.memory.slots
        engine, sizes = self.resolved.engine, self.resolved.sizes
        requests, context = engine.max_running_requests, engine.context_length
        own = slot_bytes(requests, context, table_entry=8, drafts=sizes.slot_bytes, page_size=engine.page_size)
        return float(own + requests * sizes.hot_sets(context))


def forecast(options: Options, request: PlanRequest, folder: str) -> Forecast:
    """folder: of the model that the options name; where they name a config.json, one that holds it.

    Raises UnsupportedConfig for options that cannot be honoured and for a model that is larger than the machine,
    CheckpointError for a checkpoint that is missing or wrong.
    """
    named = request.hardware
    if named is not None and options.load.device == "cpu":
        raise UnsupportedConfig(
            f"--device cpu: of {named.name} only the GPUs are known; leave it out, or --machine to plan for this"
            " machine"
        )
    machine = Machine.here() if named is None else named.machine()
    if named is None and machine.gpus and options.parallel.nnodes > 1:
        raise UnsupportedConfig("nnodes: name the machine of each node, such as --machine h200x8 --nnodes 2")
    # layouts of GPUs are forecast one by one, whether this version runs them or not
    single = tree.replace(options, model=folder)
    if named is not None or machine.gpus:
        single = dataclasses.replace(single, parallel=ParallelOptions())
    resolved, alone = _resolve(single, machine, named is not None)
    engine, facts = resolved.engine, read_facts(resolved.path, resolved.engine.index_topk_pattern)
    load = _with_lengths(request.load, facts)
    if request.layout is not None and (reason := why_not(facts, request.layout)):
        raise UnsupportedConfig(f"layout {request.layout.name}: {reason}")
    decided = engine.report.current()
    wished = [role for role, name in DECISION_NAMES.items() if name in decided and decided[name].source == USER]
    is_reference = engine.decode_attention_backend == "reference"
    model = PlannedModel(facts, engine.dtype, is_reference, engine.kernels, named=wished)
    outcomes: list[LayoutForecast] = []
    if engine.device == "cpu":
        hardware, room = None, None
        # a data sheet has the rates of GPUs, a processor is measured
        planning = PlanningInput(None, processor.measure(engine.threads), model)
    else:

        def memory(layout: ParallelLayout) -> GpuMemory:
            of_node = len(machine.gpus) if named is None else named.gpus_of_node
            return gpu_memory(resolved, model, layout, machine.gpu_free, of_node)

        room = memory(ONE)
        if not alone and not engine.num_pages and room.pages < 1:
            free = format_bytes(round(room.free))
            alone = f"memory: {free} free leave no page for the KV cache beside weights, steps and graphs"
        hardware = named or hardware_of(machine)
        chip = None if hardware is None else hardware.chip
        top = None if chip is None else Ceilings(chip.read, chip.bf16, chip.fp8, chip.fp4)
        planning = PlanningInput(hardware, top, model, memory)
        if hardware is not None:
            outcomes = search.outcomes(planning, load, hardware.gpus, request.layout)
    best = next((outcome for outcome in outcomes if outcome.fits), None)
    layout, gpu = (ONE, room) if best is None else (best.layout, best.room)
    on_layout = resolved if gpu is None else with_pages(resolved, gpu, layout)
    report = as_json(on_layout) | {"model": options.model.model, "model_context": facts.context}
    report |= _cache(on_layout, gpu, layout, request.contexts)
    if request.layout is not None and options.parallel.nnodes == 1:
        report["decisions"] |= _backends_on_layout(tree.replace(options, model=folder), machine)
    if alone and best is None:
        report |= dict.fromkeys(("pages", "kv_tokens", "kv_bytes", "concurrent_full_contexts", "memory"))
        report["holds"] = []
        for name in ("max_total_tokens", "context_length"):
            report["decisions"].pop(name, None)
    name = machine.gpus[0] if engine.device == "cuda" else machine.cpu
    report |= {
        "fits_one_device": not alone,
        "why_not_one_device": alone,
        "machine": {"name": name, "ceilings": planning.top and asdict(planning.top)},
        "flops_a_token": model.on(ONE).flops_a_token(),
        "load": asdict(load),
        "layouts": [_outcome(outcome) for outcome in outcomes],
        "best": _advice(best, options, hardware),
    }
    if hardware is not None:
        report["machine"] |= asdict(hardware) | {"name": hardware.name, "network": NETWORK}
    requests = outcomes[0].requests if outcomes else load.concurrency
    report |= _step_bounds(PlannedLayout(planning, layout, load), request, drafter_planner(facts, resolved), requests)
    return Forecast(report, resolved if alone or room is None else with_pages(resolved, room, ONE), room)


def _with_lengths(load: Workload, facts: ModelFacts) -> Workload:
    """Raises UnsupportedConfig for requests that are longer than the model's context."""
    output = load.output or min(OUTPUT, facts.context // 4)
    load = dataclasses.replace(load, input=load.input or min(INPUT, facts.context - output), output=output)
    if load.input + load.output > facts.context:
        raise UnsupportedConfig(
            f"--input-len {load.input} and --output-len {load.output}: {load.input + load.output} tokens, and the model"
            f" has {facts.context}; use shorter ones"
        )
    return load


def _resolve(options: Options, machine: Machine, is_named: bool) -> tuple[Resolved, str]:
    """As one device would run it, and why it cannot: then as if one had the memory of all, since layouts divide the
    weights. is_named: whether another machine could be named.
    """
    together = dataclasses.replace(machine, gpu_free=machine.gpu_free * len(machine.gpus))
    reason = ""
    for device in (machine, together)[: max(len(machine.gpus), 1)]:
        try:
            return resolve(options, device, weights=False), reason
        except InsufficientMemory as error:
            reason = str(error)
    raise InsufficientMemory(reason + (_suggestion(options, together.gpu_free) if is_named else ""))


def _backends_on_layout(options: Options, machine: Machine) -> dict[str, Any]:
    """What is decided on backends for the layout that the options name; {} where it does not fit.

    Raises UnsupportedConfig where `thalweg serve` would refuse it.
    """
    try:
        decided = _resolve(options, machine, False)[0].engine.report.as_tree()
    except InsufficientMemory:
        return {}
    return {name: decided[name] for name in DECISION_NAMES.values() if name in decided}


def _suggestion(options: Options, free: int) -> str:
    """Which known machines would hold the weights; "" where these bytes do, and something else does not fit."""
    model = options.model
    weights = PlannedModel(read_facts(locate(model.model, model.revision, model.hf_token).folder)).on(ONE).weight_bytes
    if free * WEIGHTS_SHARE > weights:
        return ""
    names = []
    for chip in CHIPS.values():
        fitting = (count for count in GPU_COUNTS if chip.memory * count * WEIGHTS_SHARE > weights)
        names += [Hardware(chip, count).name for count in fitting][:1]
    return f" (the weights would fit into {', '.join(names)})" if names else ""


def _cache(
    resolved: Resolved, gpu: GpuMemory | None, layout: ParallelLayout, contexts: Sequence[int]
) -> dict[str, Any]:
    """The KV caches of a layout. gpu: None on a CPU."""
    lengths = sorted({length for length in contexts if length < resolved.context} | {resolved.context})
    page_size = resolved.engine.page_size
    report: dict[str, Any] = {
        "memory": None,
        "caches": layout.caches,
        "holds": [holding(length, resolved.pages // -(-length // page_size) * layout.caches) for length in lengths],
        "bounds_layout": layout.name,
    }
    return (
        report
        if gpu is None
        else report
        | {
            "memory": gpu.as_json(),
            "kv_bytes": round(resolved.pages * gpu.page),
            "host_kv_bytes": round(resolved.pages * gpu.host_page),
        }
    )


def _outcome(outcome: LayoutForecast) -> dict[str, Any]:
    layout, values = outcome.layout, asdict(outcome)
    del values["layout"], values["room"]
    return {
        "name": layout.name,
        **asdict(layout),
        "caches": layout.caches,
        "memory_of_a_gpu": outcome.room.as_json(),
        "kv_tokens_per_cache": outcome.room.tokens,
        **values,
    }


def _advice(outcome: LayoutForecast | None, options: Options, machine: Hardware | None) -> dict[str, Any] | None:
    if outcome is None or machine is None:
        return None
    layout = outcome.layout
    words = command(options, layout, outcome.requests, machine.gpus_of_node)
    return {"layout": layout.name, "command": words}


def _step_bounds(
    on: PlannedLayout, request: PlanRequest, drafter: DrafterPlanner | None, requests: int
) -> dict[str, Any]:
    """Lower bounds of decode steps, of prompts alone and of decode steps with drafts. requests: of the last."""
    bounds: dict[str, Any] = {"decode_bounds": [], "prefill_bounds": [], "drafts": []}
    if on.planning.top is not None:
        longest = on.facts.context
        contexts = [context for context in request.contexts if context <= longest] or [longest]
        decode = (on.step_bound(batch, 1, context) for batch in request.batches for context in contexts)
        bounds["decode_bounds"] = list(map(asdict, decode))
        bounds["prefill_bounds"] = [asdict(on.step_bound(1, context, context)) for context in contexts]
        if drafter is not None and requests:
            bounds["drafts"] = _drafts(on, requests, drafter)
    return bounds | {
        "drafts_by": "" if drafter is None else drafter.title,
        "drafts_asked": drafter is not None and drafter.is_asked,
    }


def _drafts(on: PlannedLayout, requests: int, drafter: DrafterPlanner) -> list[dict[str, float]]:
    """Decode steps with drafts of each request. ratio: to a step without, which is how many tokens a request must gain
    for drafts to pay. most: tokens that a step can bring.
    """
    shape = on.shape(requests, 1, min(on.load.input + on.load.output // 2, on.facts.context))
    plain, costs = sum(on.step(shape).values()), []
    for count in drafter.counts:
        depth = drafter.tree.max_depth if drafter.tree.is_tree else count
        sends = collectives(on.facts, verified(shape, count), on.layout)
        if drafter.is_divided():
            layer = drafter.forward(on.planning.model, on.layout)[0].facts
            sends += collectives(layer, shape, on.layout) * depth
        work = drafting(on.planning.model, on.layout, shape, count, drafter)
        seconds = sum(on.times(work, sends).values())
        costs.append({"drafts": count, "seconds": seconds, "ratio": seconds / plain, "most": 1 + depth})
    return costs
