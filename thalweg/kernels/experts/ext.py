"""Experts through DeepGEMM's grouped GEMM on contiguous segments (`deep_gemm`, tested with sgl-deep-gemm 0.1.5.post1),
for prefill. In bf16 the second product alone: in the first our own kernel gathers rows of x and gates as well, and
DeepGEMM with kernels for both takes longer (8,192 tokens of V2-Lite on an H100: 1,253 and 1,414 us; the second product
630 and 544).

Pairs are sorted into segments of whole 128-row tiles, one expert each, on the device; DeepGEMM is given where each
segment ends ("psum layout") and goes through it expert by expert, so that the tiles of an expert run together and its
weights cross the memory once: 4.4 and 2.6 ms for the products of 8,192 tokens of V3 on an H100, 5.2 and 2.9 with an
expert id a row (and 5.5 and 3.3 with tiles of 64 rows). Room is taken for the worst case, tokens · K + 127 · N rows:
3.4 GB for 8,192 tokens of V3 while it runs. Its kernels are compiled at their first call for a weight shape, by the
compiler that `kernels.gemm.toolchain` chose: warm up before serving.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.check import check_results
from thalweg.kernels.experts.case import Shape, run_kernels, small_case
from thalweg.kernels.experts.triton import TMA_TILES, ExpertWeights, serves_tma, tma_up, tuned
from thalweg.kernels.gemm.deep_gemm import library
from thalweg.kernels.moe_align.triton import combine, gather, sort
from thalweg.kernels.norm.triton import Rows, rows_of
from thalweg.kernels.quantize.triton import quantize
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.silu_mul.triton import silu_mul_quantize

# Below, tiles of 128 rows are half empty. The Triton kernels are faster for V3 in FP8, and as fast for V2-Lite in bf16,
# where 1,024 tokens take 403 us without DeepGEMM and 405 with it on an H200, and 1,536 tokens 671 and 590.
MIN_FP8_TOKENS, MIN_TOKENS = 3072, 1536
TILE = 128  # rows of a segment's tile: get_mk_alignment_for_contiguous_layout()
INSTEAD = "run thalweg doctor, which says what is missing, or use --moe-runner-backend triton"
LAYOUT = {"use_psum_layout": True, "ensure_zero_padding": False}


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with the reference, with FP8 weights or bf16 ones. Raises RuntimeError if DeepGEMM cannot
    run here or is wrong.
    """
    dtype = torch.float8_e4m3fn if case.is_fp8 else torch.bfloat16
    small = small_case(torch.Generator().manual_seed(1), Shape(5, 3, 2, 512, 256), dtype)
    inputs = {name: tensor.to(device) for name, tensor in small.inputs.items()}
    # bf16 between the product and silu moves one code in twenty
    check_results("DeepGEMM", INSTEAD, lambda: run_kernels(backend="deep_gemm", **inputs), small.exact, 0.05)


def serves(weights: ExpertWeights) -> bool:
    """Whether `run_experts` multiplies by these weights. In bf16: what `up_by_tma` serves, and I in whole steps of
    DeepGEMM's.
    """
    return weights.fp8 or weights.w2_NHI.shape[2] % 64 == 0 and serves_tma(weights.w2_NHI)


def run_experts(out_TH: Tensor, x: Rows, routed: RouterOutput, weights: ExpertWeights, accumulate: bool = True) -> None:
    """As `triton.run_experts`. weights: such as it `serves`, which the resolver sees to."""
    assert serves(weights), f"DeepGEMM does not multiply by {tuple(weights.w2_NHI.shape)} in {weights.w2_NHI.dtype}"
    experts, scales = len(weights.w2_NHI), None
    by = sort(routed.ids_TK, experts, TILE, aligned=True)
    ends_N = by.end_N[:experts]
    if weights.fp8:
        rows, scales = routed.codes_TH, routed.scales_TG
        if rows is None or scales is None:
            rows, scales = quantize(rows_of(x))
        a_RH, a_scales = gather(rows, scales, by, routed.ids_TK, experts)
        gate_up = _multiply(a_RH, a_scales, weights.w13_NIH, weights.s13, ends_N)
        del a_RH  # the next products' room may lie there
        inner, scales = silu_mul_quantize(gate_up, by.tiles)
    else:
        inner = tma_up(rows_of(x), routed.ids_TK.shape[1], by, weights, tuned("tma", TMA_TILES, weights).up)
    y_RH = _multiply(inner, scales, weights.w2_NHI, weights.s2, ends_N)
    combine(out_TH, y_RH, by.position_P, routed.ids_TK, routed.weights_TK, experts, accumulate)


def _multiply(a_RK: Tensor, a_scales: Tensor | None, w_NOK: Tensor, w_scales: Tensor | None, ends_N: Tensor) -> Tensor:
    """Each row times its expert's weight: bf16 [R, O]; rows between segments are undefined."""
    y = torch.empty(len(a_RK), w_NOK.shape[1], dtype=torch.bfloat16, device=a_RK.device)
    if a_scales is None or w_scales is None:
        library().m_grouped_bf16_gemm_nt_contiguous(a_RK, w_NOK, y, ends_N, **LAYOUT)
    else:
        library().m_grouped_fp8_gemm_nt_contiguous((a_RK, a_scales), (w_NOK, w_scales), y, ends_N, **LAYOUT)
    return y
