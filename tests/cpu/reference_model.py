"""The empty model of a configuration in plain torch."""

from __future__ import annotations

import torch

from thalweg.attention.selection import Selection, select_top_k
from thalweg.config.model import ModelFacts
from thalweg.layers.reference import ReferenceLayers
from thalweg.models.catalog import assemble, published_dtype
from thalweg.models.decoder import Decoder


def build(
    facts: ModelFacts, dtype: torch.dtype, device: torch.device | str = "cpu", selection: Selection = select_top_k
) -> Decoder:
    """selection: chooses the context under DSA. Raises CheckpointError for an unknown architecture."""
    factory = ReferenceLayers(dtype, torch.device(device), selection=selection, published=published_dtype(facts))
    return assemble(facts, factory)
