"""Cases of the sum over ranks: all ranks on one device, whose kernels run one part after the other, since they would
wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from thalweg.kernels.all_reduce.ref import add_norm
from thalweg.kernels.case import KernelCase, normal, size, tolerance_of, with_triton

EPS = 1e-6
CALLS = 3  # one after the other, in both sets of buffers


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for ranks, rows, width in ((2, 1, 256), (4, 3, 384), (4, 9, 896), (2, 17, 512)):
        partials = normal(generator, ranks, rows, width, dtype=torch.bfloat16)
        x, weight = normal(generator, rows, width, dtype=torch.bfloat16), normal(generator, width)
        total = x.double() + partials.double().sum(0)
        exact = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        yield KernelCase(
            name=f"{ranks} ranks, {rows} rows of {width}",
            inputs={"partials_WTH": partials, "x_TH": x, "weight_H": weight},
            exact=(total, exact),
            tolerance=2 * tolerance_of(torch.bfloat16),
            flops=(ranks + 6) * rows * width,
            bytes=size(partials) + 3 * size(x) + size(weight),
        )


def run(partials_WTH: Tensor, x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, ...]:
    return add_norm(partials_WTH, x_TH, weight_H, EPS)[:2]


def run_triton(partials_WTH: Tensor, x_TH: Tensor, weight_H: Tensor) -> tuple[Tensor, ...]:
    """Raises RuntimeError where ranks, or one-shot and two-shot, end with different bits."""
    from thalweg.kernels.all_reduce import triton

    (ranks, rows, width), device = partials_WTH.shape, x_TH.device
    memory = [torch.zeros(triton.bytes_for(ranks, rows, width), dtype=torch.uint8, device=device) for _ in range(ranks)]
    addresses = [one.data_ptr() for one in memory]
    buffers = [triton.PeerBuffers.of(addresses, rank, device, rows=rows, width=width) for rank in range(ranks)]
    add, results = partial(triton.add_norm, x_TH=x_TH, weight_H=weight_H, eps=EPS), []
    for call in range(CALLS):
        two_shot = call % 2 == 1
        for phase in (triton.SEND, triton.ADD, triton.RECEIVE) if two_shot else (triton.SEND, triton.RECEIVE):
            every = [
                add(mine, buffers=own, two_shot=two_shot, phase=phase)[:2]
                for mine, own in zip(partials_WTH, buffers, strict=True)
            ]
        results += every
    if not all(torch.equal(mine, first) for one in results for mine, first in zip(one, results[0], strict=True)):
        raise RuntimeError("ranks have different bits")
    return results[0]


BACKENDS = with_triton(run, run_triton)
