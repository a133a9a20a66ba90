"""Random numbers as a pure function of (seed, position, token id): a seeded request gives the same tokens whatever runs
beside it.

The mixer is SplitMix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", figure
15).
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_M1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_M2 = -7723592293110705685  # 0x94D049BB133111EB
_PURPOSE = -4417276706812531889  # 0xC2B2AE3D27D4EB4F, the second prime of xxHash: any odd number with no pattern


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 (multiplication wraps; shifts are made logical by masking). In place."""
    x ^= (x >> 30) & 0x3FFFFFFFF
    x *= _M1
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x *= _M2
    x ^= (x >> 31) & 0x1FFFFFFFF
    return x


def exponential(seed_E: Tensor, position_E: Tensor, vocab: int, first: int = 0) -> Tensor:
    """Exp(1) variates, float32 [E, vocab]: that of token id first + v depends on (seed, position, id) only.

    32 random bits each, used as v = (bits + 0.5) / 2^32 and -log1p(-v), which keeps its relative precision near 0,
    where the smallest of many variates (the sampled one) lies.
    """
    key_E = mix(mix(seed_E * _GOLDEN + position_E) + _GOLDEN)
    bits_EV = mix(key_E[:, None] + torch.arange(first, first + vocab, device=seed_E.device) * _GOLDEN)
    uniform_EV = ((bits_EV >> 32) & 0xFFFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform_EV.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def seed_for(seed_E: Tensor, purpose: int) -> Tensor:
    """Seeds for another purpose: their random numbers are independent of those of `seed_E`, and of those for other
    purposes.
    """
    return mix(seed_E + purpose * _PURPOSE)


def uniform(seed_E: Tensor, position_E: Tensor) -> Tensor:
    """One float32 in [0, 1) for each (seed, position), a multiple of 2^-24."""
    bits_E = mix(mix(seed_E * _GOLDEN + position_E) + _GOLDEN)
    return ((bits_E >> 40) & 0xFFFFFF).to(torch.float32).mul_(2.0**-24)
