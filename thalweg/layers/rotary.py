"""Rotary position embedding: frequencies, the table, and the order of dims.

Everything rotates neighbouring pairs, (2j, 2j+1). Checkpoints that rotate halves, (j, j + d/2), have the rows of their
projections reordered as they are loaded (`pairs_from_halves`): dot products are the same, and rotation is one call
everywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thalweg.config.model import RopeFacts


def frequencies(rope: RopeFacts) -> Tensor:
    """float32 [dim / 2]: radians a position, of each pair."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim))
    return {"default": _default, "linear": _linear, "yarn": _yarn, "llama3": _llama3}[rope.kind](rope, plain)


def _default(rope: RopeFacts, plain: Tensor) -> Tensor:
    return plain


def _linear(rope: RopeFacts, plain: Tensor) -> Tensor:
    return plain / rope.factor


def _yarn(rope: RopeFacts, plain: Tensor) -> Tensor:
    """Interpolates slow pairs by the factor and leaves fast ones, with a ramp between (arXiv 2309.00071 §3.2)."""

    def pair_of(rotations: float) -> float:
        return rope.dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _llama3(rope: RopeFacts, plain: Tensor) -> Tensor:
    """Llama 3.1: wavelengths beyond original / low_freq_factor are stretched by the factor, with a ramp up to original
    / high_freq_factor.
    """
    wavelength = 2 * math.pi / plain
    ramp = (rope.original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = ramp.clamp(0, 1)
    return plain / rope.factor * (1 - ramp) + plain * ramp


def mscale(factor: float, weight: float) -> float:
    """YaRN's attention temperature: 0.1 · weight · ln(factor) + 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def amplitude(rope: RopeFacts) -> float:
    """Factor of cos and sin; 1 for every DeepSeek model."""
    if rope.attention_factor:
        return rope.attention_factor
    if rope.kind != "yarn":
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return mscale(rope.factor, 1.0)


def table(rope: RopeFacts, context: int, device: torch.device) -> Tensor:
    """complex64 [context, dim / 2]: what the pairs of a token at each position are multiplied by.

    Angles are float32 products, as in the published code: at position 10^5 a more exact angle would differ by 10^-3
    from what was trained.
    """
    if device.type == "meta":  # a table that is only counted
        return torch.empty(context, rope.dim // 2, dtype=torch.complex64, device=device)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies(rope))
    return torch.polar(torch.full_like(angles, amplitude(rope)), angles).to(device)


def softmax_scale(dim: int, rope: RopeFacts) -> float:
    """dim^-1/2, times YaRN's m² where the model was trained with it (without it V3 is wrong)."""
    m = mscale(rope.factor, rope.mscale_all_dim) if rope.kind != "default" and rope.mscale_all_dim else 1.0
    return float(dim**-0.5 * m * m)


def pairs_from_halves(rows: Tensor, head_dim: int, dim: int) -> Tensor:
    """Reorders the first `dim` rows of each head of a weight, bias or norm: row j → 2j, row j + dim/2 → 2j + 1.
    head_dim: rows of a head.
    """
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    pairs = heads[:, :dim].reshape(len(heads), 2, dim // 2, *rows.shape[1:]).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, heads[:, dim:]], 1).view_as(rows)
