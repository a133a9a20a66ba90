"""The sizes of a model and its drafter, counted on the meta device: shapes without storage, so no weights are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from torch import nn

from thalweg.config.engine import EngineConfig
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.launch.planning.layouts import ONE, ParallelLayout, layout_of
from thalweg.launch.planning.weights import META, PlannedModel, WeightGroup
from thalweg.launch.resolved import Plane, Sizes
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models import catalog
from thalweg.models.stages import PipelineStage, largest_share, stage_borders
from thalweg.sampling.catalog import draft_sampling_for
from thalweg.spec.catalog import build_drafter
from thalweg.spec.drafter import Drafter


def measure(facts: ModelFacts, config: EngineConfig) -> Sizes:
    """Raises CheckpointError for an architecture that is unknown, or a drafter that is not there, and UnsupportedConfig
    where the layers cannot be divided so.
    """
    layout = replace(layout_of(config), copies=1)
    is_reference, redundant = config.decode_attention_backend == "reference", config.ep_num_redundant_experts
    is_dense_whole = config.moe_dense_tp_size == 1
    planned = PlannedModel(facts, config.dtype, is_reference, config.kernels, redundant, is_dense_whole=is_dense_whole)
    model = catalog.assemble(facts, planned.factory(layout))
    drafter, tree = _build_drafter(facts, config, model), config.tree
    parts = _modules(drafter)
    stages = stage_borders(facts, config.pp_size, config.pp_layer_partition)
    groups, share = _groups(planned, layout, parts), largest_share(facts, stages)
    if layout == ONE and not redundant:
        whole = groups
    else:
        alone = PlannedModel(facts)
        whole = _groups(alone, ONE, _modules(_build_drafter(facts, config, alone.headed())))
    buffers = sum(buffer.nbytes for part in (model, *parts) for buffer in part.buffers())
    layers, page_bytes = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    specs = *_largest_planes(model.planes(), stages), *drafter.planes()
    for spec in specs:
        kind = spec.name, spec.hot > 0
        layers[kind] += 1
        page_bytes[kind] += spec.page_bytes
    hot_bytes = Planes.slot_cost(specs, 0)
    tree_nodes = 3 * 8 * tree.num_drafts * tree.is_tree  # three int64 of each but the root
    return Sizes(
        sum(group.parameters for group in whole),
        round(sum(group.held * (share if group.is_in_layers else 1) for group in groups)) + buffers,
        tuple(Plane(name, count, page_bytes[name, hot] // PAGE, hot) for (name, hot), count in layers.items()),
        sum(prod(field.shape) * field.dtype.itemsize for field in drafter.fields()) + tree_nodes,
        hot_bytes,
        Planes.slot_cost(specs, 1) - hot_bytes,
    )


def _largest_planes(planes: Sequence[PlaneSpec], stages: Sequence[PipelineStage]) -> list[PlaneSpec]:
    """Those of the stage with most bytes."""
    of_stages = ([plane for plane in planes if stage.first <= plane.layer < stage.stop] for stage in stages)
    return max(of_stages, key=lambda some: sum(plane.page_bytes for plane in some))


def _build_drafter(facts: ModelFacts, config: EngineConfig, target: Any) -> Drafter:
    sampling = draft_sampling_for(config.speculative_acceptance, config.num_drafts, facts.vocab, META)
    folder = config.speculative_draft_model_path
    return build_drafter(config.speculative_algorithm, target, folder, sampling, config.tree)


def _modules(drafter: Drafter) -> list[nn.Module]:
    return [part for part in (*drafter.modules(), *drafter.own_weight_modules()) if isinstance(part, nn.Module)]


def _groups(planned: PlannedModel, layout: ParallelLayout, drafter: list[nn.Module]) -> list[WeightGroup]:
    """Of a model and the modules of its drafter."""
    return [*planned.on(layout).groups, *(group for part in drafter for group in planned.groups(part))]
