"""Scales of an FP8 KV cache, where a checkpoint has measured them."""

from __future__ import annotations

import torch

from thalweg.core.errors import CheckpointError
from thalweg.memory.planes import Planes
from thalweg.quant.scheme import Read
from thalweg.weights.stream import Stream
from thalweg.weights.table import WeightTable


def read_cache_scales(table: WeightTable, stream: Stream, planes: Planes) -> None:
    """Puts the published scales into the FP8 planes: a stored number times the scale is the value. Planes without a
    published scale keep 1.

    Raises CheckpointError for a scale that is not one positive number.
    """
    for (plane, layer), sources in table.cache_scales.items():
        scale = planes.scale(plane, layer)
        source = next((source for source in sources if source in stream.specs), None)
        if scale is None or source is None:
            continue
        value = next(stream.deliver([Read(source)], torch.device("cpu"))).float().reshape(-1)
        if value.numel() != 1 or not 0 < float(value) < float("inf"):
            raise CheckpointError(f"{source}: {value.tolist()[:4]} is no scale: it must be one positive number")
        scale.copy_(value)
