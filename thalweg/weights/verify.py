"""Whether a folder's tensors fit a model that is in use: everything that `load` would refuse is found before the first of them is written.

It goes by the headers of the files alone. What `plan` refuses is refused here and at a start alike; shapes, which a load finds out tensor by tensor,
are compared here beforehand.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch import nn

from thalweg.config.model import ModelFacts, read_facts
from thalweg.core.errors import CheckpointError
from thalweg.quant.fp8_block import SCALE_DTYPES
from thalweg.weights.loader import Progress, plan
from thalweg.weights.stream import Stream
from thalweg.weights.table import Rule, Table

# facts in which another checkpoint of the model may differ: how its weights are published, and what does not depend on them
FREE = {"context", "dtype", "bos", "eos", "fp8_block", "nextn"}


def verify(
    module: nn.Module,
    table: Table,
    stream: Stream,
    block: tuple[int, int] | None,
    progress: Progress,
    needed: bool = True,
) -> tuple[int, int]:
    """How many of the checkpoint's tensors `stream` has, and how many there are in a whole one; nothing is written. Arguments as of `load`.

    Raises CheckpointError as `load` does with `partial`, and where the stream has none of them, if they are `needed`.
    """
    parameters = dict(module.named_parameters())
    loads = plan(parameters, table, stream, block, partial=True)
    if needed and not loads:
        raise CheckpointError("it holds none of the model's tensors")
    for done, each in enumerate(loads):
        for one in each:
            for rule in one.rules:
                _check_shape(rule, stream.shape(rule.source), parameters)
            if one.scale is not None:
                assert block is not None, "the plan has refused FP8 without a block"
                _check_scale(one.weight.name, one.scale.name, stream, block)
        progress(done + 1, len(loads))
    return len(loads), len(table.by_source())


def _check_shape(rule: Rule, found: tuple[int, ...], parameters: dict[str, nn.Parameter]) -> None:
    """Of what is taken of the tensor; of all of it where its transform makes another shape of that."""
    target = parameters[rule.target].data
    wanted = rule.shape or tuple((target[rule.into] if rule.into else target).shape)
    taken = found
    if not rule.shape and len(rule.take) <= len(found):
        cut = (len(range(*part.indices(size))) for part, size in zip(rule.take, found, strict=False))
        taken = (*cut, *found[len(rule.take) :])
    if taken != wanted:
        raise CheckpointError(
            f"{rule.source}: shape {found} does not fit the model: {rule.target} expects {wanted} of it"
        )


def _check_scale(weight: str, scale: str, stream: Stream, block: tuple[int, int]) -> None:
    wanted = tuple(-(-size // step) for size, step in zip(stream.shape(weight), block, strict=True))
    if stream.shape(scale) != wanted or stream.dtype(scale) not in SCALE_DTYPES:
        raise CheckpointError(
            f"{scale}: {stream.dtype(scale)} {stream.shape(scale)}; {weight} in blocks of {block} needs float32 {wanted}"
        )


def block_of(folder: Path, facts: ModelFacts) -> tuple[int, int] | None:
    """The FP8 block of the tensors in `folder`: its own config.json says, or, where there is none, that of the model in use.

    Raises CheckpointError for a folder that is not there, or whose config.json is that of another model.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder on the engine's machine: name one that holds *.safetensors")
    if not (folder / "config.json").exists():
        return facts.fp8_block
    theirs = read_facts(folder)
    ours, other = dataclasses.asdict(facts), dataclasses.asdict(theirs)
    others = [name for name in ours if name not in FREE and ours[name] != other[name]]
    if others:
        raise CheckpointError(
            f"{folder / 'config.json'} is of another model: {', '.join(others)} differ. Weights are replaced, a model is not: start a server for it"
        )
    return theirs.fp8_block
