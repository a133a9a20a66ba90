"""Rounds weights to the codes and scales of a scheme, to nearest: the inverse of its `decode`.

Scales are rounded to their stored type first, so that codes are nearest under the scale that a reader will use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.core.errors import UnsupportedConfig
from thalweg.quant.compressed_tensors import PackedInts
from thalweg.quant.fp8_block import Fp8Block
from thalweg.quant.packing import pack_words
from thalweg.quant.pairs import NibblePairs
from thalweg.quant.scaled import ScaledCodes
from thalweg.quant.scheme import Scheme, TensorSpec
from thalweg.quant.w4afp8 import W4aFp8

E4M3_MAX, E2M1_MAX, INT8_MAX = 448.0, 6.0, 127
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between the codes 0, 0.5, 1, 1.5, 2, 3, 4, 6
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TINY, FLOAT_MAX = 2.0**-126, 2.0**127
GROUP_SIZES = (32, 64, 128)  # of int4
Grouped = NibblePairs | ScaledCodes  # the codes of a row share scales in groups of columns


def total_scale(largest: float) -> float:
    """What NVFP4's scales of blocks are multiplied by, for weights up to `largest`."""
    return min(E4M3_MAX * E2M1_MAX / largest, FLOAT_MAX) if largest > 0 else 1.0


def check_groups(scheme: Scheme, weight: TensorSpec) -> None:
    """Raises UnsupportedConfig for a weight whose columns are no whole groups."""
    group, columns = getattr(scheme, "group", 0), weight.shape[-1]
    if not group or columns % group == 0:
        return
    legal = [size for size in GROUP_SIZES if columns % size == 0] if isinstance(scheme, PackedInts) else []
    smaller = f"let --group-size be one of {legal}, or " if legal else ""
    module = weight.name.removesuffix(".weight")
    raise UnsupportedConfig(
        f"{weight.name} has {columns} columns, which are no whole groups of {group}: {smaller}leave it out by"
        f" --ignore {module}"
    )


def encode(scheme: Scheme, weight: TensorSpec, numbers_NK: Tensor, largest: float) -> tuple[Tensor, ...]:
    """The tensors of `scheme.stored(weight)`, on the device of the numbers, which are float32.

    largest: absolute value among the weights that share a scale of the tensor; NVFP4 alone reads it. Raises
    UnsupportedConfig for a scheme that nothing is written in.
    """
    round_to = ROUNDERS.get(type(scheme))
    if round_to is None:
        raise UnsupportedConfig(f"nothing is written as {scheme.name}: it can only be read")
    return round_to(scheme, numbers_NK, largest)


def _blocks(scheme: Fp8Block, numbers_NK: Tensor, largest: float) -> tuple[Tensor, ...]:
    (rows, columns), shape = scheme.block, numbers_NK.shape
    padded = F.pad(numbers_NK, (0, -shape[1] % columns, 0, -shape[0] % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = _quotient(tiles.abs().amax((1, 3)), E4M3_MAX).clamp_min(TINY)
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).view_as(padded)
    return codes[: shape[0], : shape[1]].contiguous(), scale


def _quotient(numbers: Tensor, by: float) -> Tensor:
    """The same bits on a GPU as on a CPU: there a division by a Python number is a product with its inverse."""
    return numbers / torch.tensor([by], device=numbers.device)


def _grouped(scheme: Grouped, numbers_NK: Tensor, largest: float) -> tuple[Tensor, ...]:
    rows, columns = numbers_NK.shape
    grouped_NGK = numbers_NK.reshape(rows, -1, group_of(scheme, columns))
    stored, steps_NG, more = group_scales(scheme, grouped_NGK.abs().amax(2), largest)
    codes = nearest(scheme, grouped_NGK / steps_NG[..., None])
    return pack(scheme, codes.flatten(1), stored, more)


def group_of(scheme: Grouped, columns: int) -> int:
    """Columns that share a scale."""
    return (scheme.steps[1] if isinstance(scheme, ScaledCodes) else scheme.group) or columns


def group_scales(scheme: Grouped, amax_NG: Tensor, largest: float) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Of groups with these largest numbers: the stored scales, what a code of 1 stands for, and the scale of the tensor
    where there is one.
    """
    if isinstance(scheme, ScaledCodes):
        scale = _quotient(amax_NG, INT8_MAX if scheme.kind == "int8" else E4M3_MAX).clamp_min(TINY)
        return scale, scale, ()
    if scheme.kind == "int4":
        # compressed-tensors spreads 15 steps over twice the largest number; W4AFP8's largest code is 7
        scale = _quotient(amax_NG, 7.0 if isinstance(scheme, W4aFp8) else 7.5).clamp_min(TINY)
        scale = scale.to(scheme.scale_types[0])
        return scale, scale.float(), ()
    if scheme.total:
        total = total_scale(largest)
        scale = (_quotient(amax_NG, E2M1_MAX) * total).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        step = _quotient(scale.float(), total)
        return scale, torch.where(step > 0, step, 1.0), (torch.tensor([total], device=amax_NG.device),)
    # the power of two below the largest number, which is rounded to a code of one bit behind the point first
    power = ((amax_NG.clamp_min(TINY).view(torch.int32) + 0x200000) >> 23) - 127
    exponent = (power - 2).clamp(-127, 127)
    return (exponent + 127).to(torch.uint8), torch.exp2(exponent.float()), ()


def nearest(scheme: Grouped, x: Tensor) -> Tensor:
    """The codes of the levels nearest to x, which is in steps: int32 from 0 to 15, int8, or e4m3."""
    match scheme.kind:
        case "int8":
            return x.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        case "e4m3":
            return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        case "int4":
            return x.round().clamp(-8, 7).to(torch.int32) + 8
    return _e2m1(x)


def levels(scheme: Grouped, codes: Tensor) -> Tensor:
    """What codes stand for, in steps: float32."""
    if scheme.kind in ("int8", "e4m3"):
        return codes.float()
    if scheme.kind == "int4":
        return codes.float() - 8
    return torch.tensor(E2M1_LEVELS, device=codes.device)[codes & 7] * (1 - (codes >> 3) * 2)


def pack(scheme: Grouped, codes_NK: Tensor, scales: Tensor, more: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of `scheme.stored`."""
    if isinstance(scheme, ScaledCodes):
        return codes_NK, scales
    if scheme.code_types[0] == torch.int32:
        return pack_words(codes_NK, 1), scales, *more
    pairs = (codes_NK[:, ::2] | codes_NK[:, 1::2] << 4).to(torch.uint8)
    return (pairs ^ 0x88 if scheme.is_signed else pairs).view(scheme.code_types[0]), scales, *more


def _e2m1(x: Tensor) -> Tensor:
    """int32 codes; halfway cases go to the even code."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.int32)
    for i, bound in enumerate(E2M1_BOUNDS):
        code += (size >= bound) if i % 2 else (size > bound)
    return code + 8 * (x < 0).to(torch.int32)


ROUNDERS: dict[type[Scheme], Callable[[Any, Tensor, float], tuple[Tensor, ...]]] = {
    Fp8Block: _blocks,
    ScaledCodes: _grouped,
    NibblePairs: _grouped,
    PackedInts: _grouped,
    W4aFp8: _grouped,
}
