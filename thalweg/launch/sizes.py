"""How large a model is, measured on an empty copy of it: shapes without storage, so that it takes no weights and no memory."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import torch

from thalweg.config.model import ModelFacts
from thalweg.core.kernels import KernelChoice
from thalweg.core.plan import PAGE
from thalweg.launch.planning.weights import Widths, held, inventory, parameters
from thalweg.launch.resolved import Plane, Sizes
from thalweg.layers.parts import Parts, ReferenceParts
from thalweg.models import catalog


def measure(facts: ModelFacts, parts: Parts) -> Sizes:
    """The sizes of the model that is made of these parts, on the meta device. Raises CheckpointError for an architecture that nothing computes."""
    model = catalog.assemble(facts, parts)
    assert isinstance(model, torch.nn.Module)
    stored = list(chain(model.parameters(), model.buffers()))
    layers: Counter[str] = Counter()
    page_bytes: Counter[str] = Counter()
    for spec in model.planes():
        layers[spec.name] += 1
        page_bytes[spec.name] += spec.page_bytes
    return Sizes(
        sum(tensor.numel() for tensor in model.parameters()),
        sum(tensor.numel() * tensor.itemsize for tensor in stored),
        tuple(Plane(name, layers[name], page_bytes[name] // PAGE) for name in layers),
    )


def counted(facts: ModelFacts, choice: KernelChoice, dtype: torch.dtype) -> Sizes:
    """The same of a model on a GPU's kernels, by arithmetic: for machines without Triton, which cannot make its parts. Raises CheckpointError as
    `measure`."""
    like = measure(facts, ReferenceParts(dtype, torch.device("meta"), choice=choice))
    rotary = 4 * facts.context * facts.rope.dim
    weights = sum(held(facts, Widths.of(facts, str(dtype).removeprefix("torch."))).values())
    return Sizes(parameters(inventory(facts)), round(weights) + rotary, like.planes)
