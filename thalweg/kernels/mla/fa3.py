"""FlashAttention 3 for latent attention: prefill on expanded latents, each head's key in one piece."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import RaggedRows
from thalweg.kernels.expand_latents.triton import expand_latents
from thalweg.kernels.gqa import fa3


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
    key_SHq, value_SHv = expand_latents(latents_SD, uk_HnR, uv_HRv.transpose(1, 2))
    return fa3.prefill(query_THq, key_SHq, value_SHv, rows, scale=scale, out_THv=out_THv)


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case of 192-dim keys and 128-dim values with its definition; RuntimeError if it is wrong."""
    fa3.check(device, CheckCase(heads=4, kv_heads=4, head_dim=192))
