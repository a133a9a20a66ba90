"""Cases of y = x Wᵀ with few rows, bf16 or FP8 block weights: one row, whole and partial tiles of rows, weights that no
tile divides, everything that may be added, and a result stored in a given tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import (
    Inputs,
    KernelCase,
    Operation,
    Run,
    TimedCase,
    draw_tensor,
    fp8_weight,
    model_dtype,
    size,
    tolerance_of,
    with_triton,
)
from thalweg.kernels.fp8_block.ref import dequantize
from thalweg.kernels.gemm import cublas, deep_gemm, ref
from thalweg.kernels.gemm.epilogue import Epilogue
from thalweg.kernels.gemm.prefetch import reader
from thalweg.kernels.launch import triton_available

E4M3 = torch.float8_e4m3fn
ROUNDED = 4e-2  # of the largest result: the error of e4m3 activations alone
# of models: (name, outputs, inputs, numbers of rows)
Product = tuple[int, int, int]  # rows, outputs, inputs
Shapes = dict[str, tuple[tuple[str, int, int, tuple[int, ...]], ...]]
SHAPES: Shapes = {
    "cpu": (("tiny down", 336, 256, (1, 4, 64)), ("tiny head", 2048, 256, (1, 4, 64))),
    "cuda": (
        ("v2-lite down", 3648, 2048, (1, 16, 4096)),
        ("v2-lite out", 2048, 2048, (1, 16)),
        ("v2-lite head", 102400, 2048, (1, 32)),
        ("qwen2.5-7b gate_up", 37888, 3584, (1, 32, 4096)),
    ),
}
SHAPES_FP8: Shapes = {
    "cpu": (("small", 256, 512, (1, 32)),),
    "cuda": (
        ("v3 down", 2112, 7168, (1, 32, 4096)),
        ("v3 up", 24576, 1536, (1, 32)),
        ("v3 out", 7168, 16384, (1, 32, 128)),
        ("v3 dense gate_up", 36864, 7168, (1, 4096)),
    ),
}
ADDED = ("bias_N", "residual_MN")


def draw_product(generator: torch.Generator, shape: Product, dtype: torch.dtype) -> Inputs:
    """dtype: of the weight."""
    rows, n, k = shape
    if dtype == E4M3:
        codes, scale = fp8_weight(generator, n, k)
        return {"x_MK": draw_tensor(generator, rows, k), "w_NK": codes, "scale_BB": scale}
    x, w = (draw_tensor(generator, count, k, dtype=dtype) for count in (rows, n))
    return {"x_MK": x, "w_NK": w.mul_(k**-0.5)}


def product_case(
    generator: torch.Generator, shape: Product, given: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16
) -> KernelCase:
    """given: which of bias_N, residual_MN and out_MN the product gets. The exact result of an FP8 product leaves
    activations as they are: rounding them to e4m3 is a backend's own error.
    """
    (rows, n, k), inputs = shape, draw_product(generator, shape, dtype)
    weight = inputs["w_NK"].double()
    if dtype == E4M3:
        weight = dequantize(inputs["w_NK"], inputs["scale_BB"], ref.BLOCK, torch.float64)
    exact, read = inputs["x_MK"].double() @ weight.t(), size(*inputs.values())
    for name in given:
        inputs[name] = draw_tensor(generator, *((n,) if name == "bias_N" else (rows, n)))
        if name != "out_MN":
            exact += inputs[name].double()
    return KernelCase(
        name=", ".join((f"{rows} x {n} x {k}", *(name.split("_")[0] for name in given))),
        inputs=inputs,
        exact=(exact,),
        tolerance=ROUNDED if dtype == E4M3 else tolerance_of(torch.bfloat16),
        flops=2 * rows * n * k,
        bytes=read + 2 * rows * n * (1 + ("residual_MN" in given)),
    )


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for shape in ((1, 200, 2048), (8, 72, 1024), (11, 130, 1536), (40, 64, 512), (33, 96, 384)):
        for given in ((), ADDED, ("out_MN",)):
            yield product_case(generator, shape, given)


def cases_fp8(generator: torch.Generator) -> Iterator[KernelCase]:
    for shape in ((1, 200, 512), (7, 384, 1024), (40, 130, 256)):
        for given in ((), ("residual_MN",), ("out_MN",)):
            yield product_case(generator, shape, given, E4M3)


def run(x_MK: Tensor, w_NK: Tensor, **given: Any) -> tuple[Tensor, ...]:
    return (ref.linear(x_MK, w_NK, Epilogue(**given)),)


def run_fp8(x_MK: Tensor, w_NK: Tensor, scale_BB: Tensor, **given: Any) -> tuple[Tensor, ...]:
    return (ref.linear_fp8(x_MK, w_NK, scale_BB, Epilogue(**given)),)


def run_triton(x_MK: Tensor, w_NK: Tensor, **given: Any) -> tuple[Tensor, ...]:
    from thalweg.kernels.gemm import triton

    return (triton.linear(x_MK, w_NK, Epilogue(**given)),)


def run_fp8_backend(backend: str) -> Run:
    def run_backend(x_MK: Tensor, w_NK: Tensor, scale_BB: Tensor, **given: Any) -> tuple[Tensor, ...]:
        from thalweg.kernels.gemm.fp8 import product

        return (product(backend)(x_MK, w_NK, scale_BB, Epilogue(**given)),)

    return run_backend


def _timed(
    shapes: Shapes, device: torch.device, dtype: torch.dtype, backends: Callable[[int, int], dict[str, Run]]
) -> Iterator[TimedCase]:
    """dtype: of the weights. backends: by rows and inputs."""
    is_fp8 = dtype == E4M3
    math = "float32" if device.type == "cpu" else "fp8" if is_fp8 else "bf16"

    def case(name: str, rows: int, n: int, k: int) -> TimedCase:
        weight = n * k + 4 * (-(-n // 128) * (k // 128)) if is_fp8 else n * k * dtype.itemsize
        cost = 2 * rows * n * k, weight + rows * (k + n) * (2 if is_fp8 else dtype.itemsize)
        return TimedCase(
            name=f"{name}, {rows} x {n} x {k}",
            draw=lambda generator, before: draw_product(generator, (rows, n, k), dtype),
            backends=backends(rows, k),
            cost=lambda inputs: cost,
            math=math,
            tolerance=ROUNDED if is_fp8 else 2e-2,
        )

    return (case(name, rows, n, k) for name, n, k, counts in shapes[device.type] for rows in counts)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    def backends(rows: int, k: int) -> dict[str, Run]:
        if device.type == "cpu":
            return {"ref": run, "mkl": _library, "mkl, read ahead": _read_ahead}
        own = {"triton": run_triton} if triton_available() and rows <= 64 else {}
        return {"ref": run, "cublas": _library} | own

    return _timed(SHAPES, device, model_dtype(device), backends)


def sizes_fp8(device: torch.device) -> Iterator[TimedCase]:
    def backends(rows: int, k: int) -> dict[str, Run]:
        served = {"ref": run_fp8}
        if device.type == "cuda" and triton_available():
            served["triton"] = run_fp8_backend("triton")
            if deep_gemm.available():
                served["deep_gemm"] = run_fp8_backend("deep_gemm")
            if torch.cuda.get_device_capability()[0] == 9 and cublas.serves(rows, k):
                served["cublas"] = run_fp8_backend("cublas")
        return served

    return _timed(SHAPES_FP8, device, E4M3, backends)


def _library(x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, ...]:
    return (F.linear(x_MK, w_NK),)


def _read_ahead(x_MK: Tensor, w_NK: Tensor) -> tuple[Tensor, ...]:
    """As the layers of a CPU do: see `prefetch.py`."""
    reader(2)(w_NK)
    return (F.linear(x_MK, w_NK),)


BACKENDS = with_triton(run, run_triton)
FP8 = Operation(cases_fp8, with_triton(run_fp8, run_fp8_backend("triton")), sizes_fp8)
