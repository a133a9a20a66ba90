"""How large a model is, measured on an empty copy of it: shapes without storage, so that it takes no weights and no
memory.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import NamedTuple

import torch

from thalweg.config.model import ModelFacts
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.launch.planning.weights import NumberBytes, held, inventory, parameters
from thalweg.launch.resolved import Plane, Sizes
from thalweg.layers.factory import LayerFactory
from thalweg.layers.reference import ReferenceLayers
from thalweg.models import catalog
from thalweg.sampling.catalog import draft_sampling_for
from thalweg.spec.catalog import build_drafter


class DraftSettings(NamedTuple):
    """The part of `config.engine.EngineConfig` that memory depends on: drafter, its folder, acceptance rule, drafts a
    step, tree.
    """

    drafter: str = "NONE"
    folder: str = ""
    rule: str = "race"
    width: int = 0
    tree: TreeShape = CHAIN


NONE = DraftSettings()


def measure(facts: ModelFacts, factory: LayerFactory, drafts: DraftSettings = NONE) -> Sizes:
    """The sizes of the model that is made of these parts, on the meta device, and of what drafts for it, from its own
    folder where it has one. Raises CheckpointError for an architecture that nothing computes.
    """
    model = catalog.assemble(facts, factory)
    draft_sampling = draft_sampling_for(drafts.rule, drafts.width, facts.vocab, factory.device)
    drafting = build_drafter(drafts.drafter, model, drafts.folder, draft_sampling, drafts.tree)
    modules = [one for one in (model, *drafting.modules(), *drafting.own()) if isinstance(one, torch.nn.Module)]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    stored = [*parameters, *(buffer for module in modules for buffer in module.buffers())]
    layers: Counter[str] = Counter()
    page_bytes: Counter[str] = Counter()
    for spec in (*model.planes(), *drafting.planes()):
        layers[spec.name] += 1
        page_bytes[spec.name] += spec.page_bytes
    return Sizes(
        sum(tensor.numel() for tensor in parameters),
        sum(tensor.numel() * tensor.itemsize for tensor in stored),
        tuple(Plane(name, layers[name], page_bytes[name] // PAGE) for name in layers),
        sum(prod(field.shape) * field.dtype.itemsize for field in drafting.fields()) + _nodes(drafts.tree),
    )


def _nodes(tree: TreeShape) -> int:
    """Bytes of the nodes of a tree, but for the root, which every slot has: `nodes_SN3` of `batch.slots.Slots`."""
    return 3 * torch.int64.itemsize * tree.num_drafts * tree.is_tree


def counted(facts: ModelFacts, choice: KernelConfig, dtype: torch.dtype, drafts: DraftSettings = NONE) -> Sizes:
    """The same of a model on a GPU's kernels, by arithmetic: for machines without Triton, which cannot make its parts.
    A drafter's weights are counted as if none were quantized, but those of the checkpoint's own layer as if all were.
    Raises CheckpointError as `measure`.
    """
    reference = ReferenceLayers(dtype, torch.device("meta"), kernels=choice)
    like = measure(facts, reference, drafts)
    drafting = like.parameters - measure(facts, reference).parameters if drafts.drafter != "NONE" else 0
    rotary = 4 * facts.context * facts.rope.dim
    widths = NumberBytes.of(facts, str(dtype).removeprefix("torch."))
    each = widths.quantized + widths.scale if drafts.drafter == "NEXTN" else dtype.itemsize
    weights = sum(held(facts, widths).values()) + drafting * each
    return Sizes(parameters(inventory(facts)) + drafting, round(weights) + rotary, like.planes, like.slot_bytes)
