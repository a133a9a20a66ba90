"""The whole forecast of `thalweg plan`: the resolver's choices, memory, floors by batch and context, and layouts under
a load.
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
from thalweg.launch.planning import memory, processor, search
from thalweg.launch.planning.collectives import Collective, collectives
from thalweg.launch.planning.draft_cost import DrafterPlanner, drafter_planner, drafting
from thalweg.launch.planning.gpu_memory import GpuMemory, slot_bytes
from thalweg.launch.planning.layouts import ONE, ParallelLayout, why_not
from thalweg.launch.planning.roofline import (
    Ceilings,
    KVBytes,
    StepPhase,
    StepShape,
    by_name,
    expected,
    phases,
    seconds,
    verified,
)
from thalweg.launch.planning.search import LayoutForecast, PlanningTarget, Workload
from thalweg.launch.planning.weights import NumberBytes, held
from thalweg.launch.resolve import resolve
from thalweg.launch.resolved import Resolved
from thalweg.launch.resources import unsupported_parallelism
from thalweg.models.catalog import read_facts

INPUT, OUTPUT = 1024, 256  # tokens of a request, where nothing is said
COUNTS = (1, 2, 4, 8, 16, 32)  # of GPUs that are proposed
HELD = 0.85  # of all memory, that weights may be of a machine that is proposed


@dataclass(frozen=True, slots=True)
class Floor:
    """A step at best. batch: requests on the whole machine; new: tokens that each computes; experts: distinct ones that
    a layer reads. phases: seconds by kind, what GPUs send each other among them. work, sends: bytes and FLOPs of one
    GPU, and what it sends. rate: tokens/s of the machine.
    """

    batch: int
    new: int
    context: int
    experts: float
    phases: dict[str, float]
    work: tuple[StepPhase, ...]
    sends: tuple[Collective, ...]
    seconds: float
    rate: float


@dataclass(frozen=True, slots=True)
class DraftCost:
    """A decode step with so many drafts of each request, at best. ratio: of its time to that of a step without, which
    is how many tokens of a request it must bring to pay.
    """

    drafts: int
    seconds: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """facts, resolved: of the model, as one device would run it; where that has not the memory, `alone` says so.
    hardware: None on a CPU, and for GPUs that no figures are known of. top: what a device does at best, None where that
    is not known. room: of one GPU alone, None on a CPU. layout: that the floors are of. laid, gpu: the same as
    `resolved` and `room` of a cache and a GPU of that layout; laid is None where no layout has the memory. contexts:
    lengths that were asked for. outcomes: layouts under the load, the best first. maker: of the drafts, None for
    none.
    """

    facts: ModelFacts
    resolved: Resolved
    alone: str
    hardware: Hardware | None
    machine: Machine
    top: Ceilings | None
    room: GpuMemory | None
    layout: ParallelLayout
    laid: Resolved | None
    gpu: GpuMemory | None
    contexts: tuple[int, ...]
    decode: tuple[Floor, ...]
    prefill: tuple[Floor, ...]
    drafts: tuple[DraftCost, ...]
    drafter: DrafterPlanner | None
    load: Workload
    outcomes: tuple[LayoutForecast, ...]

    @property
    def slots(self) -> float:
        """Bytes of the running requests' state."""
        if self.room is not None:
            return self.room.slots
        engine, drafts = self.resolved.engine, self.resolved.sizes.slot_bytes
        return float(slot_bytes(engine.max_running_requests, engine.context_length, table_entry=8, drafts=drafts))

    @property
    def best(self) -> LayoutForecast | None:
        """The layout that suits the load best, whether this version runs it or not."""
        return next((one for one in self.outcomes if one.fits), None)

    @property
    def runs(self) -> LayoutForecast | None:
        """The best of those that this version runs."""
        return next((one for one in self.outcomes if one.fits and not not_yet(one.layout)), None)


@dataclass(frozen=True, slots=True)
class PlanningInput:
    """What floors are computed from. hardware: None on a CPU, and for GPUs that no figures are known of; top is None
    there.
    """

    hardware: Hardware | None
    top: Ceilings | None
    widths: NumberBytes
    kept: KVBytes


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is made for. hardware: None is this machine. layout: None is the one that suits the load best.
    batches, contexts: of the floors.
    """

    load: Workload
    hardware: Hardware | None = None
    layout: ParallelLayout | None = None
    batches: Sequence[int] = (1, 8, 32, 128)
    contexts: Sequence[int] = (1024, 4096, 16384)


def not_yet(layout: ParallelLayout) -> str:
    """Why this version does not run such a layout; "" where it does."""
    parallel = ParallelOptions(tp_size=layout.tp, dp_size=layout.dp, pp_size=layout.pp, ep_size=layout.ep)
    return unsupported_parallelism(parallel)


def forecast(config: Options, asked: PlanRequest) -> Forecast:
    """Loads nothing. Raises UnsupportedConfig for wishes that cannot be honoured and for a model that the whole machine
    has not the memory for, CheckpointError for a checkpoint that is not there or wrong.
    """
    if asked.hardware is not None and config.load.device == "cpu":
        raise UnsupportedConfig(
            f"--device cpu: of {asked.hardware.name} only the GPUs are known; leave it out, or --machine to plan for"
            " this machine"
        )
    machine = asked.hardware.machine() if asked.hardware is not None else Machine.here()
    # for a machine that is named, layouts are predicted whether this version runs them or not; here, what cannot run is
    # refused
    single = config if asked.hardware is None else dataclasses.replace(config, parallel=ParallelOptions())
    resolved, alone = _resolved(single, machine, asked.hardware is not None)
    facts = read_facts(resolved.path)
    load = _load(asked.load, facts)
    if asked.layout is not None and (why := why_not(facts, asked.layout)):
        raise UnsupportedConfig(f"layout {asked.layout.name}: {why}")
    on_gpu = resolved.engine.device == "cuda"
    hardware = (asked.hardware or hardware_of(machine)) if on_gpu else None
    room = memory.alone(facts, resolved, machine) if on_gpu else None
    if room is not None and not alone and not resolved.engine.num_pages and room.pages < 1:
        alone = (
            f"memory: {format_bytes(round(room.free))} free leave no page for the KV cache beside weights, steps and"
            " graphs"
        )
    ground = _ground(facts, resolved, hardware)
    outcomes = () if room is None else _outcomes(facts, resolved, ground, room, load, asked.layout)
    best = next((one for one in outcomes if one.fits), None)
    layout, gpu = (best.layout, best.room) if best is not None else (ONE, room)
    floors = _Floors(facts, layout, ground, load.skew)
    drafter = drafter_planner(facts, resolved, ground.widths, ground.kept)
    return Forecast(
        facts=facts,
        resolved=resolved if alone or room is None else memory.with_pages(resolved, room, ONE),
        alone=alone,
        hardware=hardware,
        machine=machine,
        top=ground.top,
        room=room,
        layout=layout,
        laid=None if alone and best is None else resolved if gpu is None else memory.with_pages(resolved, gpu, layout),
        gpu=gpu,
        contexts=tuple(asked.contexts),
        decode=tuple(floors.decode(asked.batches, asked.contexts)),
        prefill=tuple(floors.prefill(asked.contexts)),
        drafts=tuple(floors.drafts(load, next((one.requests for one in outcomes), load.concurrency), drafter)),
        drafter=drafter,
        load=load,
        outcomes=outcomes,
    )


def _ground(facts: ModelFacts, resolved: Resolved, hardware: Hardware | None) -> PlanningInput:
    """Of GPUs by their data sheet, of this machine's processor as it is measured."""
    kept = memory.kept(facts, resolved)
    if resolved.engine.device == "cuda":
        top = None
        if hardware is not None:
            top = Ceilings(hardware.chip.read, hardware.chip.bf16, hardware.chip.fp8)
        return PlanningInput(hardware, top, NumberBytes.of(facts), kept)
    measured = processor.measure(resolved.engine.threads)
    return PlanningInput(None, measured, NumberBytes.of(facts, resolved.engine.dtype, dequantized=True), kept)


def _outcomes(
    facts: ModelFacts,
    resolved: Resolved,
    ground: PlanningInput,
    alone: GpuMemory,
    load: Workload,
    only: ParallelLayout | None,
) -> tuple[LayoutForecast, ...]:
    """Of all layouts of GPUs that figures are known of. alone: of one GPU without others."""
    if ground.hardware is None or ground.top is None:
        return ()
    loaded = NumberBytes.of(facts, resolved.engine.dtype, resolved.engine.decode_attention_backend == "reference")

    def room(layout: ParallelLayout) -> GpuMemory:
        return memory.of_layout(facts, resolved, loaded, layout, alone)

    site = PlanningTarget(ground.hardware, ground.top, ground.widths, ground.kept, room)
    return tuple(search.outcomes(facts, site, load, ground.hardware.gpus, only))


def _load(wish: Workload, facts: ModelFacts) -> Workload:
    """The load with lengths, which the model must be able to. Raises UnsupportedConfig."""
    output = wish.output or min(OUTPUT, facts.context // 4)
    load = dataclasses.replace(wish, input=wish.input or min(INPUT, facts.context - output), output=output)
    if load.input + load.output > facts.context:
        raise UnsupportedConfig(
            f"--input-len {load.input} and --output-len {load.output}: {load.input + load.output} tokens, and the model"
            f" has {facts.context}; use shorter ones"
        )
    return load


def _resolved(config: Options, machine: Machine, named: bool) -> tuple[Resolved, str]:
    """As one device would run it, and why it cannot alone: then as if one had the memory of all, since their layouts
    cut the weights. named: whether the machine was, so that another could be.
    """
    try:
        return resolve(config, machine, weights=False), ""
    except InsufficientMemory as error:
        together = dataclasses.replace(machine, gpu_free=machine.gpu_free * len(machine.gpus))
        try:
            if len(machine.gpus) > 1:
                return resolve(config, together, weights=False), str(error)
        except InsufficientMemory as of_all:
            error = of_all
        raise InsufficientMemory(f"{error}{_larger(config, together.gpu_free) if named else ''}") from error


def _larger(config: Options, free: int) -> str:
    """Which of the machines that are known would hold the weights; none is named where they fit into these bytes, and
    something else does not.
    """
    facts = read_facts(locate(config.model.model, config.model.revision, config.model.hf_token).folder)
    weights = sum(held(facts, NumberBytes.of(facts)).values())
    if free * HELD > weights:
        return ""
    found = []
    for chip in CHIPS.values():
        fits = (count for count in COUNTS if chip.memory * count * HELD > weights)
        found += [Hardware(chip, count).name for count in fits][:1]
    return f" (the weights would fit into {', '.join(found)})" if found else ""


class _Floors:
    """Makes them for one layout."""

    def __init__(self, facts: ModelFacts, layout: ParallelLayout, ground: PlanningInput, skew: float) -> None:
        self.facts, self.layout, self.skew = facts, layout, skew
        self.hardware, self.top, self.widths, self.kept = ground.hardware, ground.top, ground.widths, ground.kept

    def decode(self, batches: Sequence[int], contexts: Sequence[int]) -> list[Floor]:
        if self.top is None:
            return []
        return [self._floor(batch, 1, context) for batch in batches for context in self._known(contexts)]

    def prefill(self, contexts: Sequence[int]) -> list[Floor]:
        if self.top is None:
            return []
        return [self._floor(1, context, context) for context in self._known(contexts)]

    def drafts(self, load: Workload, requests: int, made: DrafterPlanner | None) -> list[DraftCost]:
        """Of what makes them, under this load."""
        if self.top is None or made is None or not requests:
            return []
        plain = self._drafted(load, requests, 0, made)
        taken = [(count, self._drafted(load, requests, count, made)) for count in made.counts]
        return [DraftCost(count, step, step / plain) for count, step in taken]

    def _drafted(self, load: Workload, requests: int, count: int, made: DrafterPlanner) -> float:
        assert self.top is not None
        facts, layout = self.facts, self.layout
        active = min(-(-requests // layout.copies), layout.dp)
        rows, context = -(-requests // layout.caches), min(load.input + load.output // 2, facts.context)
        shape = StepShape(rows, 1, context, skew=self.skew, attentions=active)
        work = drafting(facts, shape, count, layout, self.widths, self.kept, made) if count else self._plain(shape)
        taken = seconds(work, self.top)
        if self.hardware is None:
            return taken
        sends = collectives(facts, verified(shape, count), layout)
        if made.forward is not None and made.forward.cut:
            forwards = made.tree.max_depth if made.tree.is_tree and count else count
            sends = [*sends, *collectives(made.forward.facts, shape, layout) * forwards]
        return taken + sum(one.seconds(self.hardware) for one in sends)

    def _plain(self, shape: StepShape) -> list[StepPhase]:
        return phases(self.facts, shape, self.layout, self.widths, self.kept)

    def _known(self, contexts: Sequence[int]) -> list[int]:
        """Those that the model can, or its longest."""
        return [one for one in contexts if one <= self.facts.context] or [self.facts.context]

    def _floor(self, batch: int, new: int, context: int) -> Floor:
        assert self.top is not None
        facts, layout = self.facts, self.layout
        active = min(-(-batch // layout.copies), layout.dp)
        rows = -(-batch // layout.caches)
        shape = StepShape(rows, new, context, skew=self.skew, attentions=active)
        work = phases(facts, shape, layout, self.widths, self.kept)
        sends = collectives(facts, shape, layout) if self.hardware is not None else []
        found = by_name(work, self.top)
        if self.hardware is not None and sends:
            found["sending"] = sum(one.seconds(self.hardware) for one in sends)
        total = sum(found.values())
        experts = 0.0 if facts.moe is None else expected(facts.moe, shape.tokens * active, self.skew)
        return Floor(batch, new, context, experts, found, tuple(work), tuple(sends), total, batch * new / total)
