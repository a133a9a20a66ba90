"""Cases of grouped-query attention: one and several query heads for a key head, decode and prefill."""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Case, normal, precision, size
from thalweg.kernels.gqa.ref import attend


def cases(generator: torch.Generator) -> Iterator[Case]:
    for rows, queries, heads, kv_heads, keys, dim in (
        (3, 1, 4, 4, 64, 16),
        (2, 1, 8, 2, 192, 32),
        (1, 70, 6, 1, 128, 64),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            q = normal(generator, rows, queries, heads, dim, dtype=dtype)
            key, value = (normal(generator, rows, keys, kv_heads, dim, dtype=dtype) for _ in range(2))
            reach = torch.arange(keys) <= (
                keys - queries - torch.arange(rows)[:, None] + torch.arange(queries)
            ).unsqueeze(-1)
            bias = torch.zeros(reach.shape).masked_fill(~reach, -torch.inf)
            k, v = (t.double().repeat_interleave(heads // kv_heads, 2) for t in (key, value))
            scores = torch.einsum("rqhd,rshd->rhqs", q.double(), k) * dim**-0.5 + bias.double().unsqueeze(1)
            yield Case(
                name=f"{rows} rows, {queries} queries, {heads}/{kv_heads} heads, {keys} keys, {dtype}",
                inputs={"q_RqHd": q, "key_RSKd": key, "value_RSKd": value, "bias_RqS": bias},
                exact=(torch.einsum("rhqs,rshd->rqhd", scores.softmax(-1), v),),
                tolerance=precision(dtype),
                flops=4 * heads * dim * int(reach.sum()),
                bytes=size(q, key, value),
            )


def run(q_RqHd: Tensor, key_RSKd: Tensor, value_RSKd: Tensor, bias_RqS: Tensor) -> tuple[Tensor, ...]:
    return (attend(q_RqHd, key_RSKd, value_RSKd, bias_RqS),)


BACKENDS = {"ref": run}
