"""Whether a folder's tensors may replace those of a model that is in use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError

# facts in which another checkpoint of the model may differ: how its weights are published, and what does not depend on
# them
FREE = {"context", "dtype", "bos", "eos", "quantization_config", "nextn"}


def quantization_of(folder: Path, facts: ModelFacts, read: Callable[[Path], ModelFacts]) -> dict[str, Any]:
    """The quantization_config of the tensors in `folder`: its own config.json's, or that of the model in use where it
    has none.

    read: reads a folder's config.json. Raises CheckpointError for a folder that is missing, or whose config.json is
    that of another model.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder on the engine's machine: name one that holds *.safetensors")
    if not (folder / "config.json").exists():
        return facts.quantization_config
    theirs = read(folder)
    ours, other = dataclasses.asdict(facts), dataclasses.asdict(theirs)
    differing = [name for name in ours if name not in FREE and ours[name] != other[name]]
    if differing:
        raise CheckpointError(
            f"{folder / 'config.json'} is of another model: {', '.join(differing)} differ. Weights are replaced, a"
            " model is not: start a server for it"
        )
    return theirs.quantization_config
