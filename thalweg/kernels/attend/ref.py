"""Attention in plain torch: rotary embedding, attention to gathered keys, latents, index scores, merging of parts.

Letters: N query tokens, B independent query blocks with Q queries each, R rows, q query tokens of a row, S or K context
tokens, H heads, d head dim, v value dim, r latent dims, D = r + rope. A bias is additive: 0 where a key may be seen,
-inf where not; every query sees at least one key, unless its LSE is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor


def rotate_(x_TX: Tensor, cos_sin_T1c: Tensor, first: int, heads: int, dim: int) -> None:
    """Rotary embedding of neighbouring pairs (GPT-J order), in place and in float32: in each of `heads` blocks of `dim`
    columns, of the 2c columns from `first` on, (2j, 2j+1) by cos_sin[..., j].

    x_TX: float32 or bfloat16 [T, X], last stride 1; for float32 row stride, dim and first must be even. cos_sin_T1c:
    complex64 [T, 1, c].
    """
    size = (len(x_TX), heads, cos_sin_T1c.shape[-1], 2)
    pairs = x_TX.as_strided(size, (x_TX.stride(0), dim, 2, 1), x_TX.storage_offset() + first)
    if x_TX.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(cos_sin_T1c)
    else:
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(cos_sin_T1c)))


def attend(q_BQd: Tensor, key_BKd: Tensor, value_BKv: Tensor, bias: Tensor, scale: float) -> Tensor:
    """→ [B, Q, v]. bias: float32, broadcastable to [B, Q, K].

    B are the heads of one context; or rows, with the queries of all heads, for absorbed attention to latents, whose
    first dims are the values (DeepSeek-V2 report §2.1).
    """
    scores = torch.baddbmm(bias.to(q_BQd.dtype), q_BQd, key_BKd.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), value_BKv)


def attend_with_lse(
    q_BQd: Tensor, key_BKd: Tensor, value_BKv: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend`, with the log-sum-exp of each query's scores: → ([B, Q, v], float32 [B, Q]); 0 and -inf for a query that
    sees nothing.
    """
    scores = torch.baddbmm(bias.to(q_BQd.dtype), q_BQd, key_BKd.transpose(1, 2), alpha=scale).float()
    lse = scores.logsumexp(-1)
    weights = (scores - _finite(lse).unsqueeze(-1)).exp()
    return torch.bmm(weights.to(value_BKv.dtype), value_BKv), lse


def attend_grouped(q_RqHd: Tensor, key_RSKd: Tensor, value_RSKd: Tensor, bias_RqS: Tensor) -> Tensor:
    """Grouped-query attention: → [R, q, H, d]; query head h reads key head h // (H / K); scores are scaled by
    d^-1/2.
    """
    out = F.scaled_dot_product_attention(
        q_RqHd.transpose(1, 2),
        key_RSKd.transpose(1, 2),
        value_RSKd.transpose(1, 2),
        attn_mask=bias_RqS.to(q_RqHd.dtype).unsqueeze(1),
        enable_gqa=bool(q_RqHd.shape[2] != key_RSKd.shape[2]),
    )
    return out.transpose(1, 2)


def attend_grouped_with_lse(
    q_RqHd: Tensor, key_RSKd: Tensor, value_RSKd: Tensor, bias_RqS: Tensor
) -> tuple[Tensor, Tensor]:
    """`attend_grouped`, with LSE: → ([R, q, H, d], float32 [R, q, H])."""
    rows, _, heads, dim = q_RqHd.shape
    key, value = (
        x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2).flatten(0, 1) for x in (key_RSKd, value_RSKd)
    )
    bias = bias_RqS.repeat_interleave(heads, 0)
    out, lse = attend_with_lse(q_RqHd.transpose(1, 2).flatten(0, 1), key, value, bias, dim**-0.5)
    out, lse = out.view(rows, heads, *out.shape[1:]), lse.view(rows, heads, -1)
    return out.transpose(1, 2), lse.transpose(1, 2)


def expand_latents(kv_KD: Tensor, uk_HnR: Tensor, uv_HRv: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [H, K, n + rope] and values [H, K, v] of one context's latents; all heads share the rotated key."""
    heads, _, rank = uk_HnR.shape
    latent, rope = kv_KD[:, :rank].expand(heads, -1, -1), kv_KD[:, rank:].expand(heads, -1, -1)
    return torch.cat([torch.bmm(latent, uk_HnR.transpose(1, 2)), rope], -1), torch.bmm(latent, uv_HRv)


def index_scores(q_NHD: Tensor, weights_NH: Tensor, keys_RSD: Tensor, bias_NS: Tensor, scale: float) -> Tensor:
    """Scores of the lightning indexer (DeepSeek-V3.2 report §2.1), I[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s]):
    → float32 [N, S] = bias + scale · I.

    Each row has the same number of consecutive query tokens. weights: float32 of either sign, hence the scores too:
    only -inf masks, 0 does not.
    """
    tokens, heads, dim = q_NHD.shape
    rows = len(keys_RSD)
    queries = q_NHD if rows == tokens else q_NHD.reshape(rows, -1, dim)
    products = torch.bmm(queries, keys_RSD.transpose(1, 2)).relu_()
    if products.dtype != torch.float32:
        products = products.float()
    if rows != tokens:
        products = products.view(tokens, heads, -1)
    return torch.baddbmm(bias_NS.unsqueeze(1), weights_NH.unsqueeze(1), products, alpha=scale).squeeze(1)


def hadamard(x_XD: Tensor) -> Tensor:
    """The last axis times the Hadamard matrix in Sylvester's order and d^-1/2: → float32. d: a power of two."""
    dim, half, y = x_XD.shape[-1], 1, x_XD.float()
    while half < dim:
        a, b = y.view(*x_XD.shape[:-1], -1, 2, half).unbind(-2)
        y, half = torch.stack((a + b, a - b), -2).flatten(-3), 2 * half
    return torch.mul(y, dim**-0.5)


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merges attention to disjoint parts of a context: outs [..., v] and LSE float32 [...] of each part → the same of
    the whole, added in float32 in their order. A part whose LSE is -inf does not count, but must be finite.
    """
    base = _finite(torch.stack(tuple(lses)).amax(0))
    weights = [(lse - base).exp() for lse in lses]
    total = reduce(torch.add, weights)
    shares = ((weight / total.clamp(min=1e-30)).unsqueeze(-1) for weight in weights)
    merged = reduce(torch.add, (out.float() * share for out, share in zip(outs, shares, strict=True)))
    return merged.to(outs[0].dtype), base + total.log()


def _finite(lse: Tensor) -> Tensor:
    """0 in place of -inf."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
