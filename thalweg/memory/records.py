"""Numbers of the KV cache in e4m3 whose scales are stored beside them: index keys, and records of latents."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.core.kernels import RECORD_TILE
from thalweg.kernels.fp8_block.ref import quantize_rows

LARGEST = 2.0**126  # its code times its scale is finite


def quantize(x_TX: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Parts of `dim` numbers in e4m3, each with the smallest power of two that it fits into (DeepSeek-V3.2's code): →
    (codes [T, X], scales float32 [T, X / dim]). Codes times their scale are exact in bfloat16.
    """
    return quantize_rows(torch.nan_to_num(x_TX.float()).clamp(-LARGEST, LARGEST), dim, True)


def encode_record(x_TD: Tensor, rank: int) -> Tensor:
    """Latents with their rotated keys [T, rank + rope] as bytes [T, 656 of 512 + 64]: `rank` codes, a float32 scale for
    each 128 of them, the key in bfloat16 (FlashMLA's FP8 cache of DeepSeek-V3.2).
    """
    key = torch.nan_to_num(x_TD[:, rank:].to(torch.bfloat16))
    parts = (*quantize(x_TD[:, :rank], min(rank, RECORD_TILE)), key)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def decode_record(stored: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `encode_record`, in `dtype`."""
    tiles = -(-rank // RECORD_TILE)
    codes, scales, key = torch.split(stored, [rank, 4 * tiles, stored.shape[-1] - rank - 4 * tiles], -1)
    parts = codes.view(torch.float8_e4m3fn).float().reshape(*codes.shape[:-1], tiles, -1)
    latent = parts * scales.view(torch.float32).unsqueeze(-1)
    return torch.cat((latent.flatten(-2).to(dtype), key.view(torch.bfloat16).to(dtype)), -1)
