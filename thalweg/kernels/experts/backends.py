"""The experts by backend: our own kernels, DeepGEMM's grouped products, or what measured fastest for a number of
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from thalweg.kernels.experts import ext
from thalweg.kernels.experts import triton as own
from thalweg.kernels.experts.triton import ExpertWeights
from thalweg.kernels.norm.triton import Rows, rows_of
from thalweg.kernels.router.triton import RouterOutput
from thalweg.kernels.weight_only import triton as weight_only
from thalweg.kernels.weight_only.triton import CodedExperts

MOST_TOKENS = 16384  # at a time: the activations between the products take 0.4 MB a token of V3


# (out, x, routed, weights, accumulate=True): out[t] += Σ_k weight_k · expert_k(x[t]), in place, or = without
# accumulate. out, x: bf16 [T, H], or x a norm of such; routed: the result of `route` for the same x
RunExperts = Callable[..., None]


def runner(backend: str, deterministic: bool = False) -> RunExperts:
    """The runner of a backend: "triton", "deep_gemm" or "triton+deep_gemm". deterministic: a token's bits depend on
    nothing but the token, which no library promises.
    """
    return partial(_in_pieces, partial(own.run_experts, deterministic=True) if deterministic else RUNNERS[backend])


def coded_runner(deterministic: bool = False) -> RunExperts:
    """The runner of `weight_only.triton.CodedExperts`, which has one backend."""
    return partial(_in_pieces, partial(weight_only.run_experts, deterministic=deterministic))


def _by_size(out_TH: Tensor, x: Rows, routed: RouterOutput, weights: ExpertWeights, accumulate: bool = True) -> None:
    is_many = len(x) >= (ext.MIN_FP8_TOKENS if weights.fp8 else ext.MIN_TOKENS)
    (ext.run_experts if is_many else own.run_experts)(out_TH, x, routed, weights, accumulate)


RUNNERS: dict[str, RunExperts] = {
    "triton": own.run_experts,
    "deep_gemm": ext.run_experts,
    "triton+deep_gemm": _by_size,
}


def _in_pieces(
    run: RunExperts, out_TH: Tensor, x: Rows, routed: RouterOutput, weights: ExpertWeights | CodedExperts,
    accumulate: bool = True,
) -> None:  # fmt: skip
    """MOST_TOKENS at a time."""
    if len(x) <= MOST_TOKENS:
        return run(out_TH, x, routed, weights, accumulate)
    x_TH = rows_of(x)
    for start in range(0, len(x_TH), MOST_TOKENS):
        piece = slice(start, start + MOST_TOKENS)
        run(out_TH[piece], x_TH[piece], routed.part(piece), weights, accumulate)
