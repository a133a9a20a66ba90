"""Files that say where experts are at the start, in SGLang's form: a dict, as JSON or saved by torch.

`physical_to_logical_map` [layers, slots] has the expert of each slot, rank by rank; `logical_count` [layers, experts],
or one for each of several steps, has tokens by which experts are placed.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thalweg.core.errors import UnsupportedConfig
from thalweg.parallel.eplb import balance

TRIVIAL = "trivial"
MAP, COUNT = "physical_to_logical_map", "logical_count"


class ExpertSizes(NamedTuple):
    layers: int
    experts: int
    slots: int  # of all ranks
    ranks: int
    groups: int  # that are placed together; 1: experts are placed one by one
    nodes: int = 1  # that the ranks are on


def read_expert_location(name: str, sizes: ExpertSizes) -> tuple[tuple[int, ...], ...]:
    """The expert of each slot, for each layer; none for "trivial". Raises UnsupportedConfig that names the file."""
    if name == TRIVIAL:
        return ()
    where, tree = f"init_expert_location: {name}", _read(Path(name))
    key = next((key for key in (MAP, COUNT) if isinstance(tree, dict) and key in tree), None)
    if key is None:
        raise UnsupportedConfig(f"{where} has neither {MAP} nor {COUNT}")
    try:
        numbers = torch.as_tensor(tree[key]).double().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise UnsupportedConfig(f"{where}: {key} is no table of numbers") from None
    if key == COUNT and numbers.dim() == 3:
        numbers = numbers.sum(0)
    shape = sizes.layers, sizes.slots if key == MAP else sizes.experts
    if numbers.shape != shape:
        raise UnsupportedConfig(f"{where}: {key} has shape {list(numbers.shape)}, and this model and layout {[*shape]}")
    if key == COUNT:
        if not (numbers.isfinite() & (numbers >= 0)).all():
            raise UnsupportedConfig(f"{where}: {key} holds what is no number of tokens")
        numbers = balance(numbers, sizes.slots, sizes.groups, sizes.nodes, sizes.ranks).expert_LS
    rows = tuple(tuple(int(number) for number in row) for row in numbers.tolist())
    for layer, row in enumerate(rows):
        if set(row) != set(range(sizes.experts)):
            raise UnsupportedConfig(f"{where}: layer {layer} must have each of {sizes.experts} experts, and no other")
    return rows


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".pt":
            return torch.load(path, map_location="cpu", weights_only=True)
        return json.loads(path.read_text())
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedConfig(f"init_expert_location: {path} cannot be read: {reason}") from None
