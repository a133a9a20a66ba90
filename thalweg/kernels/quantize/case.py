"""Cases of quantising rows, as what the codes say: rows of zeros and of one large value, row counts that 4 does not
divide.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Run, TimedCase, draw_tensor, normal, size
from thalweg.kernels.launch import supports_triton, triton_available
from thalweg.kernels.quantize.ref import quantize

STEP = 1 / 126  # of the largest code's number: where a quotient is near a tie, either neighbour is right
SHAPES = {"cpu": ((64, 256),), "cuda": ((16, 7168), (4096, 7168))}  # of models: rows, width


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for rows, columns in ((1, 256), (37, 384), (130, 128)):
        x = normal(generator, rows, columns, dtype=torch.bfloat16)
        x[rows // 2] = 0.0
        x[rows - 1, 5] = 3000.0
        groups = x.double().view(rows, columns // 128, 128)
        scale = (groups.abs().amax(-1).clamp_min(1e-4) / 448).float()
        codes = (groups.float() / scale[..., None]).to(torch.float8_e4m3fn)
        yield KernelCase(
            name=f"{rows} x {columns}",
            inputs={"x_MK": x},
            exact=((codes.double() * scale.double()[..., None]).view(rows, columns), scale.double()),
            tolerance=1e-6,
            flops=3 * x.numel(),
            bytes=size(x) + x.numel() + 4 * scale.numel(),
        )


def decoded(codes_MK: Tensor, scale_MG: Tensor) -> tuple[Tensor, ...]:
    """What codes and scales mean, and the scales."""
    return codes_MK.float() * scale_MG.repeat_interleave(128, 1), scale_MG


def run(x_MK: Tensor) -> tuple[Tensor, ...]:
    return decoded(*quantize(x_MK))


def run_triton(x_MK: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.quantize.triton import quantize as on_gpu

    return tuple(each.to(x_MK.device) for each in decoded(*on_gpu(x_MK.cuda())))


def sizes(device: torch.device) -> Iterator[TimedCase]:
    for rows, columns in SHAPES[device.type]:
        yield _sized(rows, columns, device)


def _sized(rows: int, columns: int, device: torch.device) -> TimedCase:
    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        return {"x_MK": draw_tensor(generator, rows, columns)}

    backends: dict[str, Run] = {"ref": lambda x_MK: quantize(x_MK)}
    if supports_triton(device):
        backends["triton"] = _codes
    moved = 3 * rows * columns + 4 * rows * columns // 128
    return TimedCase(
        f"{rows} x {columns}", draw, backends, lambda given: (3 * rows * columns, moved), "float32", STEP, seen
    )


def seen(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Codes by their number in their order, -126 to 126, so that neighbours are 1 apart wherever they lie; and the
    scales.
    """
    codes, scale = results
    bits = codes.view(torch.uint8).to(torch.int16)
    return torch.where(bits > 127, 128 - bits, bits), scale


def _codes(x_MK: Tensor) -> tuple[Tensor, ...]:
    from thalweg.kernels.quantize.triton import quantize as on_gpu

    return on_gpu(x_MK)


BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if triton_available() else {})
