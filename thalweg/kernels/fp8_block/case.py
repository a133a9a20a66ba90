"""Cases of block dequantization: shapes that blocks do and do not divide, scales of any value and of powers of two."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from thalweg.kernels.case import KernelCase, normal, size
from thalweg.kernels.fp8_block.ref import dequantize


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    shapes = (576, 256, (128, 128)), (100, 130, (128, 128)), (40, 50, (16, 12))
    for (rows, columns, block), power_of_two in product(shapes, (False, True)):
        codes = normal(generator, rows, columns).mul_(40).to(torch.float8_e4m3fn)
        scale = normal(generator, -(-rows // block[0]), -(-columns // block[1])).abs() + 0.01
        if power_of_two:
            scale = scale.log2().round().exp2()
        exact = codes.double()
        for i, j in product(range(scale.shape[0]), range(scale.shape[1])):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            exact[at] *= scale[i, j].double()
        yield KernelCase(
            name=f"{rows} x {columns} in {block}{', powers of two' if power_of_two else ''}",
            inputs={"q_NK": codes, "scale_nk": scale, "block": block},
            exact=(exact,),
            tolerance=0.0 if power_of_two else 1e-7,
            flops=rows * columns,
            bytes=size(codes, scale) + 4 * rows * columns,
        )


def run(q_NK: Tensor, scale_nk: Tensor, block: tuple[int, int]) -> tuple[Tensor, ...]:
    return (dequantize(q_NK, scale_nk, block, torch.float32),)


BACKENDS = {"ref": run}
