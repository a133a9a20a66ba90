"""Times of layers, by which pipeline stages are divided."""

from __future__ import annotations

from dataclasses import replace

from thalweg.config.drafters import NO_DRAFTER
from thalweg.config.engine import EngineConfig
from thalweg.config.machines import CHIPS, Hardware
from thalweg.config.model import ModelFacts
from thalweg.launch.planning.draft_cost import DrafterPlanner, drafting
from thalweg.launch.planning.layouts import layout_of
from thalweg.launch.planning.roofline import Ceilings, StepPhase, StepShape, phases, seconds, verified
from thalweg.launch.planning.weights import LayerKind, PlannedModel, layer_kinds, with_layers

# a request, and how many decode together on each attention
PROMPT, OUTPUT, ROWS = 2048, 256, 64


def layer_seconds(facts: ModelFacts, config: EngineConfig, hardware: Hardware | None) -> list[float]:
    """The least time that a request takes in each layer: its prompt, and its part of decode steps. The last layer's
    includes the head and the drafter. config: with the layout and the drafter. hardware: None counts as an H200.
    """
    chip = CHIPS["h200"] if hardware is None else hardware.chip
    top, layout = Ceilings(chip.read, chip.bf16, chip.fp8), replace(layout_of(config), copies=1, pp=1)
    plain, drafts, steps = StepShape(ROWS, 1, PROMPT + OUTPUT), config.num_drafts, OUTPUT / ROWS
    decode, times, head = verified(plain, drafts), dict[LayerKind, float](), list[StepPhase]()
    for kind in set(kinds := layer_kinds(facts)):
        rank, times[kind] = PlannedModel(with_layers(facts, [kind])).on(layout), 0.0
        for shape, count in ((StepShape(1, PROMPT, PROMPT), 1.0), (decode, steps)):
            work = phases(rank, shape)
            head = [phase for phase in work if phase.name == "head"]
            times[kind] += count * (seconds(work, top) - seconds(head, top))
    costs = [times[kind] for kind in kinds]
    costs[-1] += steps * seconds(head, top)
    if config.speculative_algorithm != NO_DRAFTER:
        by = DrafterPlanner(config.speculative_algorithm, drafts, config.speculative_draft_model_path, config.tree)
        model = PlannedModel(facts)
        drafted = seconds(drafting(model, layout, plain, drafts, by), top)
        costs[-1] += steps * (drafted - seconds(phases(model.on(layout), decode), top))
    return costs
