"""FP8 weights with one multiplier for each block (DeepSeek-V3 report §3.3): w = q · scale. The tensor is called
`weight_scale_inv` nevertheless.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4  # an all-zero block still gets a scale, as in DeepSeek's reference


def dequantize(q_NK: Tensor, scale_nk: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """→ [N, K] of `dtype`. q_NK: float8_e4m3fn. scale_nk: float32 or float8_e8m0fnu [ceil(N/rows), ceil(K/columns)]."""
    rows, columns = q_NK.shape
    scale = scale_nk.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return q_NK.float().mul_(scale).to(dtype)


def quantize(w_NK: Tensor, block: tuple[int, int], power_of_two: bool) -> tuple[Tensor, Tensor]:
    """→ float8_e4m3fn [N, K] and float32 scales [ceil(N/rows), ceil(K/columns)]. power_of_two rounds scales up to 2^n
    (ue8m0).
    """
    rows, columns = w_NK.shape
    padded = torch.nn.functional.pad(w_NK.float(), (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    scale = scales_of(tiles.abs().amax((1, 3)), power_of_two)
    q = (tiles / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX)
    return q.view_as(padded)[:rows, :columns].contiguous().to(torch.float8_e4m3fn), scale


def quantize_rows(x_TK: Tensor, group: int, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Activations: float8_e4m3fn [T, K] and float32 scales [T, K / group], dynamic, one scale for each token and
    `group` channels.
    """
    return quantize(x_TK, (1, group), power_of_two)


def scales_of(amax: Tensor, power_of_two: bool) -> Tensor:
    """float32 multipliers for these largest magnitudes. An exact power of two stays itself: rounding is on the
    exponent's bits.
    """
    scale = amax.clamp_min(AMAX_FLOOR) / E4M3_MAX
    if not power_of_two:
        return scale
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
