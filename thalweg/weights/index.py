"""The index of a checkpoint of several files. Read without torch, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

from thalweg.core.errors import CheckpointError
from thalweg.core.files import read_object

INDEX = "model.safetensors.index.json"


def read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index. Raises FileNotFoundError, and CheckpointError for a broken one."""
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index}: weight_map must be an object of file names")
    elsewhere = [file for file in where.values() if Path(file).name != file]
    if elsewhere:
        raise CheckpointError(f"{index}: {elsewhere[0]!r} is no name of a file beside it")
    return dict(where)
