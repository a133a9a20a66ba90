"""Scales of an FP8 KV cache, where a checkpoint has measured them."""

from __future__ import annotations

from thalweg.core.errors import CheckpointError
from thalweg.memory.planes import Planes
from thalweg.weights.stream import Stream
from thalweg.weights.table import Table


def read_scales(table: Table, stream: Stream, planes: Planes) -> None:
    """Puts the published scales (a stored number times the scale is the value) into the planes that are FP8; the others keep their 1.

    Raises CheckpointError for one that is no positive number."""
    held = set(stream.names())
    for (name, layer), sources in table.scales.items():
        scale = planes.scale(name, layer)
        source = next((source for source in sources if source in held), None)
        if scale is None or source is None:
            continue
        value = stream.read(source).float().reshape(-1)
        if value.numel() != 1 or not 0 < float(value) < float("inf"):
            raise CheckpointError(f"{source}: {value.tolist()[:4]} is no scale: it must be one positive number")
        scale.copy_(value)
