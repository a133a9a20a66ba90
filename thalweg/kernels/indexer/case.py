"""Cases of index scores: weights of both signs, masked context, several query tokens a row."""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.attend.ref import index_scores
from thalweg.kernels.case import KernelCase, normal, size, tolerance_of


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, queries, heads, dim, keys in ((1, 1, 4, 64, 128), (5, 1, 8, 32, 192), (2, 33, 16, 128, 64)):
        for dtype in (torch.float32, torch.bfloat16):
            tokens, scale = rows * queries, (heads * dim) ** -0.5
            q, k = (normal(generator, *dims, dim, dtype=dtype) for dims in ((tokens, heads), (rows, keys)))
            weights = normal(generator, tokens, heads)
            bias = torch.zeros(tokens, keys).masked_fill_(normal(generator, tokens, keys) > 1, -torch.inf)
            products = torch.einsum("rqhd,rsd->rqhs", q.double().view(rows, queries, heads, dim), k.double()).relu()
            exact = torch.einsum("rqh,rqhs->rqs", weights.double().view(rows, queries, heads), products)
            yield KernelCase(
                name=f"{rows} rows, {queries} queries, {heads} heads of {dim}, {keys} keys, {dtype}",
                inputs={"q_NHD": q, "weights_NH": weights, "keys_RSD": k, "bias_NS": bias, "scale": scale},
                exact=(exact.flatten(0, 1) * scale + bias,),
                tolerance=tolerance_of(dtype),
                flops=2 * tokens * heads * keys * (dim + 1),
                bytes=size(q, k, weights) + 4 * tokens * keys,
            )


def run(q_NHD: Tensor, weights_NH: Tensor, keys_RSD: Tensor, bias_NS: Tensor, scale: float) -> tuple[Tensor, ...]:
    return (index_scores(q_NHD, weights_NH, keys_RSD, bias_NS, scale),)


BACKENDS = {"ref": run}
