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
from thalweg.launch.planning.collectives import Collective, collectives
from thalweg.launch.planning.draft_cost import DrafterPlanner, drafter_planner, drafting
from thalweg.launch.planning.gpu_memory import GpuMemory, gpu_of_layout, single_gpu, slot_bytes, with_pages
from thalweg.launch.planning.layouts import ONE, ParallelLayout, why_not
from thalweg.launch.planning.roofline import (
    Ceilings,
    StepPhase,
    StepShape,
    by_name,
    expected,
    phases,
    seconds,
    verified,
)
from thalweg.launch.planning.search import LayoutForecast, PlanningTarget, Workload
from thalweg.launch.planning.weights import PlannedModel
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved
from thalweg.launch.resources import unsupported_parallelism
from thalweg.models.catalog import read_facts

INPUT, OUTPUT = 1024, 256  # tokens of a request by default
GPU_COUNTS = (1, 2, 4, 8, 16, 32)  # of machines that are suggested
WEIGHTS_SHARE = 0.85  # of all memory, that weights may be on a machine that is suggested


@dataclass(frozen=True, slots=True)
class Floor:
    """A step at best."""

    batch: int  # requests on the whole machine
    new: int  # tokens that each computes
    context: int
    experts: float  # distinct ones that a layer reads
    phases: dict[str, float]  # seconds by kind
    work: tuple[StepPhase, ...]  # of one GPU
    sends: tuple[Collective, ...]
    seconds: float
    rate: float  # tokens a second of the machine


@dataclass(frozen=True, slots=True)
class DraftCost:
    """A decode step with drafts of each request, at best."""

    drafts: int
    seconds: float
    ratio: float  # to a step without: how many tokens a request must gain for drafts to pay


@dataclass(frozen=True, slots=True)
class PlanningInput:
    """What rooflines are computed from."""

    hardware: Hardware | None  # None on a CPU, and for GPUs without figures
    top: Ceilings | None
    model: PlannedModel


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
    facts: ModelFacts
    resolved: Resolved  # as one device would run it
    alone: str  # why one device has not the memory; "" where it has
    hardware: Hardware | None  # None on a CPU, and for GPUs without figures
    machine: Machine
    top: Ceilings | None
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
    def slots(self) -> float:
        """Bytes of the running requests' state."""
        if self.room is not None:
            return self.room.slots
        engine, drafts = self.resolved.engine, self.resolved.sizes.slot_bytes
        return float(slot_bytes(engine.max_running_requests, engine.context_length, table_entry=8, drafts=drafts))

    @property
    def best(self) -> LayoutForecast | None:
        """The layout that serves the load best, whether this version runs it or not."""
        return next((outcome for outcome in self.outcomes if outcome.fits), None)

    @property
    def runs(self) -> LayoutForecast | None:
        """The best of those that this version runs."""
        return next((outcome for outcome in self.outcomes if outcome.fits and not not_yet(outcome.layout)), None)


def not_yet(layout: ParallelLayout) -> str:
    """Why this version does not run such a layout; "" where it does."""
    sizes = ParallelOptions(tp_size=layout.tp, dp_size=layout.dp, pp_size=layout.pp, ep_size=layout.ep)
    return unsupported_parallelism(sizes)


def forecast(options: Options, request: PlanRequest) -> Forecast:
    """Raises UnsupportedConfig for options that cannot be honoured and for a model that is larger than the machine,
    CheckpointError for a checkpoint that is missing or wrong.
    """
    hardware = request.hardware
    if hardware is not None and options.load.device == "cpu":
        raise UnsupportedConfig(
            f"--device cpu: of {hardware.name} only the GPUs are known; leave it out, or --machine to plan for this"
            " machine"
        )
    machine = hardware.machine() if hardware is not None else Machine.here()
    # layouts of a named machine are forecast whether this version runs them or not
    single = options if hardware is None else dataclasses.replace(options, parallel=ParallelOptions())
    resolved, alone = _resolve(single, machine, hardware is not None)
    facts = read_facts(resolved.path)
    load = _with_lengths(request.load, facts)
    if request.layout is not None and (reason := why_not(facts, request.layout)):
        raise UnsupportedConfig(f"layout {request.layout.name}: {reason}")
    on_gpu = resolved.engine.device == "cuda"
    room = single_gpu(facts, resolved, machine) if on_gpu else None
    if room is not None and not alone and not resolved.engine.num_pages and room.pages < 1:
        free = format_bytes(round(room.free))
        alone = f"memory: {free} free leave no page for the KV cache beside weights, steps and graphs"
    planning = _planning_input(facts, resolved, (hardware or hardware_of(machine)) if on_gpu else None)
    outcomes = () if room is None else _outcomes(resolved, planning, room, load, request.layout)
    best = next((outcome for outcome in outcomes if outcome.fits), None)
    layout, gpu = (ONE, room) if best is None else (best.layout, best.room)
    floors = _Floors(layout, planning, load.skew)
    drafter = drafter_planner(facts, resolved)
    requests = next((outcome.requests for outcome in outcomes), load.concurrency)
    laid = resolved if gpu is None else with_pages(resolved, gpu, layout)
    return Forecast(
        facts=facts,
        resolved=resolved if alone or room is None else with_pages(resolved, room, ONE),
        alone=alone,
        hardware=planning.hardware,
        machine=machine,
        top=planning.top,
        room=room,
        layout=layout,
        laid=None if alone and best is None else laid,
        gpu=gpu,
        contexts=tuple(request.contexts),
        decode=tuple(floors.decode(request.batches, request.contexts)),
        prefill=tuple(floors.prefill(request.contexts)),
        drafts=tuple(floors.drafts(load, requests, drafter)),
        drafter=drafter,
        load=load,
        outcomes=outcomes,
    )


def _planning_input(facts: ModelFacts, resolved: Resolved, hardware: Hardware | None) -> PlanningInput:
    """The rates of GPUs are those of the data sheet; this machine's processor is measured."""
    engine = resolved.engine
    is_dequantized = engine.decode_attention_backend == "reference"
    model = PlannedModel(facts, engine.dtype, is_dequantized, engine.kernels)
    if engine.device == "cpu":
        return PlanningInput(None, processor.measure(engine.threads), model)
    chip = None if hardware is None else hardware.chip
    return PlanningInput(hardware, None if chip is None else Ceilings(chip.read, chip.bf16, chip.fp8), model)


def _outcomes(
    resolved: Resolved, planning: PlanningInput, single: GpuMemory, load: Workload, only: ParallelLayout | None
) -> tuple[LayoutForecast, ...]:
    """All layouts of GPUs with figures. single: one GPU without others."""
    hardware, top, model = planning.hardware, planning.top, planning.model
    if hardware is None or top is None:
        return ()

    def memory(layout: ParallelLayout) -> GpuMemory:
        return gpu_of_layout(resolved, model, layout, single)

    return tuple(search.outcomes(PlanningTarget(hardware, top, model, memory), load, hardware.gpus, only))


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
    try:
        return resolve(options, machine, weights=False), ""
    except InsufficientMemory as error:
        together = dataclasses.replace(machine, gpu_free=machine.gpu_free * len(machine.gpus))
        try:
            if len(machine.gpus) > 1:
                return resolve(options, together, weights=False), str(error)
        except InsufficientMemory as of_all:
            error = of_all
        raise InsufficientMemory(f"{error}{_suggestion(options, together.gpu_free) if is_named else ''}") from error


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


class _Floors:
    """The roofline of one layout."""

    def __init__(self, layout: ParallelLayout, planning: PlanningInput, skew: float) -> None:
        self.layout, self.skew, self.facts, self.planned = layout, skew, planning.model.facts, planning.model
        self.hardware, self.top, self.model = planning.hardware, planning.top, planning.model.on(layout)

    def decode(self, batches: Sequence[int], contexts: Sequence[int]) -> list[Floor]:
        contexts = self._known(contexts)
        return [] if self.top is None else [self._floor(batch, 1, context) for batch in batches for context in contexts]

    def prefill(self, contexts: Sequence[int]) -> list[Floor]:
        return [] if self.top is None else [self._floor(1, context, context) for context in self._known(contexts)]

    def drafts(self, load: Workload, requests: int, drafter: DrafterPlanner | None) -> list[DraftCost]:
        if self.top is None or drafter is None or not requests:
            return []
        context = min(load.input + load.output // 2, self.facts.context)
        shape = self._shape(requests, 1, context)
        plain = self._seconds(phases(self.model, shape), collectives(self.facts, shape, self.layout))
        costs = [(count, self._drafted(shape, count, drafter)) for count in drafter.counts]
        return [DraftCost(count, step, step / plain) for count, step in costs]

    def _drafted(self, shape: StepShape, count: int, drafter: DrafterPlanner) -> float:
        work = drafting(self.planned, self.layout, shape, count, drafter)
        sends = collectives(self.facts, verified(shape, count), self.layout)
        if drafter.is_divided():
            forwards = drafter.tree.max_depth if drafter.tree.is_tree else count
            layer = drafter.forward(self.planned, self.layout)[0].facts
            sends = [*sends, *collectives(layer, shape, self.layout) * forwards]
        return self._seconds(work, sends)

    def _seconds(self, work: Sequence[StepPhase], sends: Sequence[Collective]) -> float:
        assert self.top is not None
        sent = 0.0 if self.hardware is None else sum(one.seconds(self.hardware) for one in sends)
        return seconds(work, self.top) + sent

    def _known(self, contexts: Sequence[int]) -> list[int]:
        """Those that the model can have, or its longest."""
        return [context for context in contexts if context <= self.facts.context] or [self.facts.context]

    def _shape(self, requests: int, new: int, context: int) -> StepShape:
        active = min(-(-requests // self.layout.copies), self.layout.dp)
        return StepShape(-(-requests // self.layout.caches), new, context, skew=self.skew, attentions=active)

    def _floor(self, batch: int, new: int, context: int) -> Floor:
        assert self.top is not None
        shape = self._shape(batch, new, context)
        work = phases(self.model, shape)
        sends = [] if self.hardware is None else collectives(self.facts, shape, self.layout)
        times = by_name(work, self.top)
        if self.hardware is not None and sends:
            times["sending"] = sum(one.seconds(self.hardware) for one in sends)
        total, moe = sum(times.values()), self.facts.moe
        experts = 0.0 if moe is None else expected(moe, shape.tokens * shape.attentions, self.skew)
        return Floor(batch, new, context, experts, times, tuple(work), tuple(sends), total, batch * new / total)
