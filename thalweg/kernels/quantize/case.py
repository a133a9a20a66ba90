"""Cases of quantizing rows, compared by the values of the codes: rows of zeros and of one large value, row counts that
4 does not divide, scales of groups, of rows and static ones, which cut what is larger.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from thalweg.kernels.case import Inputs, KernelCase, Operation, TimedCase, draw_tensor, normal, size, with_triton
from thalweg.kernels.quantize.ref import quantize, rounded_rows

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
        exact = (codes.double() * scale.double()[..., None]).view(rows, columns), scale.double()
        cost = 3 * x.numel(), size(x) + x.numel() + 4 * scale.numel()
        yield KernelCase(f"{rows} x {columns}", {"x_MK": x}, exact, 1e-6, *cost)


def decoded(codes_MK: Tensor, scale_MG: Tensor) -> tuple[Tensor, ...]:
    """The values of the codes, and the scales."""
    return codes_MK.float() * scale_MG.repeat_interleave(128, 1), scale_MG


def run(x_MK: Tensor) -> tuple[Tensor, ...]:
    return decoded(*quantize(x_MK))


def run_triton(x_MK: Tensor) -> tuple[Tensor, ...]:
    return decoded(*_codes(x_MK))


def _codes(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    from thalweg.kernels.quantize import triton

    return triton.quantize(x_MK)


def sizes(device: torch.device) -> Iterator[TimedCase]:
    backends = with_triton(quantize, _codes, device)

    def case(rows: int, columns: int) -> TimedCase:
        def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
            return {"x_MK": draw_tensor(generator, rows, columns)}

        cost = 3 * rows * columns, 3 * rows * columns + 4 * rows * columns // 128
        return TimedCase(f"{rows} x {columns}", draw, backends, lambda inputs: cost, "float32", STEP, code_numbers)

    return (case(*shape) for shape in SHAPES[device.type])


def code_numbers(results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Codes by their number in their order, -126 to 126, so that neighbours are 1 apart wherever they lie; and the
    scales.
    """
    codes, scale = results
    bits = codes.view(torch.uint8).to(torch.int16)
    return torch.where(bits > 127, 128 - bits, bits), scale


def cases_of_rows(generator: torch.Generator) -> Iterator[KernelCase]:
    for kind, group, is_static in (("e4m3", 0, False), ("e4m3", 0, True), ("int8", 0, False), ("int8", 128, False)):
        for rows, columns in ((1, 256), (37, 384)):
            x = normal(generator, rows, columns, dtype=torch.bfloat16)
            x[rows // 2, 128:] = 0.0
            x[rows - 1, 5] = 30.0
            inputs = torch.rand(5, 2, generator=generator) * 0.01 if is_static else None
            limit = 127.0 if kind == "int8" else 448.0
            groups = x.float().view(rows, -1, group or columns)
            scale = (groups.abs().amax(-1, keepdim=True) / limit) if inputs is None else inputs.max()
            codes = (groups / scale).nan_to_num().clamp(-limit, limit)
            codes = codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn).float()
            exact = ((codes.double() * scale.double()).flatten(1),)
            given = {"x_MK": x, "kind": kind, "group": group, "inputs": inputs}
            name = f"{rows} x {columns}, {kind} in groups of {group}, static {is_static}"
            yield KernelCase(name, given, exact, 1e-6, 3 * x.numel(), size(x) + x.numel())


def run_rows(x_MK: Tensor, kind: str, group: int, inputs: Tensor | None) -> tuple[Tensor, ...]:
    return (rounded_rows(x_MK.float(), kind, group, inputs),)


def run_rows_triton(x_MK: Tensor, kind: str, group: int, inputs: Tensor | None) -> tuple[Tensor, ...]:
    from thalweg.kernels.quantize import triton

    codes_MK, scales_MG = triton.quantize_rows(x_MK, kind, group, inputs)
    return (codes_MK.float() * scales_MG.repeat_interleave(group or x_MK.shape[1], 1),)


BACKENDS = with_triton(run, run_triton)
ROWS = Operation(cases_of_rows, with_triton(run_rows, run_rows_triton))
