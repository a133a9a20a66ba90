"""Cases of quantising rows, as what the codes say: rows of zeros and of one large value, row counts that 4 does not divide."""

from __future__ import annotations

import importlib.util
from typing import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Case, Run, normal, size
from thalweg.kernels.quantize.ref import quantize


def cases(generator: torch.Generator) -> Iterator[Case]:
    for rows, columns in ((1, 256), (37, 384), (130, 128)):
        x = normal(generator, rows, columns, dtype=torch.bfloat16)
        x[rows // 2] = 0.0
        x[rows - 1, 5] = 3000.0
        groups = x.double().view(rows, columns // 128, 128)
        scale = (groups.abs().amax(-1).clamp_min(1e-4) / 448).float()
        codes = (groups.float() / scale[..., None]).to(torch.float8_e4m3fn)
        yield Case(
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


_GPU = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
BACKENDS: dict[str, Run] = {"ref": run} | ({"triton": run_triton} if _GPU else {})
