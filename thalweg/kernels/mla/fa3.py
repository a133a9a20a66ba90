"""FlashAttention 3 for latent attention: prefill on expanded latents, each head's key in one piece."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import RaggedRows
from thalweg.kernels.expand_latents.triton import expand_latents, fits
from thalweg.kernels.gqa import fa3
from thalweg.kernels.mla.backends import values_of


def prefill(
    query_THq: Tensor,
    latents_SD: Tensor,
    uk_HnR: Tensor,
    uv_HRv: Tensor,
    rows: RaggedRows,
    *,
    scale: float,
    out_THv: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `backends.MlaPrefillKernel`."""
    (heads, nope, rank), v = uk_HnR.shape, uv_HRv.shape[2]
    expand = expand_latents if fits(heads, nope, v, latents_SD.shape[1] - rank, rank) else _expand_by_products
    key_SHq, value_SHv = expand(latents_SD, uk_HnR, uv_HRv.transpose(1, 2))
    return fa3.prefill(query_THq, key_SHq, value_SHv, rows, scale=scale, out_THv=out_THv)


def _expand_by_products(latents_SD: Tensor, uk_HnR: Tensor, uv_HvR: Tensor) -> tuple[Tensor, Tensor]:
    """As `expand_latents`, by a library's products, which write the keys beside the shared rotated key."""
    heads, nope, rank = uk_HnR.shape
    latent_Sr, rope_Sc = latents_SD[:, :rank], latents_SD[:, rank:]
    key_SHq = latents_SD.new_empty(len(latents_SD), heads, nope + rope_Sc.shape[1])
    every_head = latent_Sr.unsqueeze(0).expand(heads, -1, -1)
    torch.bmm(every_head, uk_HnR.transpose(1, 2), out=key_SHq[..., :nope].transpose(0, 1))
    key_SHq[..., nope:] = rope_Sc.unsqueeze(1)
    return key_SHq, values_of(latent_Sr, uv_HvR)


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case of 192-dim keys and 128-dim values with its definition; RuntimeError if it is wrong."""
    fa3.check(device, CheckCase(heads=4, kv_heads=4, head_dim=192))
