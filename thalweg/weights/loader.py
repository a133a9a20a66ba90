"""Walks a table over a stream and accounts for every tensor and every parameter.

Each published tensor is read once, made plain (FP8 gets its scales), transformed and copied into its slice; nothing else is kept. So any
subset can be rewritten into the same storage later, by the same call with `partial`.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor, nn

from thalweg.core.errors import CheckpointError
from thalweg.quant import fp8_block
from thalweg.weights.stream import Stream
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

    Raises CheckpointError naming the tensors that are missing, unknown, of a wrong shape, or FP8 without scales.
    """
    names, rules, parameters = list(stream.names()), table.by_source(), dict(module.named_parameters())
    scales = {fp8_block.scale_name(name) for name in rules}
    _account(names, table, rules, scales, partial)
    written = dict.fromkeys(parameters, 0)
    wanted = [name for name in names if name in rules]
    read_scales: set[str] = set()
    held = set(names)
    with torch.inference_mode():
        for done, name in enumerate(wanted):
            for rule in rules[name]:
                tensor = stream.read(name, rule.take)
                if tensor.dtype in FP8_DTYPES and parameters[rule.target].dtype in FP8_DTYPES:
                    written[f"{rule.target}_scale"] += _keep_scales(name, rule, stream, held, block, parameters)
                    read_scales.add(fp8_block.scale_name(name))
                elif tensor.dtype in FP8_DTYPES:
                    tensor = _dequantized(name, tensor, rule, stream, held, block)
                    read_scales.add(fp8_block.scale_name(name))
                written[rule.target] += _write(parameters, rule, tensor)
            progress(done + 1, len(wanted))
    unread = sorted((scales & held) - read_scales)
    if unread:
        raise CheckpointError(f"scales of tensors that are not FP8: {_list(unread)}")
    if not partial:
        _check_whole(parameters, written)


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


def _dequantized(
    name: str, q: Tensor, rule: Rule, stream: Stream, held: set[str], block: tuple[int, int] | None
) -> Tensor:
    scale = fp8_block.scale_name(name)
    if scale not in held:
        raise CheckpointError(f"{name} is FP8 but {scale} is missing")
    if block is None:
        raise CheckpointError(f"{name} is FP8 but config.json has no quantization_config with weight_block_size")
    first = [part.start or 0 for part in rule.take] + [0, 0]
    return fp8_block.decode(name, q, stream.read(scale), block, (first[0], first[1]))


def _keep_scales(
    name: str,
    rule: Rule,
    stream: Stream,
    held: set[str],
    block: tuple[int, int] | None,
    parameters: dict[str, nn.Parameter],
) -> int:
    """The multipliers of a weight that stays FP8, into their parameter; returns how many they are."""
    scale = fp8_block.scale_name(name)
    if scale not in held:
        raise CheckpointError(f"{name} is FP8 but {scale} is missing")
    if block != fp8_block.KEPT_BLOCK:
        raise CheckpointError(
            f"{name} is FP8 in blocks of {block}; the kernels compute blocks of {fp8_block.KEPT_BLOCK}"
        )
    if rule.transform is not same:
        raise CheckpointError(f"{name} is FP8 and has to be rearranged, which its blocks do not allow")
    target = parameters[f"{rule.target}_scale"].data
    value = stream.read(scale, tuple(_in_blocks(name, part) for part in rule.take))
    into = tuple(part if isinstance(part, int) else _in_blocks(name, part) for part in rule.into)
    view = target[into] if into else target
    if value.shape != view.shape:
        raise CheckpointError(f"{scale}: shape {tuple(value.shape)}, expected {tuple(view.shape)}")
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
