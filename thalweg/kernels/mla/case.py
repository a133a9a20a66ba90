"""Cases of latent attention: absorbed and decompressed from the same inputs must agree, masked keys must not count."""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Case, normal, precision, size
from thalweg.kernels.mla import ref


def cases(generator: torch.Generator) -> Iterator[Case]:
    shapes = ((1, 4, 64, 32, 16, 24, 20), (5, 2, 130, 40, 8, 16, 12), (70, 8, 192, 64, 16, 32, 32))
    for queries, heads, keys, rank, rope, nope, v in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            q = normal(generator, queries, heads, nope + rope, dtype=dtype)
            kv = normal(generator, keys, rank + rope, dtype=dtype)
            uk, uv = (normal(generator, heads, *shape, dtype=dtype) * rank**-0.5 for shape in ((nope, rank), (rank, v)))
            reach = torch.arange(keys) <= (keys - queries + torch.arange(queries)).unsqueeze(1)
            bias, scale = torch.zeros(queries, keys).masked_fill(~reach, -torch.inf), (nope + rope) ** -0.5
            exact = _exact(q.double(), kv.double(), uk.double(), uv.double(), bias.double(), scale)
            yield Case(
                name=f"{queries} queries, {heads} heads, {keys} keys, {dtype}",
                inputs={"q_NHd": q, "kv_KD": kv, "uk_HnR": uk, "uv_HRv": uv, "bias_NK": bias, "scale": scale},
                exact=(exact, exact),
                tolerance=precision(dtype),
                flops=2 * heads * int(reach.sum()) * (2 * rank + rope),
                bytes=size(q, kv, uk, uv),
            )


def _exact(q: Tensor, kv: Tensor, uk: Tensor, uv: Tensor, bias: Tensor, scale: float) -> Tensor:
    """[N, H, v]: keys and values of every head, softmax, sum."""
    heads, nope, rank = uk.shape
    key = torch.cat([torch.einsum("kr,hnr->khn", kv[:, :rank], uk), kv[:, None, rank:].expand(-1, heads, -1)], -1)
    scores = torch.einsum("nhd,khd->nhk", q, key) * scale + bias.unsqueeze(1)
    return torch.einsum("nhk,khv->nhv", scores.softmax(-1), torch.einsum("kr,hrv->khv", kv[:, :rank], uv))


def run(
    q_NHd: Tensor, kv_KD: Tensor, uk_HnR: Tensor, uv_HRv: Tensor, bias_NK: Tensor, scale: float
) -> tuple[Tensor, ...]:
    queries, heads = q_NHd.shape[:2]
    nope, rank = uk_HnR.shape[1:]
    q = torch.cat([torch.einsum("nhd,hdr->nhr", q_NHd[..., :nope], uk_HnR), q_NHd[..., nope:]], -1)
    bias = bias_NK.unsqueeze(1).expand(-1, heads, -1).reshape(1, queries * heads, -1)
    u = ref.absorbed(q.view(1, queries * heads, -1), kv_KD.unsqueeze(0), bias, scale, rank).view(queries, heads, rank)
    key, value = ref.decompress(kv_KD, uk_HnR, uv_HRv)
    plain = ref.attend(q_NHd.transpose(0, 1), key, value, bias_NK, scale).transpose(0, 1)
    return torch.einsum("nhr,hrv->nhv", u, uv_HRv), plain


BACKENDS = {"ref": run}
