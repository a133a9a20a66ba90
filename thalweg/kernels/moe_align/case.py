"""Cases of the sort and of the sum: pairs in one chunk and in several, experts without pairs, tokens without
experts.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import KernelCase, Run, normal, size
from thalweg.kernels.launch import triton_available
from thalweg.kernels.moe_align import ref


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for tokens, columns, experts, hidden in ((1, 4, 16, 40), (70, 3, 300, 64), (500, 2, 8, 24)):
        ids = torch.randint(0, experts, (tokens, columns), generator=generator)
        ids[1:][torch.rand(tokens - 1, generator=generator) < 0.1] = experts
        weights, out = normal(generator, tokens, columns), normal(generator, tokens, hidden)
        y = normal(generator, tokens * columns, hidden)
        y[ids.flatten() == experts] = torch.nan
        by = [pair for expert in range(experts) for pair in (ids.flatten() == expert).nonzero().flatten().tolist()]
        exact = out.double()
        for pair in by:
            exact[pair // columns] += weights.flatten()[pair].double() * y[pair].double()
        yield KernelCase(
            name=f"{tokens} tokens, {columns} of {experts} experts",
            inputs={"ids_TK": ids, "weights_TK": weights, "out_TH": out, "y_PH": y, "experts": experts},
            exact=(torch.tensor(by, dtype=torch.float64) + 1, exact),
            tolerance=1e-6,
            flops=2 * y.numel(),
            bytes=3 * size(ids) + size(weights, y) + 2 * size(out),
        )


def run(ids_TK: Tensor, weights_TK: Tensor, out_TH: Tensor, y_PH: Tensor, experts: int) -> tuple[Tensor, ...]:
    return ref.order(ids_TK, experts) + 1.0, ref.combine_(out_TH, y_PH, ids_TK, weights_TK, experts)


def run_triton(ids_TK: Tensor, weights_TK: Tensor, out_TH: Tensor, y_PH: Tensor, experts: int) -> tuple[Tensor, ...]:
    from thalweg.kernels.moe_align import triton

    ids, weights, out, y = (each.cuda() for each in (ids_TK.int(), weights_TK, out_TH, y_PH))
    by = triton.sort(ids, experts, 16)
    triton.combine(out, y, None, ids, weights, experts)
    return by.order[: int((ids < experts).sum())].to(out_TH.device) + 1.0, out.to(out_TH.device)


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if triton_available() else {})
