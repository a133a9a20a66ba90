"""Keys and values made of latents, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def expand_latents(latents_SD: Tensor, uk_HnR: Tensor, uv_HvR: Tensor) -> tuple[Tensor, Tensor]:
    """→ keys [S, H, n + c], the rotated key that all heads share behind each head's own, and values [S, H, v].
    latents_SD: [S, r + c].
    """
    rank = uk_HnR.shape[2]
    own_SHn = torch.einsum("sr,hnr->shn", latents_SD[:, :rank], uk_HnR)
    shared_SHc = latents_SD[:, None, rank:].expand(-1, len(uk_HnR), -1)
    return torch.cat([own_SHn, shared_SHc], -1), torch.einsum("sr,hvr->shv", latents_SD[:, :rank], uv_HvR)
