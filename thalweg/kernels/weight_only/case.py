"""Cases of products with codes: every kind, scale type and size of group; few rows and many; a weight that no tile
divides; a residual and a given result. Of 8-bit activations: scales of rows, of groups, and static ones.

Their exact result rounds activations as the definition says, by torch's own e4m3, then computes in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.case import KernelCase, Operation, draw_tensor, size, with_triton
from thalweg.kernels.gemm.epilogue import Epilogue
from thalweg.kernels.quantize.ref import Activations
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
# the same with 8-bit activations
EIGHT_BITS = (
    ("int4", 128, torch.float32, False, Activations("e4m3")),
    ("int4", 128, torch.bfloat16, False, Activations("e4m3", is_static=True)),
    ("int4", 0, None, True, Activations("e4m3")),
    ("e4m3", 0, None, True, Activations("e4m3")),
    ("int8", 0, None, True, Activations("int8")),
    ("int8", 128, torch.float32, False, Activations("int8", 128)),
    ("int8", 128, torch.bfloat16, False, Activations("int8")),
)
PARTS = ("codes", "scale", "zero", "row", "activations", "inputs")


def draw_weight(
    generator: torch.Generator, shape: tuple[int, ...], kind: str, group: int, scale: torch.dtype | None, has_row: bool,
    activations: Activations | None = None,
) -> Codes:  # fmt: skip
    """Random codes whose numbers have a spread of about K^-1/2. A static scale of activations cuts the largest."""
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
    is_static = activations is not None and activations.is_static
    inputs = torch.tensor([0.001, 0.004], device=device) if is_static else None
    return Codes(kind, codes, drawn, zero, row, activations, inputs)


def _exact(weight: Codes, x_MK: Tensor) -> Tensor:
    """float64 of what a product with this weight sees of x."""
    rule = weight.activations
    if rule is None:
        return x_MK.double()
    groups = x_MK.float().view(len(x_MK), -1, rule.group or x_MK.shape[1])
    limit = 448.0 if rule.kind == "e4m3" else 127.0
    scale = groups.abs().amax(-1, keepdim=True) / limit if weight.inputs is None else weight.inputs.max()
    codes = (groups / scale).clamp(-limit, limit)
    codes = codes.round() if rule.kind == "int8" else codes.to(E4M3).float()
    return (codes.double() * scale.double()).flatten(-2)


def _inputs(prefix: str, weight: Codes) -> dict[str, Any]:
    return {f"{prefix}_{part}": tensor for part, tensor in zip(PARTS, weight[1:], strict=True)}


def _weight(kind: str, prefix: str, inputs: dict[str, Any]) -> Codes:
    return Codes(kind, *(inputs.pop(f"{prefix}_{part}") for part in PARTS))


def cases(
    generator: torch.Generator, weights: Sequence[Any] = WEIGHTS, counts: Sequence[int] = (1, 40)
) -> Iterator[KernelCase]:
    for (kind, group, scale, has_row, *rule), rows in product(weights, counts):
        weight = draw_weight(generator, (136, 256), kind, group, scale, has_row, *rule)
        x = draw_tensor(generator, rows, 256)
        exact = _exact(weight, x) @ ref.dequantize(weight, torch.float64).t()
        name = f"{rows} x 136 x 256, {kind} in groups of {group}, {scale}{_named(*rule)}"
        inputs = {"x_MK": x, "kind": kind, **_inputs("w", weight)}
        tensors = [tensor for tensor in inputs.values() if isinstance(tensor, Tensor)]
        case = KernelCase(name, inputs, (exact,), 1e-2, 2 * rows * 136 * 256, size(*tensors) + 2 * rows * 136)
        yield case
        residual = draw_tensor(generator, rows, 136)
        total = (exact + residual.double(),)
        yield replace(case, name=f"{name}, residual", inputs=inputs | {"residual_MN": residual}, exact=total)


def _named(rule: Activations | None = None) -> str:
    if rule is None:
        return ""
    return f", {rule.kind} inputs " + ("static" if rule.is_static else f"in groups of {rule.group}")


def cases_of_experts(generator: torch.Generator, weights: Sequence[Any] = WEIGHTS) -> Iterator[KernelCase]:
    experts, topk = 6, 2
    sizes = [(weight, 256, tokens) for weight, tokens in product(weights, (2, 30))]
    # several long steps, and numbers of rows that have tiles of their own
    sizes += [(weight, 768, tokens) for weight in weights if weight[:2] == ("int4", 128) for tokens in (60, 120, 180)]
    many = [weight for weight in weights if weight[0] == "int8" or weight[0] == "e4m3" and len(weight) > 4]
    sizes += [(weight, 256, tokens) for weight in many for tokens in (60, 240, 420)]
    for (kind, group, scale, has_row, *rule), hidden, tokens in sizes:
        inner = 128 if group == 128 or rule else 192  # blocks of 64 columns
        stacks = [
            draw_weight(generator, shape, kind, group, scale, has_row, *rule)
            for shape in ((experts, 2 * inner, hidden), (experts, hidden, inner))
        ]
        x, out = (draw_tensor(generator, tokens, hidden) for _ in range(2))
        ids = torch.rand(tokens, experts, generator=generator, device=generator.device).topk(topk).indices.int()
        ids[0, 0] = experts  # none
        shares = torch.rand(tokens, topk, generator=generator, device=generator.device)
        exact = out.double()
        w13, w2 = (ref.dequantize(stack, torch.float64) for stack in stacks)
        for token, k in product(range(tokens), range(topk)):
            if (expert := int(ids[token, k])) < experts:
                gate, up = (w13[expert] @ _exact(stacks[0], x[token : token + 1])[0]).chunk(2)
                middle = F.silu(gate) * up
                seen = _exact(stacks[1], middle.bfloat16()[None])[0] if rule else middle
                exact[token] += shares[token, k] * (w2[expert] @ seen)
        inputs = {"out_TH": out, "x_TH": x, "ids_TK": ids, "weights_TK": shares, "kind": kind}
        inputs |= {**_inputs("w13", stacks[0]), **_inputs("w2", stacks[1])}
        tensors = [tensor for tensor in inputs.values() if isinstance(tensor, Tensor)]
        name = f"{tokens} tokens, {kind} in groups of {group}, {scale}{_named(*rule)}"
        tolerance = 2e-2 if rule else 1e-2  # a sum in another order moves a code of the inner activations
        yield KernelCase(name, inputs, (exact,), tolerance, 6 * tokens * topk * hidden * inner, size(*tensors))


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
EIGHT_BIT = Operation(partial(cases, weights=EIGHT_BITS, counts=(1, 40, 70, 130)), BACKENDS)
EIGHT_BIT_EXPERTS = Operation(partial(cases_of_experts, weights=EIGHT_BITS), EXPERTS.backends)
