"""Cases of packed rows: the tensors that go with tokens to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from thalweg.kernels.case import KernelCase, normal, size, with_triton
from thalweg.kernels.pack_rows import ref

Rows = tuple[Tensor, ...]


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, hidden, choices, has_codes in ((1, 256, 8, True), (5, 384, 9, True), (70, 256, 3, False)):
        device = generator.device
        slots_NK = torch.randint(-1, 300, (rows, choices), generator=generator, device=device, dtype=torch.int32)
        weights_NK, x_NH = normal(generator, rows, choices), normal(generator, rows, hidden, dtype=torch.bfloat16)
        sent: Rows = (slots_NK, weights_NK, x_NH)
        if has_codes:
            scales_GN = normal(generator, hidden // 128, -(-rows // 4) * 4)
            sent = (slots_NK, weights_NK, x_NH.to(torch.float8_e4m3fn), scales_GN[:, :rows].t())
        yield KernelCase(
            name=f"{rows} rows, {hidden} wide, {'codes' if has_codes else 'bf16'}",
            inputs=dict(zip(("slots_NK", "weights_NK", "x_NH", "scales_NG"), sent, strict=False)),
            exact=(ref.packed(sent).double(), *(x.double() for x in sent)),
            tolerance=0.0,
            flops=sum(x.numel() for x in sent),
            bytes=2 * sum(map(size, sent)),
        )


def _there_and_back(kernels: ModuleType, sent: Rows) -> Rows:
    """Raises RuntimeError where the first tensors alone come back otherwise."""
    bytes_NB = kernels.packed(sent)
    back: Rows = kernels.unpacked(bytes_NB, sent)
    if not all(torch.equal(*pair) for pair in zip(kernels.unpacked(bytes_NB, sent[:1]), back, strict=False)):
        raise RuntimeError("the first tensor alone differs")
    return bytes_NB, *(x.float() if x.dtype == torch.float8_e4m3fn else x for x in back)


def run(**sent: Tensor) -> Rows:
    return _there_and_back(ref, tuple(sent.values()))


def run_triton(**sent: Tensor) -> Rows:
    from thalweg.kernels.pack_rows import triton

    return _there_and_back(triton, tuple(sent.values()))


BACKENDS = with_triton(run, run_triton)
