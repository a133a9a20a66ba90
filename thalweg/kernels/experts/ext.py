"""FP8 experts through DeepGEMM's grouped GEMM on contiguous segments (`deep_gemm`, tested with sgl-deep-gemm 0.1.5.post1), for prefill.

Pairs are sorted into segments of 128-row tiles, one expert a tile, on the device; rows between segments have expert -1, which DeepGEMM passes over.
Room is taken for the worst case, tokens · K + 127 · N rows: 3.4 GB for 8,192 tokens of V3 while it runs. Its kernels are compiled at
their first call for a weight shape, with NVRTC if DG_JIT_USE_NVRTC is 1, else with nvcc: warm up before serving.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from thalweg.kernels.experts import fp8
from thalweg.kernels.experts.triton import Weights
from thalweg.kernels.fp8_block.ref import quantize as quantize_blocks
from thalweg.kernels.permute.triton import combine, gather, sort
from thalweg.kernels.quantize.triton import quantize
from thalweg.kernels.router.triton import Routed
from thalweg.kernels.silu_mul.triton import silu_mul_quantize

MIN_TOKENS = 4096  # below, tiles of 128 rows are half empty and the Triton kernels are faster (measured for V3)
TILE = 128  # rows of a segment's tile: get_mk_alignment_for_contiguous_layout()


def available() -> bool:
    """Whether deep_gemm is installed and the current device is a Hopper."""
    return (
        importlib.util.find_spec("deep_gemm") is not None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] == 9
    )


def check(device: torch.device) -> None:
    """Compares a small case with the reference; RuntimeError if DeepGEMM cannot run here or is wrong."""
    generator = torch.Generator(device).manual_seed(1)
    tokens, experts, hidden, inner = 5, 3, 512, 256
    w13 = torch.randn(experts, 2 * inner, hidden, generator=generator, device=device) * hidden**-0.5
    w2 = torch.randn(experts, hidden, inner, generator=generator, device=device) * inner**-0.5
    # block scales far from one another, so that a wrong one shows beside the noise of FP8
    given = []
    for stack in (w13, w2):
        blocks = torch.rand(experts, stack.shape[1] // 128, stack.shape[2] // 128, generator=generator, device=device)
        spread = stack * blocks.repeat_interleave(128, 1).repeat_interleave(128, 2)
        pairs = [quantize_blocks(each, fp8.BLOCK, False) for each in spread]
        given.append((torch.stack([codes for codes, _ in pairs]), torch.stack([scale for _, scale in pairs])))
    w13_given, w2_given = given
    x = torch.randn(tokens, hidden, generator=generator, device=device).bfloat16()
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1], [1, 0]], dtype=torch.int32, device=device)
    routed = Routed(torch.full((tokens, 2), 0.5, device=device), ids)
    out = torch.zeros_like(x)
    try:
        add_experts_(out, x, routed, Weights(w13_given[0], w2_given[0], w13_given[1], w2_given[1]))
    except (RuntimeError, AttributeError, TypeError, OSError, AssertionError, ImportError) as error:
        raise RuntimeError(
            f"DeepGEMM does not run here ({error}): install the sgl-deep-gemm that fits this torch, or nvcc ≥ 12.9, or set "
            "DG_JIT_USE_NVRTC=1; or use --moe-runner-backend triton"
        ) from error
    exact = fp8.add_experts_(torch.zeros(tokens, hidden, device=device), x, ids, routed.weights_TK, w13_given, w2_given)
    error_is = float((out.float() - exact).norm() / exact.norm())
    if not error_is < 0.05:  # bf16 between the product and silu moves one code in twenty
        raise RuntimeError(f"DeepGEMM is wrong here by {error_is:.3f} of the norm: use --moe-runner-backend triton")


def add_experts_(out_TH: Tensor, x_TH: Tensor, routed: Routed, weights: Weights) -> None:
    """As `triton.add_experts_`, for FP8 weights with their scales."""
    if weights.s13 is None or weights.s2 is None:
        raise ValueError(f"DeepGEMM experts take e4m3 weights with scales, not {weights.w13_NIH.dtype}")
    experts, hidden, _ = weights.w2_NHI.shape
    if not routed.ids_TK.numel():
        return
    codes, scales = routed.codes_TH, routed.scales_TG
    if codes is None or scales is None:
        codes, scales = quantize(x_TH)
    by = sort(routed.ids_TK, experts, TILE, aligned=True)
    a_RH, a_scales, expert_R = gather(codes, scales, by, routed.ids_TK.shape[1])
    gate_up = torch.empty(a_RH.shape[0], weights.w13_NIH.shape[1], dtype=torch.bfloat16, device=out_TH.device)
    multiply = _deep_gemm().m_grouped_fp8_gemm_nt_contiguous
    multiply((a_RH, a_scales), (weights.w13_NIH, weights.s13), gate_up, expert_R)
    inner = silu_mul_quantize(gate_up, by.total)
    del a_RH, gate_up  # the next product's room may lie there
    y_RH = torch.empty(expert_R.shape[0], hidden, dtype=torch.bfloat16, device=out_TH.device)
    multiply(inner, (weights.w2_NHI, weights.s2), y_RH, expert_R)
    combine(out_TH, y_RH, by.slot_P, routed.ids_TK, routed.weights_TK, experts)


@cache
def _deep_gemm() -> ModuleType:
    return importlib.import_module("deep_gemm")
