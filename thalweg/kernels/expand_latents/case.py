"""Cases of keys and values made of latents: rows of one token and of more than a tile, many heads, widths that are no
powers of two, strided latents.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.attend import ref
from thalweg.kernels.case import KernelCase, Run, normal, size, tolerance_of
from thalweg.kernels.launch import triton_available


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for tokens, heads, rank, nope, v, rope in (
        (1, 2, 64, 32, 16, 16),
        (200, 3, 128, 64, 64, 32),
        (130, 2, 512, 128, 128, 64),
        (70, 80, 64, 32, 16, 16),
        (5, 3, 64, 48, 24, 8),
    ):
        latents = normal(generator, tokens, 24 + rank + rope, dtype=torch.bfloat16)[:, 24:]
        uk, uv = (normal(generator, heads, width, rank, dtype=torch.bfloat16) * rank**-0.5 for width in (nope, v))
        latent = latents[:, :rank].double()
        key, value = ((latent @ w.double().flatten(0, 1).T).view(tokens, heads, -1) for w in (uk, uv))
        shared = latents[:, None, rank:].double().repeat(1, heads, 1)
        yield KernelCase(
            name=f"{tokens} tokens, {heads} heads, {rank} -> {nope}, {v}",
            inputs={"latents_SD": latents, "uk_HnR": uk, "uv_HvR": uv},
            exact=(torch.cat([key, shared], 2), value),
            tolerance=tolerance_of(torch.bfloat16),
            flops=2 * tokens * heads * (nope + v) * rank,
            bytes=size(latents, uk, uv) + 2 * (key.numel() + shared.numel() + value.numel()),
        )


def run(latents_SD: Tensor, uk_HnR: Tensor, uv_HvR: Tensor) -> tuple[Tensor, ...]:
    key_HSq, value_HSv = ref.expand_latents(latents_SD, uk_HnR, uv_HvR.transpose(1, 2))
    return key_HSq.transpose(0, 1), value_HSv.transpose(0, 1)


def run_triton(latents_SD: Tensor, uk_HnR: Tensor, uv_HvR: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.expand_latents import triton

    expanded = triton.expand_latents(latents_SD.cuda(), uk_HnR.cuda(), uv_HvR.cuda())
    return tuple(x.to(latents_SD.device) for x in expanded)


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if triton_available() else {})
