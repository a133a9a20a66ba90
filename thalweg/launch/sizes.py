"""How large a model is, measured on an empty copy of it: shapes without storage, so that it takes no weights and no memory."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import torch

from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.launch.resolved import Plane, Sizes
from thalweg.layers.parts import Parts
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
