"""Multi-head latent attention over gathered latents (DeepSeek-V2 report §2.1).

Letters: N independent query blocks, Q queries of a block over all heads, K keys, r latent dims, D = r + rope, H heads,
q and k tokens. A bias is additive: 0 where a key may be seen, -inf where not; every query sees at least one key.
"""

from __future__ import annotations

import torch
from torch import Tensor


def absorbed(q_NQD: Tensor, kv_NKD: Tensor, bias: Tensor, scale: float, rank: int) -> Tensor:
    """Queries already multiplied by W_UK attend to latents directly: → [N, Q, rank], to be multiplied by W_UV.

    kv_NKD: latent of `rank` dims, then the rotated key. bias: float32, broadcastable to [N, Q, K].
    """
    scores = torch.baddbmm(bias.to(q_NQD.dtype), q_NQD, kv_NKD.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), kv_NKD[..., :rank])


def expand_latents(kv_KD: Tensor, uk_HnR: Tensor, uv_HRv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [H, K, nope + rope] and values [H, K, v] of one context's latents [K, r + rope]."""
    heads, nope, rank = uk_HnR.shape
    latent, rope = kv_KD[:, :rank].expand(heads, -1, -1), kv_KD[:, rank:].expand(heads, -1, -1)
    return torch.cat([torch.bmm(latent, uk_HnR.transpose(1, 2)), rope], -1), torch.bmm(latent, uv_HRv)


def attend(q_Hqd: Tensor, key_HKd: Tensor, value_HKv: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Plain multi-head attention of one context: → [H, q, v]. bias: float32, broadcastable to [H, q, K]."""
    scores = torch.baddbmm(bias.to(q_Hqd.dtype), q_Hqd, key_HKd.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), value_HKv)
