"""Cases of y = x Wᵀ with FP8 block weights. The exact result leaves activations as they are: rounding them to e4m3 is a
backend's own error.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, size
from thalweg.kernels.fp8_block.ref import dequantize, quantize
from thalweg.kernels.gemm import cublas, deep_gemm, ref
from thalweg.kernels.launch import triton_available

BLOCK = (128, 128)
ROUNDED = 4e-2  # of the largest result: what e4m3 activations alone come to
# of models: (name, outputs, inputs, numbers of rows)
SHAPES = {
    "cpu": (("small", 256, 512, (1, 32)),),
    "cuda": (
        ("v3 down", 2112, 7168, (1, 32, 4096)),
        ("v3 up", 24576, 1536, (1, 32)),
        ("v3 out", 7168, 16384, (1, 32, 128)),
        ("v3 dense gate_up", 36864, 7168, (1, 4096)),
    ),
}


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, n, k, added in ((1, 200, 512, False), (7, 384, 1024, True), (40, 130, 256, False)):
        x = normal(generator, rows, k, dtype=torch.bfloat16)
        codes, scale = quantize(normal(generator, n, k) * k**-0.5, BLOCK, False)
        residual = normal(generator, rows, n, dtype=torch.bfloat16) if added else None
        exact = x.double() @ dequantize(codes, scale, BLOCK, torch.float64).t()
        yield KernelCase(
            name=f"{rows} x {n} x {k}{', residual' if added else ''}",
            inputs={"x_MK": x, "w_NK": codes, "scale_BB": scale, "residual_MN": residual},
            exact=(exact if residual is None else exact + residual.double(),),
            tolerance=ROUNDED,
            flops=2 * rows * n * k,
            bytes=size(x, codes, scale) + 2 * rows * n * (1 + added),
        )


def run(x_MK: Tensor, w_NK: Tensor, scale_BB: Tensor, residual_MN: Tensor | None = None) -> tuple[Tensor, ...]:
    return (ref.linear_fp8(x_MK, w_NK, scale_BB, residual_MN, quantized=False),)


def _by(backend: str) -> Run:
    def run_by(x_MK: Tensor, w_NK: Tensor, scale_BB: Tensor, residual_MN: Tensor | None = None) -> tuple[Tensor, ...]:
        from thalweg.kernels.gemm.fp8 import product

        residual = None if residual_MN is None else residual_MN.cuda()
        return (product(backend)(x_MK.cuda(), w_NK.cuda(), scale_BB.cuda(), residual).to(x_MK.device),)

    return run_by


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for name, n, k, counts in SHAPES[device.type]:
        for rows in counts:
            yield _sized(name, rows, n, k, device)


def _sized(name: str, rows: int, n: int, k: int, device: torch.device) -> TimedCase:
    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        scale = torch.rand(-(-n // 128), k // 128, generator=generator, device=generator.device) * 0.02
        codes = draw_tensor(generator, n, k, dtype=torch.float8_e4m3fn)
        return {"x_MK": draw_tensor(generator, rows, k), "w_NK": codes, "scale_BB": scale}

    backends = {"ref": run}
    if device.type == "cuda":
        backends |= {name: BACKENDS[name] for name in BACKENDS if name != "ref"}
        if triton_available() and deep_gemm.available():
            backends["deep_gemm"] = _by("deep_gemm")
        if triton_available() and torch.cuda.get_device_capability()[0] == 9 and cublas.serves(rows, k):
            backends["cublas"] = _by("cublas")
    moved = n * k + 4 * (-(-n // 128) * (k // 128)) + 2 * rows * (k + n)
    math = "fp8" if device.type == "cuda" else "float32"
    return TimedCase(
        f"{name}, {rows} x {n} x {k}", draw, backends, lambda given: (2 * rows * n * k, moved), math, ROUNDED
    )


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": _by("triton")} if triton_available() else {})
