"""Experts through DeepGEMM's grouped GEMM on contiguous segments (`deep_gemm`, tested with sgl-deep-gemm 0.1.5.post1),
for prefill; FP8 or bf16.

Pairs are sorted into segments of whole 128-row tiles, one expert each, on the device; DeepGEMM is given where each
segment ends ("psum layout") and goes through it expert by expert, so that the tiles of an expert run together and its
weights cross the memory once: 4.4 and 2.6 ms for the products of 8,192 tokens of V3 on an H100, 5.2 and 2.9 with an
expert id a row (and 5.5 and 3.3 with tiles of 64 rows). Room is taken for the worst case, tokens · K + 127 · N rows:
3.4 GB for 8,192 tokens of V3 while it runs. Its kernels are compiled at their first call for a weight shape, with NVRTC
if DG_JIT_USE_NVRTC is 1, else with nvcc: warm up before serving.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.experts import fp8
from thalweg.kernels.experts.triton import ExpertWeights
from thalweg.kernels.fp8_block.ref import quantize as quantize_blocks
from thalweg.kernels.gemm.deep_gemm import library
from thalweg.kernels.moe_align.triton import combine, gather, sort
from thalweg.kernels.quantize.triton import quantize
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.silu_mul.triton import silu_mul, silu_mul_quantize

MIN_TOKENS = 3072  # below, tiles of 128 rows are half empty and the Triton kernels are faster (measured for V3 in FP8)
TILE = 128  # rows of a segment's tile: get_mk_alignment_for_contiguous_layout()
LAYOUT = {"use_psum_layout": True, "ensure_zero_padding": False}


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with the reference, with FP8 weights or bf16 ones; RuntimeError if DeepGEMM cannot run here
    or is wrong.
    """
    codes, generator = case.is_fp8, torch.Generator(device).manual_seed(1)
    tokens, experts, hidden, inner = 5, 3, 512, 256
    w13 = torch.randn(experts, 2 * inner, hidden, generator=generator, device=device) * hidden**-0.5
    w2 = torch.randn(experts, hidden, inner, generator=generator, device=device) * inner**-0.5
    x = torch.randn(tokens, hidden, generator=generator, device=device).bfloat16()
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1], [1, 0]], dtype=torch.int32, device=device)
    routed = RouterOutput(torch.full((tokens, 2), 0.5, device=device), ids)
    exact = torch.zeros(tokens, hidden, device=device)
    if codes:
        # block scales far from one another, so that a wrong one shows beside the noise of FP8
        given = []
        for stack in (w13, w2):
            blocks = torch.rand(
                experts, stack.shape[1] // 128, stack.shape[2] // 128, generator=generator, device=device
            )
            spread = stack * blocks.repeat_interleave(128, 1).repeat_interleave(128, 2)
            pairs = [quantize_blocks(each, fp8.BLOCK, False) for each in spread]
            given.append((torch.stack([codes for codes, _ in pairs]), torch.stack([scale for _, scale in pairs])))
        fp8.add_experts_(exact, x, ids, routed.weights_TK, *given)
        weights = ExpertWeights(given[0][0], given[1][0], given[0][1], given[1][1])
    else:
        weights = ExpertWeights(w13.bfloat16(), w2.bfloat16())
        for token, chosen in enumerate(ids.tolist()):
            for expert in chosen:
                gate, up = (weights.w13_NIH[expert].float() @ x[token].float()).chunk(2)
                exact[token] += 0.5 * (weights.w2_NHI[expert].float() @ (torch.nn.functional.silu(gate) * up))
    out = torch.zeros_like(x)
    try:
        add_experts_(out, x, routed, weights)
    except (RuntimeError, AttributeError, TypeError, OSError, AssertionError, ImportError) as error:
        raise RuntimeError(
            f"DeepGEMM does not run here ({error}): install the sgl-deep-gemm that fits this torch, or nvcc ≥ 12.9, or"
            " set DG_JIT_USE_NVRTC=1; or use --moe-runner-backend triton"
        ) from error
    error_is = float((out.float() - exact).norm() / exact.norm())
    if not error_is < 0.05:  # bf16 between the product and silu moves one code in twenty
        raise RuntimeError(f"DeepGEMM is wrong here by {error_is:.3f} of the norm: use --moe-runner-backend triton")


def add_experts_(out_TH: Tensor, x_TH: Tensor, routed: RouterOutput, weights: ExpertWeights) -> None:
    """As `triton.add_experts_`."""
    x, scales = x_TH, None
    if weights.fp8:
        codes, scales = routed.codes_TH, routed.scales_TG
        x, scales = quantize(x_TH) if codes is None or scales is None else (codes, scales)
    experts = weights.w2_NHI.shape[0]
    by = sort(routed.ids_TK, experts, TILE, aligned=True)
    a_RH, a_scales = gather(x, scales, by, routed.ids_TK.shape[1])
    ends_N = by.end_N[:experts]
    gate_up = _multiply(a_RH, a_scales, weights.w13_NIH, weights.s13, ends_N)
    del a_RH  # the next products' room may lie there
    if weights.fp8:
        y_RH = _multiply(*silu_mul_quantize(gate_up, by.total), weights.w2_NHI, weights.s2, ends_N)
    else:
        y_RH = _multiply(silu_mul(gate_up, by.total), None, weights.w2_NHI, None, ends_N)
    combine(out_TH, y_RH, by.slot_P, routed.ids_TK, routed.weights_TK, experts)


def _multiply(a_RK: Tensor, a_scales: Tensor | None, w_NOK: Tensor, w_scales: Tensor | None, ends_N: Tensor) -> Tensor:
    """Each row times its expert's weight: bf16 [R, O]; rows between segments are undefined."""
    y = torch.empty(len(a_RK), w_NOK.shape[1], dtype=torch.bfloat16, device=a_RK.device)
    if a_scales is None or w_scales is None:
        library().m_grouped_bf16_gemm_nt_contiguous(a_RK, w_NOK, y, ends_N, **LAYOUT)
    else:
        library().m_grouped_fp8_gemm_nt_contiguous((a_RK, a_scales), (w_NOK, w_scales), y, ends_N, **LAYOUT)
    return y
