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
TINY = 2.0**-126


def total_scale(largest: float) -> float:
    """What NVFP4's scales of blocks are multiplied by, for weights up to `largest`."""
    return E4M3_MAX * E2M1_MAX / max(largest, TINY)


def encode(scheme: Scheme, weight: TensorSpec, numbers_NK: Tensor, largest: float) -> tuple[Tensor, ...]:
    """The tensors of `scheme.stored(weight)`, on the device of the numbers, which are float32.

    largest: absolute value among the weights that share a scale of the tensor; NVFP4 alone reads it. Raises
    UnsupportedConfig for a scheme that nothing is written in, and for a weight whose columns no group divides.
    """
    round_to = ROUNDERS.get(type(scheme))
    if round_to is None:
        raise UnsupportedConfig(f"nothing is written as {scheme.name}: it can only be read")
    group = getattr(scheme, "group", 0)
    if group and numbers_NK.shape[1] % group:
        legal = [size for size in (16, 32, 64, 128) if numbers_NK.shape[1] % size == 0]
        raise UnsupportedConfig(
            f"{weight.name} has {numbers_NK.shape[1]} columns, which are no groups of {group}:"
            f" let --group-size be one of {legal}, or leave it out by --ignore"
        )
    return round_to(scheme, numbers_NK, largest)


def _blocks(scheme: Fp8Block, numbers_NK: Tensor, largest: float) -> tuple[Tensor, ...]:
    (rows, columns), shape = scheme.block, numbers_NK.shape
    padded = F.pad(numbers_NK, (0, -shape[1] % columns, 0, -shape[0] % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scale = (tiles.abs().amax((1, 3)) / E4M3_MAX).clamp_min(TINY)
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).view_as(padded)
    return codes[: shape[0], : shape[1]].contiguous(), scale


def _channels(scheme: ScaledCodes, numbers_NK: Tensor, largest: float) -> tuple[Tensor, ...]:
    top = INT8_MAX if scheme.kind == "int8" else E4M3_MAX
    scale = (numbers_NK.abs().amax(1, keepdim=True) / top).clamp_min(TINY)
    scaled = numbers_NK / scale
    return (scaled.round().to(torch.int8) if scheme.kind == "int8" else scaled.to(torch.float8_e4m3fn)), scale


def _pairs(scheme: NibblePairs, numbers_NK: Tensor, largest: float) -> tuple[Tensor, ...]:
    rows, columns = numbers_NK.shape
    grouped = numbers_NK.reshape(rows, -1, scheme.group or columns)
    amax = grouped.abs().amax(2)
    if scheme.kind == "e2m1":
        scale, step, more = _e2m1_scales(scheme, amax, largest)
        codes = _e2m1(grouped / step[..., None])
    else:
        # compressed-tensors spreads 15 steps over twice the largest number; W4AFP8's largest code is 7
        scale = (amax / (7.0 if isinstance(scheme, W4aFp8) else 7.5)).clamp_min(TINY).to(scheme.scale_types[0])
        codes, more = (grouped / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int32) + 8, ()
    flat = codes.flatten(1)
    if scheme.code_types[0] == torch.int32:
        return pack_words(flat, 1), scale, *more
    pairs = (flat[:, ::2] | flat[:, 1::2] << 4).to(torch.uint8)
    return (pairs ^ 0x88 if scheme.is_signed else pairs).view(scheme.code_types[0]), scale, *more


def _e2m1_scales(scheme: NibblePairs, amax: Tensor, largest: float) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The stored scales, the step of each group, and the stored scale of the tensor."""
    if scheme.total:
        total = total_scale(largest)
        scale = (amax / E2M1_MAX * total).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        step = scale.float() / total
        return scale, torch.where(step > 0, step, 1.0), (torch.tensor([total], device=amax.device),)
    # the power of two below the largest number, which is rounded to a code of one bit behind the point first
    power = ((amax.clamp_min(TINY).view(torch.int32) + 0x200000) >> 23) - 127
    exponent = (power - 2).clamp(-127, 127)
    return (exponent + 127).to(torch.uint8), torch.exp2(exponent.float()), ()


def _e2m1(x: Tensor) -> Tensor:
    """int32 codes; halfway cases go to the even code."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.int32)
    for i, bound in enumerate(E2M1_BOUNDS):
        code += (size >= bound) if i % 2 else (size > bound)
    return code + 8 * (x < 0).to(torch.int32)


ROUNDERS: dict[type[Scheme], Callable[[Any, Tensor, float], tuple[Tensor, ...]]] = {
    Fp8Block: _blocks,
    ScaledCodes: _channels,
    NibblePairs: _pairs,
    PackedInts: _pairs,
    W4aFp8: _pairs,
}
