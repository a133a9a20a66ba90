"""DeepSeek-V3's experts and the output projection of its attention on one GPU, in INT4 and INT8 with 8-bit and 16-bit
activations, beside FP8 blocks: `python benchmarks/gpu/coded.py`.

Writes $OUT/coded.json (OUT: the current folder if unset). Checks against plain torch come first. Times and floors as in
`moe.py`; what quantizes x counts, for FP8, too. `to_fp8`: the time over that of the fastest FP8 backend.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Callable

import torch
import triton
from moe import COPIES, CUDA, SLIM, Log, ceilings, draw_ids, error, random_weights, timed
from torch import Tensor

from thalweg.kernels.experts import triton as experts
from thalweg.kernels.experts.backends import coded_runner, runner
from thalweg.kernels.gemm import deep_gemm
from thalweg.kernels.gemm import fp8 as fp8_products
from thalweg.kernels.quantize.ref import Activations
from thalweg.kernels.router.ref import RouterConfig
from thalweg.kernels.weight_only import case, ref
from thalweg.kernels.weight_only import triton as codes
from thalweg.kernels.weight_only.ref import KernelCodes

# kind, columns that share a scale, type of scales, whether rows have one, activations
CODED: dict[str, tuple[Any, ...]] = {
    "w4a8": ("int4", 128, torch.bfloat16, False, Activations("e4m3")),
    "w4a16": ("int4", 128, torch.bfloat16, False, None),
    "w8a8": ("int8", 0, None, True, Activations("int8")),
    "w8a8 blocks": ("int8", 128, torch.float32, False, Activations("int8", 128)),
    "w8a16": ("int8", 0, None, True, None),
}
TOKENS = (1, 8, 32, 128, 1024, 4096)
OUTPUTS, INPUTS = SLIM.hidden, 16384  # of the output projection of V3's attention


def random_codes(name: str, *shape: int) -> KernelCodes:
    """For times only: any bytes are codes."""
    kind, group, scale, has_row, activations = CODED[name]
    *lead, rows, columns = shape
    size = (*lead, rows, columns // 2) if kind == "int4" else shape
    held = torch.randint(0, 256, size, device=CUDA, dtype=torch.uint8)
    scales = torch.full((*lead, columns // group, rows), 0.002, device=CUDA, dtype=scale) if group else None
    row = torch.full((*lead, rows), 0.0002, device=CUDA) if has_row else None
    return KernelCodes(kind, held if kind == "int4" else held.view(torch.int8), scales, None, row, activations)


def nbytes(weight: KernelCodes) -> int:
    return sum(t.numel() * t.itemsize for t in (weight.codes, weight.scale, weight.row) if t is not None)


def check_codes(name: str, tokens: int) -> dict[str, Any]:
    """Few experts of V3's width against plain torch in float64."""
    generator = torch.Generator(CUDA).manual_seed(tokens)
    shapes = (6, 2 * SLIM.inner, SLIM.hidden), (6, SLIM.hidden, SLIM.inner)
    stacks = [case.draw_weight(generator, shape, *CODED[name]) for shape in shapes]
    x, out = (torch.randn(tokens, SLIM.hidden, device=CUDA).bfloat16() for _ in range(2))
    routed = draw_ids(tokens, RouterConfig(6, 3, 1.0, 1, 1, "greedy", False, 0))
    exact = ref.add_experts_(out.double(), x, routed.ids_TK, routed.weights_TK, *stacks)
    held, again = codes.CodedExperts(*map(ref.arranged, stacks)), out.clone()
    for result in (out, again):
        codes.run_experts(result, x, routed, held)
    found = error(out, exact)
    # a sum in another order moves a code of the inner activations
    if found > (2e-2 if CODED[name][-1] else 1e-2) or not torch.equal(out, again):
        raise AssertionError(f"error {found}, repeatable: {torch.equal(out, again)}")
    return {"error": found}


def time_experts(
    run: Callable[..., None], weights: Any, size: int, tokens: int, top: dict[str, float], math: str
) -> dict[str, Any]:
    """size: bytes of an expert. x arrives in bf16: what quantizes it counts, for FP8 too."""
    copies = COPIES if tokens < 1024 else 2
    routed = [draw_ids(tokens, SLIM.rule) for _ in range(copies)]
    x = torch.randn(tokens, SLIM.hidden, device=CUDA).bfloat16()
    out = torch.zeros_like(x)
    chosen = sum(float(experts.coverage(each.ids_TK, SLIM.rule.experts)) for each in routed) / copies
    covered = chosen + SLIM.rule.shared
    took = timed([lambda each=each: run(out, x, each, weights) for each in routed])
    moved = covered * size + 6 * tokens * SLIM.hidden
    flops = 6 * tokens * (SLIM.rule.topk + SLIM.rule.shared) * SLIM.hidden * SLIM.inner
    ideal = max(moved / top["read"], flops / top[math])
    return {
        "us": took * 1e6, "floor_us": ideal * 1e6, "share": ideal / took, "experts": covered,
        "GB/s": moved / took / 1e9, "TFLOP/s": flops / took / 1e12,
    }  # fmt: skip


def time_product(
    multiply: Callable[[Tensor, int], object], size: int, rows: int, top: dict[str, float], math: str
) -> dict[str, Any]:
    """As many weights as a graph has calls, so that they come from memory. size: bytes of a weight."""
    x = torch.randn(rows, INPUTS, device=CUDA).bfloat16()
    took = timed([lambda i=i: multiply(x, i) for i in range(COPIES)])
    moved, flops = size + 2 * rows * (INPUTS + OUTPUTS), 2 * rows * INPUTS * OUTPUTS
    ideal = max(moved / top["read"], flops / top[math])
    return {"us": took * 1e6, "floor_us": ideal * 1e6, "share": ideal / took, "TFLOP/s": flops / took / 1e12}


def time_all_experts(log: Log, top: dict[str, float]) -> None:
    n, hidden, inner = SLIM.stack, SLIM.hidden, SLIM.inner
    blocks = random_weights(SLIM)
    for backend in ("triton", *(["triton+deep_gemm"] if deep_gemm.available() else [])):
        for tokens in TOKENS:
            given = runner(backend), blocks, SLIM.expert_bytes, tokens, top, "fp8"
            log.attempt(f"experts fp8 {backend}, {tokens}", time_experts, *given)
    del blocks, given
    for name, (*_, activations) in CODED.items():
        stacks = codes.CodedExperts(random_codes(name, n, 2 * inner, hidden), random_codes(name, n, hidden, inner))
        size, math = (nbytes(stacks.w13) + nbytes(stacks.w2)) // n, "fp8" if activations else "bf16"
        for tokens in TOKENS:
            log.attempt(f"experts {name}, {tokens}", time_experts, coded_runner(), stacks, size, tokens, top, math)
        del stacks
        torch.cuda.empty_cache()


def time_all_products(log: Log, top: dict[str, float]) -> None:
    bits = torch.randint(0, 256, (COPIES, OUTPUTS, INPUTS), device=CUDA, dtype=torch.uint8).bitwise_and_(0xBF)
    scale = torch.full((OUTPUTS // 128, INPUTS // 128), 0.02, device=CUDA)
    for backend in ("triton", *(["triton+deep_gemm"] if deep_gemm.available() else [])):
        multiply = fp8_products.product(backend)

        def by_blocks(x: Tensor, i: int, multiply: Callable[..., Tensor] = multiply) -> Tensor:
            return multiply(x, bits[i].view(torch.float8_e4m3fn), scale)

        for rows in TOKENS:
            log.attempt(f"product fp8 {backend}, {rows}", time_product, by_blocks, OUTPUTS * INPUTS, rows, top, "fp8")
    for name, (*_, activations) in CODED.items():
        math = "fp8" if activations else "bf16"
        held = [random_codes(name, OUTPUTS, INPUTS) for _ in range(COPIES)]

        def by_codes(x: Tensor, i: int, held: list[KernelCodes] = held) -> Tensor:
            return codes.linear(x, held[i])

        for rows in TOKENS:
            log.attempt(f"product {name}, {rows}", time_product, by_codes, nbytes(held[0]), rows, top, math)


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each time what share it is of the fastest FP8 backend's, for the same operation and tokens."""
    times: dict[tuple[str, str], float] = {}
    for row in rows:
        operation, rest = row["case"].split(" ", 1)
        if rest.startswith("fp8 "):
            key = operation, rest.rpartition(", ")[2]
            times[key] = min(times.get(key, float("inf")), row["us"])
    for row in rows:
        if (base := times.get((row["case"].split(" ")[0], row["case"].rpartition(", ")[2]))) is not None:
            row["to_fp8"] = row["us"] / base
            print(f"{row['case']}: {row['us']:.1f} us, {row['to_fp8']:.2f} of FP8, {row['share']:.2f} of the floor")


def save(log: Log, top: dict[str, float]) -> None:
    """Adds the ratios to FP8, and writes what there is."""
    compare(log.rows)
    record = {
        "command": "python benchmarks/gpu/coded.py", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "cuda": torch.version.cuda, "ceilings": top, "failed": log.failed,
        "rows": log.rows,
    }  # fmt: skip
    Path(os.environ.get("OUT", "."), "coded.json").write_text(json.dumps(record, indent=1))


def main() -> None:
    log, top = Log(0.0), ceilings()
    print({key: f"{value:.4g}" for key, value in top.items()}, torch.cuda.get_device_name(), flush=True)
    try:
        with torch.inference_mode():
            for name in CODED:
                for tokens in (1, 40, 700):
                    log.attempt(f"check {name} T={tokens}", check_codes, name, tokens)
            time_all_experts(log, top)
            time_all_products(log, top)
    finally:  # Ctrl-C keeps what was measured
        save(log, top)
    print(f"failed: {log.failed}")
    sys.exit(bool(log.failed))


if __name__ == "__main__":
    main()
