"""Walks a table over a stream and accounts for every tensor and every parameter.

Each published tensor is read once, made plain (FP8 gets its scales), transformed and copied into its slice; nothing else is kept. So any
subset can be rewritten into the same storage later, by the same call with `partial`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor, nn

from thalweg.core.errors import CheckpointError
from thalweg.quant import fp8_block
from thalweg.weights.stream import Read, Stream
from thalweg.weights.table import Rule, Table, same

FP8_DTYPES = (torch.float8_e4m3fn,)
Progress = Callable[[int, int], None]  # tensors done, tensors in all
NAMED = 8  # how many names an error lists


def load(
    module: nn.Module,
    table: Table,
    stream: Stream,
    block: tuple[int, int] | None = None,
    progress: Progress = lambda done, total: None,
    partial: bool = False,
) -> None:
    """Fills `module`'s parameters. block: the FP8 block of the checkpoint, None when it has no FP8. partial: some tensors are enough.

    What is read is transformed where the parameters lie. Raises CheckpointError naming the tensors that are missing, unknown, of a wrong shape,
    or FP8 without scales.
    """
    parameters = dict(module.named_parameters())
    loads = plan(parameters, table, stream, block, partial)
    written = dict.fromkeys(parameters, 0)
    arriving = stream.deliver(
        [read for each in loads for one in each for read in one.reads()], next(iter(parameters.values())).device
    )
    with torch.inference_mode():
        for done, each in enumerate(loads):
            for one in each:
                tensor = next(arriving)
                if one.scale is not None:
                    tensor = _scaled(one, tensor, next(arriving), block, parameters, written)
                for rule in one.rules:
                    written[rule.target] += _write(parameters, rule, tensor)
            progress(done + 1, len(loads))
    if not partial:
        _check_whole(parameters, written)


@dataclass(frozen=True, slots=True)
class Load:
    """One read and what becomes of it. scale: of an FP8 weight, read next. kept: whether the weight stays FP8."""

    weight: Read
    rules: list[Rule]
    scale: Read | None = None
    kept: bool = False

    def reads(self) -> list[Read]:
        return [self.weight] if self.scale is None else [self.weight, self.scale]


def plan(
    parameters: dict[str, nn.Parameter], table: Table, stream: Stream, block: tuple[int, int] | None, partial: bool
) -> list[list[Load]]:
    """What `load` reads, for each of the stream's tensors that the model wants; nothing is read yet. Raises CheckpointError for names and
    types that do not fit."""
    names, rules = list(stream.names()), table.by_source()
    scales = {fp8_block.scale_name(name) for name in rules}
    _account(names, table, rules, scales, partial)
    held = set(names)
    loads = [_load(name, rules[name], stream, held, block, parameters) for name in names if name in rules]
    read_scales = {one.scale.name for each in loads for one in each if one.scale is not None}
    unread = sorted((scales & held) - read_scales)
    if unread:
        raise CheckpointError(f"scales of tensors that are not FP8: {_list(unread)}")
    return loads


def _load(
    name: str,
    rules: list[Rule],
    stream: Stream,
    held: set[str],
    block: tuple[int, int] | None,
    parameters: dict[str, nn.Parameter],
) -> list[Load]:
    """The reads of one published tensor: one for each slice that is taken of it, and for each way to keep it."""
    fp8, scale, found = stream.dtype(name) in FP8_DTYPES, fp8_block.scale_name(name), list[Load]()
    if fp8 and scale not in held:
        raise CheckpointError(f"{name} is FP8 but {scale} is missing")
    if fp8 and block is None:
        raise CheckpointError(f"{name} is FP8 but config.json has no quantization_config with weight_block_size")
    for rule in rules:
        there = parameters[rule.target].dtype
        if stream.dtype(name).is_floating_point != there.is_floating_point or (there in FP8_DTYPES and not fp8):
            raise CheckpointError(f"{name}: is {stream.dtype(name)}, and {rule.target} is kept as {there}")
        kept = fp8 and there in FP8_DTYPES
        if kept:
            _check_kept(name, rule, block)
        same_read = next((one for one in found if one.weight.take == rule.take and one.kept == kept), None)
        if same_read is not None:
            same_read.rules.append(rule)
            continue
        blocks = tuple(_in_blocks(name, part) for part in rule.take) if kept else ()
        found.append(Load(Read(name, rule.take), [rule], Read(scale, blocks) if fp8 else None, kept))
    return found


def _check_kept(name: str, rule: Rule, block: tuple[int, int] | None) -> None:
    if block != fp8_block.KEPT_BLOCK:
        raise CheckpointError(
            f"{name} is FP8 in blocks of {block}; the kernels compute blocks of {fp8_block.KEPT_BLOCK}"
        )
    if rule.transform is not same:
        raise CheckpointError(f"{name} is FP8 and has to be rearranged, which its blocks do not allow")


def _scaled(
    one: Load,
    tensor: Tensor,
    scale: Tensor,
    block: tuple[int, int] | None,
    parameters: dict[str, nn.Parameter],
    written: dict[str, int],
) -> Tensor:
    """An FP8 weight with its multipliers: applied, or written into their own parameter where it stays FP8."""
    if one.kept:
        for rule in one.rules:
            written[f"{rule.target}_scale"] += _keep_scales(one.weight.name, rule, scale, parameters)
        return tensor
    assert block is not None, one.weight.name
    first = [part.start or 0 for part in one.weight.take] + [0, 0]
    return fp8_block.decode(one.weight.name, tensor, scale, block, (first[0], first[1]))


def _account(names: list[str], table: Table, rules: dict[str, list[Rule]], scales: set[str], partial: bool) -> None:
    unknown = [name for name in names if name not in rules and name not in scales and not table.skipped(name)]
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors of the checkpoint belong nowhere in this model: {_list(unknown)}"
        )
    held = set(names)
    missing = [name for name in rules if name not in held]
    if missing and not partial:
        raise CheckpointError(f"{len(missing)} tensors are missing from the checkpoint: {_list(missing)}")


def _keep_scales(name: str, rule: Rule, value: Tensor, parameters: dict[str, nn.Parameter]) -> int:
    """The multipliers of a weight that stays FP8, into their parameter; returns how many they are."""
    target = parameters[f"{rule.target}_scale"].data
    into = tuple(part if isinstance(part, int) else _in_blocks(name, part) for part in rule.into)
    view = target[into] if into else target
    if value.shape != view.shape:
        raise CheckpointError(f"{fp8_block.scale_name(name)}: shape {tuple(value.shape)}, expected {tuple(view.shape)}")
    view.copy_(value)
    return view.numel()


def _in_blocks(name: str, part: slice) -> slice:
    """The blocks that these rows or columns are."""
    if part.start is None and part.stop is None:
        return part
    start, size = part.start or 0, fp8_block.KEPT_BLOCK[0]
    if start % size:
        raise CheckpointError(f"{name}: begins at {start}, which is within a block of {size}")
    return slice(start // size, -(-part.stop // size))


def _write(parameters: dict[str, nn.Parameter], rule: Rule, tensor: Tensor) -> int:
    """Copies into the rule's slice; returns how many elements that was."""
    target = parameters[rule.target].data[rule.into] if rule.into else parameters[rule.target].data
    try:
        value = rule.transform(tensor)
    except RuntimeError as error:
        raise CheckpointError(
            f"{rule.source}: shape {tuple(tensor.shape)} does not fit config.json ({error})"
        ) from None
    if value.shape != target.shape:
        raise CheckpointError(
            f"{rule.source}: shape {tuple(tensor.shape)} does not fit config.json: {rule.target} expects {tuple(target.shape)} of it"
        )
    target.copy_(value)
    return target.numel()


def _check_whole(parameters: dict[str, nn.Parameter], written: dict[str, int]) -> None:
    wrong = [
        f"{name} ({written[name]} of {p.numel()} elements)"
        for name, p in parameters.items()
        if written[name] != p.numel()
    ]
    if wrong:
        raise CheckpointError(f"parameters that the checkpoint does not fill exactly once: {_list(wrong)}")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
