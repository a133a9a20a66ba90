"""Cases of products with codes: every kind, scale type and size of group; few rows and many; a weight that no tile
divides; a residual and a given result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import KernelCase, Operation, draw_tensor, size, with_triton
from thalweg.kernels.gemm.epilogue import Epilogue
from thalweg.kernels.weight_only import ref
from thalweg.kernels.weight_only.ref import FOUR_BITS, Codes

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
# kind, group, type of scales, whether rows have one
WEIGHTS = (
    ("int4", 128, torch.float32, False), ("int4", 32, torch.bfloat16, False), ("int4", 0, None, True),
    ("uint4", 128, torch.float16, False), ("uint4", 64, torch.float16, False), ("e2m1", 16, E4M3, True),
    ("e2m1", 32, E8M0, False), ("int8", 0, None, True), ("int8", 128, torch.float32, False), ("e4m3", 0, None, True),
    ("e4m3", 32, E8M0, False),
)  # fmt: skip
PARTS = ("codes", "scale", "zero", "row")


def draw_weight(
    generator: torch.Generator, shape: tuple[int, ...], kind: str, group: int, scale: torch.dtype | None, has_row: bool
) -> Codes:
    """Random codes whose numbers have a spread of about K^-1/2."""
    *rows, columns = shape
    device = generator.device
    halves = (*rows, columns // 2) if kind in FOUR_BITS else shape
    codes = torch.randint(0, 256, halves, generator=generator, device=device, dtype=torch.uint8)
    spread = {"int4": 4.6, "uint4": 6.5, "e2m1": 2.9, "int8": 74.0, "e4m3": 1.0}[kind] * columns**0.5
    if kind not in FOUR_BITS:
        codes = draw_tensor(generator, *shape, dtype=E4M3) if kind == "e4m3" else codes.view(torch.int8)
    drawn, zero, row = None, None, None
    if scale is not None:
        numbers = torch.rand(*rows, columns // group, generator=generator, device=device) + 0.5
        drawn = (numbers if has_row else numbers / spread).to(scale)
    if kind == "uint4":
        zero = torch.randint(0, 16, (*rows, columns // group), generator=generator, device=device, dtype=torch.uint8)
    if has_row:
        row = (torch.rand(*rows, generator=generator, device=device) + 0.5) / spread
    return Codes(kind, codes, drawn, zero, row)


def _inputs(prefix: str, weight: Codes) -> dict[str, Any]:
    return {f"{prefix}_{part}": tensor for part, tensor in zip(PARTS, weight[1:], strict=True)}


def _weight(kind: str, prefix: str, inputs: dict[str, Any]) -> Codes:
    return Codes(kind, *(inputs.pop(f"{prefix}_{part}") for part in PARTS))


def cases(generator: torch.Generator) -> Iterator[KernelCase]:
    for (kind, group, scale, has_row), rows in product(WEIGHTS, (1, 40)):
        weight = draw_weight(generator, (136, 256), kind, group, scale, has_row)
        x = draw_tensor(generator, rows, 256)
        exact = x.double() @ ref.dequantize(weight, torch.float64).t()
        name = f"{rows} x 136 x 256, {kind} in groups of {group}, {scale}"
        inputs = {"x_MK": x, "kind": kind, **_inputs("w", weight)}
        tensors = [tensor for tensor in inputs.values() if isinstance(tensor, Tensor)]
        case = KernelCase(name, inputs, (exact,), 1e-2, 2 * rows * 136 * 256, size(*tensors) + 2 * rows * 136)
        yield case
        residual = draw_tensor(generator, rows, 136)
        total = (exact + residual.double(),)
        yield replace(case, name=f"{name}, residual", inputs=inputs | {"residual_MN": residual}, exact=total)


def cases_of_experts(generator: torch.Generator) -> Iterator[KernelCase]:
    hidden, experts, topk = 256, 6, 2
    for (kind, group, scale, has_row), tokens in product(WEIGHTS, (2, 30)):
        inner = 128 if group == 128 else 192  # blocks of 64 columns
        stacks = [
            draw_weight(generator, shape, kind, group, scale, has_row)
            for shape in ((experts, 2 * inner, hidden), (experts, hidden, inner))
        ]
        x, out = (draw_tensor(generator, tokens, hidden) for _ in range(2))
        ids = torch.rand(tokens, experts, generator=generator, device=generator.device).topk(topk).indices.int()
        ids[0, 0] = experts  # none
        weights = torch.rand(tokens, topk, generator=generator, device=generator.device)
        exact = out.double()
        w13, w2 = (ref.dequantize(stack, torch.float64) for stack in stacks)
        for token, k in product(range(tokens), range(topk)):
            if (expert := int(ids[token, k])) < experts:
                gate, up = (w13[expert] @ x[token].double()).chunk(2)
                exact[token] += weights[token, k] * (w2[expert] @ (F.silu(gate) * up))
        inputs = {"out_TH": out, "x_TH": x, "ids_TK": ids, "weights_TK": weights, "kind": kind}
        inputs |= {**_inputs("w13", stacks[0]), **_inputs("w2", stacks[1])}
        tensors = [tensor for tensor in inputs.values() if isinstance(tensor, Tensor)]
        name = f"{tokens} tokens, {kind} in groups of {group}, {scale}"
        yield KernelCase(name, inputs, (exact,), 1e-2, 6 * tokens * topk * hidden * inner, size(*tensors))


def run(x_MK: Tensor, kind: str, **given: Any) -> tuple[Tensor, ...]:
    weight = _weight(kind, "w", given)
    return (ref.linear(x_MK, weight, Epilogue(**given)),)


def run_triton(x_MK: Tensor, kind: str, **given: Any) -> tuple[Tensor, ...]:
    from thalweg.kernels.weight_only import triton

    weight = ref.arranged(_weight(kind, "w", given))
    return (triton.linear(x_MK, weight, Epilogue(**given)),)


def run_experts(
    out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, kind: str, **given: Any
) -> tuple[Tensor, ...]:
    stacks = _weight(kind, "w13", given), _weight(kind, "w2", given)
    return (ref.add_experts_(out_TH.float(), x_TH, ids_TK, weights_TK, *stacks),)


def run_experts_triton(
    out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, kind: str, **given: Any
) -> tuple[Tensor, ...]:
    from thalweg.kernels.router.triton import RouterOutput
    from thalweg.kernels.weight_only import triton

    stacks = triton.CodedExperts(*(ref.arranged(_weight(kind, name, given)) for name in ("w13", "w2")))
    triton.run_experts(out_TH, x_TH, RouterOutput(weights_TK, ids_TK), stacks)
    return (out_TH,)


BACKENDS = with_triton(run, run_triton)
EXPERTS = Operation(cases_of_experts, with_triton(run_experts, run_experts_triton))
