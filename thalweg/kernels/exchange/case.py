"""Cases of rows between ranks: all ranks on one device, whose kernels run one part after the other, since they would
wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import KernelCase, normal, size, with_triton
from thalweg.kernels.exchange import ref

CALLS = 3  # one after the other, in both sets of buffers
MARKED = 3


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for ranks, rows, width, share in ((2, 1, 256, 1.0), (4, 5, 384, 0.5), (4, 9, 896, 1.0), (2, 17, 512, 0.1)):
        device = generator.device
        x = torch.randint(-(2**31), 2**31 - 1, (ranks, rows, width // 2), generator=generator, device=device)
        goes = torch.rand(ranks, ranks, rows, generator=generator, device=device) < share
        results = normal(generator, ranks, ranks, rows, width, dtype=torch.bfloat16)
        x = x.int()
        yield KernelCase(
            name=f"{ranks} ranks, {rows} rows of {width}, {share:.0%} go",
            inputs={"rows_RNW": x, "goes_RRN": goes, "results_RRNH": results},
            exact=(ref.dispatch(x, goes, MARKED).double(), ref.combine(results.double(), goes).double()),
            tolerance=1e-6,
            flops=round(share * ranks * ranks * rows * width),
            bytes=round(share * (size(x) + size(results))),
        )


def run(rows_RNW: Tensor, goes_RRN: Tensor, results_RRNH: Tensor) -> tuple[Tensor, ...]:
    return ref.dispatch(rows_RNW, goes_RRN, MARKED), ref.combine(results_RRNH, goes_RRN)


def run_triton(rows_RNW: Tensor, goes_RRN: Tensor, results_RRNH: Tensor) -> tuple[Tensor, ...]:
    """The results of the first call. Raises RuntimeError where a later one, with other rows to other ranks, differs
    from the reference, or calls are not counted.
    """
    from thalweg.kernels.exchange import triton

    (ranks, rows, words), device = rows_RNW.shape, rows_RNW.device
    width, every = results_RRNH.shape[-1], range(ranks)

    def memories(words: int) -> list[triton.PeerRows]:
        held = [torch.zeros(ref.bytes_for(ranks, rows, words), dtype=torch.uint8, device=device) for _ in every]
        addresses = [one.data_ptr() for one in held]
        kept.append(held)
        return [triton.PeerRows.of(addresses, rank, device, rows=rows, words=words) for rank in every]

    kept, made = list[list[Tensor]](), list[tuple[Tensor, Tensor]]()
    sending, returning = memories(words), memories(width // 2)
    for call in range(CALLS):
        x, goes, results = rows_RNW + call, goes_RRN.roll(call, 2), results_RRNH * (1 + call)
        to = [triton.Destinations.of(goes[rank]) for rank in every]
        for phase in (triton.SEND, triton.RECEIVE):
            sent = [triton.dispatch(x[rank], to[rank], sending[rank], MARKED, phase) for rank in every]
        for phase in (triton.SEND, triton.RECEIVE):
            back = [triton.combine(results[rank], to[rank], sent[rank][1], returning[rank], phase) for rank in every]
        made.append((torch.stack([rows for rows, _ in sent]), torch.stack(back)))
        if not all(torch.equal(*pair) for pair in zip(made[-1], run(x, goes, results), strict=True)):
            raise RuntimeError(f"call {call} differs")
    calls = {memory.call for memory in (*sending, *returning)}
    if calls != {1 + CALLS} or sending[0].failed.item():
        raise RuntimeError(f"{CALLS} calls end as {calls}, or have waited in vain")
    return made[0]


BACKENDS = with_triton(run, run_triton)
