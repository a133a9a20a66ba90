"""The forecast of `thalweg plan`: the resolver's decisions, memory, roofline by batch and context, layouts under a
load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.config.machine import Machine
from thalweg.config.machines import CHIPS, Hardware, hardware_of
from thalweg.config.model import ModelFacts
from thalweg.config.options import Options, ParallelOptions
from thalweg.core.errors import InsufficientMemory, UnsupportedConfig
from thalweg.core.format import format_bytes
from thalweg.launch.hub import locate
from thalweg.launch.planning import processor, search
from thalweg.launch.planning.collectives import collectives
from thalweg.launch.planning.draft_cost import DrafterPlanner, drafter_planner, drafting
from thalweg.launch.planning.gpu_memory import GpuMemory, gpu_memory, slot_bytes, with_pages
from thalweg.launch.planning.layouts import ONE, ParallelLayout, why_not
from thalweg.launch.planning.roofline import Ceilings, verified
from thalweg.launch.planning.search import Floor, LayoutForecast, PlannedLayout, PlanningInput, Workload
from thalweg.launch.planning.weights import PlannedModel
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved
from thalweg.launch.resources import unsupported_parallelism
from thalweg.models.catalog import read_facts

INPUT, OUTPUT = 1024, 256  # tokens of a request by default
GPU_COUNTS = (1, 2, 4, 8, 16, 32)  # of machines that are suggested
WEIGHTS_SHARE = 0.85  # of all memory, that weights may be on a machine that is suggested


@dataclass(frozen=True, slots=True)
class DraftCost:
    """A decode step with drafts of each request, at best."""

    drafts: int
    seconds: float
    ratio: float  # to a step without: how many tokens a request must gain for drafts to pay


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is made for."""

    load: Workload
    hardware: Hardware | None = None  # None: this machine
    layout: ParallelLayout | None = None  # None: the one that serves the load best
    batches: Sequence[int] = (1, 8, 32, 128)  # of the roofline
    contexts: Sequence[int] = (1024, 4096, 16384)


@dataclass(frozen=True, slots=True)
class Forecast:
    resolved: Resolved  # as one device would run it
    alone: str  # why one device has not the memory; "" where it has
    planning: PlanningInput
    machine: Machine
    room: GpuMemory | None  # of one GPU alone; None on a CPU
    layout: ParallelLayout  # of the roofline
    laid: Resolved | None  # as `resolved`, on that layout; None where no layout has the memory
    gpu: GpuMemory | None  # of a GPU of that layout
    contexts: tuple[int, ...]
    decode: tuple[Floor, ...]
    prefill: tuple[Floor, ...]
    drafts: tuple[DraftCost, ...]
    drafter: DrafterPlanner | None
    load: Workload
    outcomes: tuple[LayoutForecast, ...]  # the best first

    @property
    def facts(self) -> ModelFacts:
        return self.planning.model.facts

    @property
    def slots(self) -> float:
        """Bytes of the running requests' state."""
        if self.room is not None:
            return self.room.slots
        engine, drafts = self.resolved.engine, self.resolved.sizes.slot_bytes
        return float(slot_bytes(engine.max_running_requests, engine.context_length, table_entry=8, drafts=drafts))

    def best(self, only_running: bool = False) -> LayoutForecast | None:
        """The layout that serves the load best. only_running: of those that this version runs."""
        fitting = (outcome for outcome in self.outcomes if outcome.fits)
        return next((one for one in fitting if not (only_running and not_yet(one.layout))), None)


def not_yet(layout: ParallelLayout) -> str:
    """Why this version does not run such a layout; "" where it does."""
    sizes = ParallelOptions(tp_size=layout.tp, dp_size=layout.dp, pp_size=layout.pp, ep_size=layout.ep)
    return unsupported_parallelism(sizes)


def forecast(options: Options, request: PlanRequest) -> Forecast:
    """Raises UnsupportedConfig for options that cannot be honoured and for a model that is larger than the machine,
    CheckpointError for a checkpoint that is missing or wrong.
    """
    named = request.hardware
    if named is not None and options.load.device == "cpu":
        raise UnsupportedConfig(
            f"--device cpu: of {named.name} only the GPUs are known; leave it out, or --machine to plan for this"
            " machine"
        )
    machine = Machine.here() if named is None else named.machine()
    # layouts of a named machine are forecast whether this version runs them or not
    single = options if named is None else dataclasses.replace(options, parallel=ParallelOptions())
    resolved, alone = _resolve(single, machine, named is not None)
    engine, facts = resolved.engine, read_facts(resolved.path)
    load = _with_lengths(request.load, facts)
    if request.layout is not None and (reason := why_not(facts, request.layout)):
        raise UnsupportedConfig(f"layout {request.layout.name}: {reason}")
    model = PlannedModel(facts, engine.dtype, engine.decode_attention_backend == "reference", engine.kernels)
    outcomes: list[LayoutForecast] = []
    if engine.device == "cpu":
        room = None
        # a data sheet has the rates of GPUs, a processor is measured
        planning = PlanningInput(None, processor.measure(engine.threads), model)
    else:

        def memory(layout: ParallelLayout) -> GpuMemory:
            return gpu_memory(resolved, model, layout, machine.gpu_free)

        room = memory(ONE)
        if not alone and not engine.num_pages and room.pages < 1:
            free = format_bytes(round(room.free))
            alone = f"memory: {free} free leave no page for the KV cache beside weights, steps and graphs"
        hardware = named or hardware_of(machine)
        chip = None if hardware is None else hardware.chip
        top = None if chip is None else Ceilings(chip.read, chip.bf16, chip.fp8)
        planning = PlanningInput(hardware, top, model, memory)
        if hardware is not None:
            outcomes = search.outcomes(planning, load, hardware.gpus, request.layout)
    best = next((outcome for outcome in outcomes if outcome.fits), None)
    layout, gpu = (ONE, room) if best is None else (best.layout, best.room)
    drafter = drafter_planner(facts, resolved)
    floors = PlannedLayout(planning, layout, load)
    contexts = [context for context in request.contexts if context <= facts.context] or [facts.context]
    decode, prefill, drafts = list[Floor](), list[Floor](), list[DraftCost]()
    if planning.top is not None:
        decode = [floors.floor(batch, 1, context) for batch in request.batches for context in contexts]
        prefill = [floors.floor(1, context, context) for context in contexts]
        requests = outcomes[0].requests if outcomes else load.concurrency
        drafts = [] if drafter is None or not requests else _drafts(floors, requests, drafter)
    laid = resolved if gpu is None else with_pages(resolved, gpu, layout)
    return Forecast(
        resolved=resolved if alone or room is None else with_pages(resolved, room, ONE),
        alone=alone,
        planning=planning,
        machine=machine,
        room=room,
        layout=layout,
        laid=None if alone and best is None else laid,
        gpu=gpu,
        contexts=tuple(request.contexts),
        decode=tuple(decode),
        prefill=tuple(prefill),
        drafts=tuple(drafts),
        drafter=drafter,
        load=load,
        outcomes=tuple(outcomes),
    )


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


def _drafts(on: PlannedLayout, requests: int, drafter: DrafterPlanner) -> list[DraftCost]:
    shape = on.shape(requests, 1, min(on.load.input + on.load.output // 2, on.facts.context))
    plain, costs = sum(on.step(shape).values()), []
    for count in drafter.counts:
        sends = collectives(on.facts, verified(shape, count), on.layout)
        if drafter.is_divided():
            layer = drafter.forward(on.planning.model, on.layout)[0].facts
            sends += collectives(layer, shape, on.layout) * (drafter.tree.max_depth if drafter.tree.is_tree else count)
        work = drafting(on.planning.model, on.layout, shape, count, drafter)
        seconds = sum(on.times(work, sends).values())
        costs.append(DraftCost(count, seconds, seconds / plain))
    return costs
