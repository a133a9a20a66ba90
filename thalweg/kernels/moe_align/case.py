"""Cases of the sort and of the sum: pairs in one chunk and in several, experts without pairs, tokens without experts, a
sum that is stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import KernelCase, normal, size, with_triton
from thalweg.kernels.moe_align import ref


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for tokens, columns, experts, hidden, accumulate in (
        (1, 4, 16, 40, True),
        (70, 3, 300, 64, True),
        (500, 2, 8, 24, True),
        (70, 3, 8, 24, False),
    ):
        ids = torch.randint(0, experts, (tokens, columns), generator=generator)
        ids[1:][torch.rand(tokens - 1, generator=generator) < 0.1] = experts
        weights, out = normal(generator, tokens, columns), normal(generator, tokens, hidden)
        y = normal(generator, tokens * columns, hidden)
        y[ids.flatten() == experts] = torch.nan
        pairs = [pair for expert in range(experts) for pair in (ids.flatten() == expert).nonzero().flatten().tolist()]
        exact = out.double() if accumulate else torch.zeros_like(out, dtype=torch.float64)
        for pair in pairs:
            exact[pair // columns] += weights.flatten()[pair].double() * y[pair].double()
        inputs = {"ids_TK": ids, "weights_TK": weights, "out_TH": out, "y_PH": y}
        yield KernelCase(
            name=f"{tokens} tokens, {columns} of {experts} experts{', stored' * (not accumulate)}",
            inputs=inputs | {"experts": experts, "accumulate": accumulate},
            exact=(torch.tensor(pairs, dtype=torch.float64) + 1, exact),
            tolerance=1e-6,
            flops=2 * y.numel(),
            bytes=3 * size(ids) + size(weights, y) + 2 * size(out),
        )


def run(
    ids_TK: Tensor, weights_TK: Tensor, out_TH: Tensor, y_PH: Tensor, experts: int, accumulate: bool
) -> tuple[Tensor, ...]:
    start = out_TH if accumulate else out_TH.zero_()
    return ref.order(ids_TK, experts) + 1.0, ref.combine_(start, y_PH, ids_TK, weights_TK, experts)


def run_triton(
    ids_TK: Tensor, weights_TK: Tensor, out_TH: Tensor, y_PH: Tensor, experts: int, accumulate: bool
) -> tuple[Tensor, ...]:
    from thalweg.kernels.moe_align import triton

    ids = ids_TK.int()
    by = triton.sort(ids, experts, 16)
    triton.combine(out_TH, y_PH, None, ids, weights_TK, experts, accumulate)
    return by.pair[: int((ids < experts).sum())] + 1.0, out_TH


BACKENDS = with_triton(run, run_triton)
