"""Lower bound of the cost of drafts: a step verifies them, and each is a forward pass of the drafter's own weights,
where it has any.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from thalweg.config.drafters import DRAFTERS, NO_DRAFTER, DrafterWeights
from thalweg.config.model import ModelFacts
from thalweg.core.report import AUTO
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.launch.planning.layouts import ONE, ParallelLayout
from thalweg.launch.planning.roofline import StepPhase, StepShape, phases, products, verified
from thalweg.launch.planning.weights import PlannedModel, RankModel, WeightGroup, kv_bytes, with_layers
from thalweg.launch.resolved import Resolved
from thalweg.quant.catalog import Declared
from thalweg.spec.catalog import build_drafter

SUGGESTED = 3  # drafts, where the user asked for none


@dataclass(frozen=True, slots=True)
class DrafterPlanner:
    """A drafter of a planned model."""

    name: str  # in `config.drafters`
    most: int  # drafts of a chain
    folder: str = ""
    tree: TreeShape = CHAIN
    is_asked: bool = True  # else it is one that the checkpoint has, and nobody asked for

    @property
    def title(self) -> str:
        return DRAFTERS[self.name].summary.partition(";")[0]

    @property
    def has_weights(self) -> bool:
        return DRAFTERS[self.name].weights is not DrafterWeights.NONE

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of drafts that are worth comparing: all of a tree, any of a chain."""
        return (self.tree.num_drafts,) if self.tree.is_tree else tuple(range(1, self.most + 1))

    def is_divided(self) -> bool:
        """Whether a layout divides it like the model; else each GPU has all of it."""
        return DRAFTERS[self.name].weights is DrafterWeights.CHECKPOINT

    def forward(self, model: PlannedModel, layout: ParallelLayout) -> tuple[RankModel, tuple[WeightGroup, ...]]:
        """Weights that each draft reads, and those that a step's hidden states read once. Raises CheckpointError."""
        layout = layout if self.is_divided() else ONE
        target: Any = model.headed(layout)
        drafter = build_drafter(self.name, target, self.folder)
        head: Any = (*drafter.modules(), *drafter.own_weight_modules())[0]
        facts: ModelFacts = head.facts
        schemes = None if facts is model.facts else Declared(facts.quantization_config)
        groups = model.groups(head, schemes=schemes)
        if not any(group.phase == "head" for group in groups):
            groups += tuple(group for group in model.groups(target) if group.phase == "head")
        once = tuple(group for group in groups if group.phase == "join" and target.watched)
        if facts is model.facts:  # a layer of the same model
            facts = with_layers(facts, [(True, True)])
        each = tuple(group for group in groups if group not in once)
        return RankModel(facts, layout, each, kv_bytes(head.planes(), facts.layers)), once


def drafter_planner(facts: ModelFacts, resolved: Resolved) -> DrafterPlanner | None:
    """The drafter of this engine. Where the user said nothing and the checkpoint has one, that; else None."""
    engine = resolved.engine
    most = engine.tree.max_depth if engine.tree.is_tree else engine.num_drafts
    if engine.speculative_algorithm != NO_DRAFTER:
        folder = engine.speculative_draft_model_path
        return DrafterPlanner(engine.speculative_algorithm, most, folder, engine.tree)
    decision = engine.report.current()["speculative_algorithm"]
    if decision.source != AUTO or engine.drafter_left_out or not facts.nextn or facts.moe is None:
        return None
    return DrafterPlanner("NEXTN", SUGGESTED, is_asked=False)


def drafting(
    model: PlannedModel, layout: ParallelLayout, shape: StepShape, drafts: int, by: DrafterPlanner
) -> list[StepPhase]:
    """A decode step that verifies drafts and makes as many anew. shape: of the step without."""
    states = verified(shape, drafts)
    verification = phases(model.on(layout), states)
    if not by.has_weights:
        return verification
    rank, once = by.forward(model, layout)
    joined = [products(group, states.tokens, group.read) for group in once]
    forward = phases(rank, shape)
    if not by.tree.is_tree:
        return [*verification, *joined, *(phase.times(drafts) for phase in forward)]
    wide = phases(rank, replace(shape, new=by.tree.branching, scored=True))
    return [*verification, *joined, *forward, *(phase.times(by.tree.max_depth - 1) for phase in wide)]
