"""INT8 products and experts of DeepSeek-V3's size on one GPU, beside those of other libraries that are installed.

    python benchmarks/gpu/int8_peers.py
    PYTHONPATH=. TRITON_INTERPRET=1 python benchmarks/gpu/int8_peers.py --tiny

Weights have a scale for each row, and activations one for each token (W8A8). Products: our kernel, `torch._int_mm`
(cuBLASLt) and humming-kernels. Experts: our kernels, vLLM's and SGLang's. A library that is not installed is left out;
one whose call fails, as SGLang's may outside its server, is named under `failed`. Each result is compared with plain
torch in float64 first. Writes $OUT/int8_peers.json (OUT: the current folder if unset). Times are as in `moe.py`; what
quantizes x counts, except for "torch._int_mm alone", which is the product of codes without any scale: a bound for what
a backend of it could reach. Without a GPU there are checks and no times.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from moe import COPIES, Log, ceilings, error, timed
from torch import Tensor

from thalweg.kernels.experts.backends import coded_runner
from thalweg.kernels.quantize.ref import Activations
from thalweg.kernels.quantize.triton import quantize_rows
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.weight_only import case, ref
from thalweg.kernels.weight_only import triton as kernels
from thalweg.kernels.weight_only.ref import Codes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INT8 = "int8", 0, None, True, Activations("int8")  # of `case.draw_weight`: a scale for each row, INT8 activations
MOST_ERROR = 2e-2  # of max |exact|; a sum in another order moves a code of the inner activations
AGAIN = 4e-2  # for a library that rounds the weight to INT8 by itself
SMALLEST = 17  # rows that torch._int_mm multiplies on a GPU


@dataclass(frozen=True)
class Size:
    """outputs, inputs: of the product. experts, choices: all of them, and those of a token, with the shared one."""

    outputs: int
    inputs: int
    experts: int
    choices: int
    hidden: int
    inner: int


V3 = Size(7168, 16384, 257, 9, 7168, 2048)
TINY = Size(128, 256, 5, 2, 128, 64)
Product = Callable[[Tensor], Tensor]  # x [M, K] → y [M, N]
Experts = Callable[[Tensor, RouterOutput], Tensor]  # x [T, H] → y [T, H]


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def own_product(weight: Codes) -> Product:
    held = ref.arranged(weight)
    return lambda x: kernels.linear(x, held)


def _int_mm(codes_MK: Tensor, weight: Codes) -> Tensor:
    """int32 [M, N], with rows of zeros where there are too few."""
    rows = len(codes_MK)
    padded = codes_MK if rows >= SMALLEST else torch.nn.functional.pad(codes_MK, (0, 0, 0, 32 - rows))
    return torch._int_mm(padded, weight.codes.t())[:rows]


def torch_product(weight: Codes) -> Product:
    assert weight.row is not None
    row_N = weight.row

    def multiply(x: Tensor) -> Tensor:
        codes, scale = quantize_rows(x, "int8")
        return (_int_mm(codes, weight) * scale * row_N).to(x.dtype)

    return multiply


def humming_product(weight: Codes) -> Product:
    """It rounds the dequantized weight again, with scales of its own."""
    from humming.layer import HummingLayer

    rows, columns = weight.codes.shape
    activations = {"dtype": "int8", "quant_mode": "dynamic_token"}
    layer = HummingLayer(rows, columns, {"dtype": "int8"}, activations, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_unquantized(ref.dequantize(weight))
    layer.transform()
    return lambda x: layer(x)


def own_experts(w13: Codes, w2: Codes) -> Experts:
    run, stacks = coded_runner(), kernels.CodedExperts(ref.arranged(w13), ref.arranged(w2))

    def call(x: Tensor, routed: RouterOutput) -> Tensor:
        out = torch.empty_like(x)
        run(out, x, routed, stacks, False)
        return out

    return call


def vllm_experts(w13: Codes, w2: Codes) -> Experts:
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import int8_w8a8_moe_quant_config

    scales = [stack.row[..., None] for stack in (w13, w2)]
    config = int8_w8a8_moe_quant_config(*scales, a1_scale=None, a2_scale=None, per_act_token_quant=True)
    weights = {"w1": w13.codes, "w2": w2.codes, "quant_config": config}
    return lambda x, routed: fused_experts(
        hidden_states=x, topk_weights=routed.weights_TK, topk_ids=routed.ids_TK, **weights
    )


def sglang_experts(w13: Codes, w2: Codes) -> Experts:
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts

    scales = {"w1_scale": w13.row[..., None], "w2_scale": w2.row[..., None]}
    config = MoeRunnerConfig(inplace=False)
    return lambda x, routed: fused_experts(
        x, w13.codes, w2.codes, (routed.weights_TK, routed.ids_TK, None), config,
        use_int8_w8a8=True, per_channel_quant=True, **scales,
    )  # fmt: skip


PRODUCTS: dict[str, Callable[[Codes], Product]] = {
    "own": own_product,
    "torch._int_mm": torch_product,
    **({"humming": humming_product} if is_installed("humming") else {}),
}
EXPERTS: dict[str, Callable[[Codes, Codes], Experts]] = {
    "own": own_experts,
    **({"vllm": vllm_experts} if is_installed("vllm") else {}),
    **({"sglang": sglang_experts} if is_installed("sglang") else {}),
}


def draw_codes(*shape: int) -> Codes:
    return case.draw_weight(torch.Generator(DEVICE).manual_seed(1), shape, *INT8)


def draw_routing(tokens: int, size: Size) -> RouterOutput:
    ids = torch.rand(tokens, size.experts, device=DEVICE).topk(size.choices).indices.int()
    return RouterOutput(torch.rand(tokens, size.choices, device=DEVICE), ids)


def draw_rows(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=DEVICE).bfloat16()


def checked(got: Tensor, exact: Tensor, name: str) -> dict[str, Any]:
    found = error(got, exact)
    if found > (AGAIN if name == "humming" else MOST_ERROR):
        raise AssertionError(f"error {found}")
    return {"error": found}


def check_product(name: str, rows: int, size: Size) -> dict[str, Any]:
    weight, x = draw_codes(size.outputs, size.inputs), draw_rows(rows, size.inputs)
    exact = weight.rounded(x.float()).double() @ ref.dequantize(weight, torch.float64).t()
    return checked(PRODUCTS[name](weight)(x), exact, name)


def check_experts(name: str, tokens: int, size: Size) -> dict[str, Any]:
    """With six experts at most: plain torch holds them in float64."""
    few = Size(size.outputs, size.inputs, min(size.experts, 6), min(size.choices, 3), size.hidden, size.inner)
    stacks = draw_codes(few.experts, 2 * few.inner, few.hidden), draw_codes(few.experts, few.hidden, few.inner)
    x, routed = draw_rows(tokens, few.hidden), draw_routing(tokens, few)
    zeros = torch.zeros(tokens, few.hidden, dtype=torch.float64, device=DEVICE)
    exact = ref.add_experts_(zeros, x, routed.ids_TK, routed.weights_TK, *stacks)
    return checked(EXPERTS[name](*stacks)(x, routed), exact, name)


def share(took: float, moved: float, operations: float, top: dict[str, float]) -> dict[str, Any]:
    """INT8 and FP8 tensor cores have the same rate."""
    limit = max(moved / top["read"], operations / top["fp8"])
    return {"us": took * 1e6, "floor_us": limit * 1e6, "share": limit / took}


def time_products(calls: Sequence[Product], rows: int, size: Size, top: dict[str, float]) -> dict[str, Any]:
    """calls: of different weights, so that they come from memory."""
    x = draw_rows(rows, size.inputs)
    took = timed([lambda call=call: call(x) for call in calls])
    moved = size.outputs * size.inputs + 2 * rows * (size.inputs + size.outputs)
    return share(took, moved, 2 * rows * size.inputs * size.outputs, top)


def time_int_mm(weights: Sequence[Codes], rows: int, size: Size, top: dict[str, float]) -> dict[str, Any]:
    """Without scales, from codes of x."""
    codes, _ = quantize_rows(draw_rows(rows, size.inputs), "int8")
    return time_products([lambda x, w=w: _int_mm(codes, w) for w in weights], rows, size, top)


def time_experts(call: Experts, tokens: int, size: Size, top: dict[str, float]) -> dict[str, Any]:
    x, routed = draw_rows(tokens, size.hidden), [draw_routing(tokens, size) for _ in range(COPIES)]
    took = timed([lambda each=each: call(x, each) for each in routed])
    chosen = sum(len(each.ids_TK.unique()) for each in routed) / COPIES
    pairs = tokens * size.choices * size.hidden * size.inner
    return share(took, 3 * chosen * size.hidden * size.inner + 4 * tokens * size.hidden, 6 * pairs, top)


def check_all(log: Log, tokens: Sequence[int], size: Size) -> None:
    for rows in tokens:
        for name in PRODUCTS:
            log.attempt(f"check product {name}, {rows}", check_product, name, rows, size)
        for name in EXPERTS:
            log.attempt(f"check experts {name}, {rows}", check_experts, name, rows, size)


def time_all(log: Log, tokens: Sequence[int], size: Size, top: dict[str, float]) -> None:
    failed = {name.removeprefix("check ").rpartition(",")[0] for name in log.failed}
    weights = [draw_codes(size.outputs, size.inputs) for _ in range(COPIES)]
    for name, make in PRODUCTS.items():
        if f"product {name}" not in failed:
            calls = [make(weight) for weight in weights]
            for rows in tokens:
                log.attempt(f"product {name}, {rows}", time_products, calls, rows, size, top)
    for rows in tokens:
        log.attempt(f"product torch._int_mm alone, {rows}", time_int_mm, weights, rows, size, top)
    del weights
    stacks = draw_codes(size.experts, 2 * size.inner, size.hidden), draw_codes(size.experts, size.hidden, size.inner)
    for name, make_experts in EXPERTS.items():
        if f"experts {name}" not in failed:
            call = make_experts(*stacks)
            for rows in tokens:
                log.attempt(f"experts {name}, {rows}", time_experts, call, rows, size, top)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 1024, 4096], help="rows of x")
    parser.add_argument("--tiny", action="store_true", help="checks of small shapes, and no times")
    options = parser.parse_args()
    if DEVICE.type == "cpu":
        from tests.cpu.interpreter import prepare

        prepare()
    torch.manual_seed(1)  # one in ten draws of tiny rows is beyond the bound
    log, has_times = Log(0.0), DEVICE.type == "cuda" and not options.tiny
    with torch.inference_mode():
        check_all(log, (1, 3, 40) if options.tiny else (1, 40, 700), TINY if options.tiny else V3)
        top = ceilings() if has_times else {}
        if has_times:
            time_all(log, options.tokens, V3, top)
    record = {
        "command": " ".join(["python", "benchmarks/gpu/int8_peers.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__, "triton": triton.__version__, "ceilings": top, "failed": log.failed,
        "rows": log.rows,
    }  # fmt: skip
    Path(os.environ.get("OUT", "."), "int8_peers.json").write_text(json.dumps(record, indent=1))
    sys.exit(bool(log.failed))


if __name__ == "__main__":
    main()
