"""How large a model is, measured on an empty copy of it: shapes without storage, so that it takes no weights and no memory."""

from __future__ import annotations

from collections import Counter

import torch

from thalweg.config.model import ModelFacts
from thalweg.core.kernels import KernelChoice
from thalweg.core.plan import PAGE
from thalweg.launch.planning.weights import Widths, held, inventory, parameters
from thalweg.launch.resolved import Plane, Sizes
from thalweg.layers.parts import Parts, ReferenceParts
from thalweg.models import catalog
from thalweg.spec.catalog import build_drafter


def measure(facts: ModelFacts, parts: Parts, drafter: str = "", folder: str = "") -> Sizes:
    """The sizes of the model that is made of these parts, on the meta device, and of what drafts for it, from its own folder where it has one.
    Raises CheckpointError for an architecture that nothing computes."""
    model = catalog.assemble(facts, parts)
    drafting = build_drafter(drafter, model, folder)
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
    )


def counted(facts: ModelFacts, choice: KernelChoice, dtype: torch.dtype, drafter: str = "", folder: str = "") -> Sizes:
    """The same of a model on a GPU's kernels, by arithmetic: for machines without Triton, which cannot make its parts. A drafter's weights are
    counted as if none were quantized, but those of the checkpoint's own layer as if all were. Raises CheckpointError as `measure`."""
    reference = ReferenceParts(dtype, torch.device("meta"), choice=choice)
    like = measure(facts, reference, drafter, folder)
    drafting = like.parameters - measure(facts, reference).parameters if drafter else 0
    rotary = 4 * facts.context * facts.rope.dim
    widths = Widths.of(facts, str(dtype).removeprefix("torch."))
    each = widths.quantized + widths.scale if drafter == "nextn" else dtype.itemsize
    weights = sum(held(facts, widths).values()) + drafting * each
    return Sizes(parameters(inventory(facts)) + drafting, round(weights) + rotary, like.planes)
