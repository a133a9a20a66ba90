"""Layers on the kernels of a GPU: the same parameters as the reference's, other hands."""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor, nn

from thalweg.config.model import Moe
from thalweg.kernels.experts.backends import AddExperts
from thalweg.kernels.experts.triton import Weights
from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.gemm.fp8 import Product
from thalweg.kernels.invariant import triton as invariant
from thalweg.kernels.norm import triton as norm
from thalweg.kernels.norm.triton import Normed
from thalweg.kernels.router import triton as routing
from thalweg.kernels.silu_mul import triton as silu_mul
from thalweg.kernels.wide import triton as wide
from thalweg.layers.linear import parameter
from thalweg.layers.part import Part


class FusedNorm(Part):
    """x / sqrt(mean(x²) + eps) · weight over the last dim; weight float32."""

    def __init__(self, dim: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(dim, dtype=torch.float32, device=device)
        self.eps = eps

    def forward(self, x_TH: Tensor) -> Tensor:
        return norm.rms_norm(x_TH, self.weight, self.eps)

    def before(self, x_TH: Tensor) -> Normed:
        """The same, for a product or a mixture of experts to compute in its own way; before that x must not change."""
        return Normed(x_TH, self.weight, self.eps)


# (x, weight, bias, residual, dtype) → x Wᵀ (+ b) (+ residual, in place) in dtype, default x's
Matmul = Callable[[Tensor | Normed, Tensor, Tensor | None, Tensor | None, torch.dtype | None], Tensor]


def matmul(deterministic: bool) -> Matmul:
    """What computes bf16 products."""
    return _invariant if deterministic else _fastest


def _invariant(
    x: Tensor | Normed, w: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    return invariant.linear(norm.rows_of(x), w, bias, residual, dtype)


def _fastest(
    x: Tensor | Normed, w: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    """Own kernels for few rows, and where a weight fills the machine for some more; cuBLAS beyond."""
    if bias is None and residual is None and wide.head_fits(len(x), w):
        return wide.linear(norm.rows_of(x), w, dtype or torch.bfloat16)
    if bias is None and residual is not None and wide.cut_fits(len(x), w):
        return wide.add_(residual, norm.rows_of(x), w)
    if gemm.wins(len(x), *w.shape):
        return gemm.linear(x, w, bias, residual, dtype)
    x = norm.rows_of(x)
    if residual is not None:
        residual.addmm_(x, w.t())
        return residual if bias is None else residual.add_(bias)
    if dtype is not None and dtype != x.dtype:
        return torch.mm(x, w.t(), out_dtype=dtype)
    return nn.functional.linear(x, w, bias)


class FusedLinear(Part):
    """y = x Wᵀ (+ b), bf16."""

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device, matmul: Matmul, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=dtype, device=device)
        self.bias = parameter(outputs, dtype=dtype, device=device) if bias else None
        self.matmul = matmul

    def forward(self, x: Tensor | Normed) -> Tensor:
        return self.matmul(x, self.weight, self.bias, None, None)

    def add_(self, h: Tensor, x: Tensor) -> Tensor:
        """h += x Wᵀ (+ b), in place."""
        return self.matmul(x, self.weight, self.bias, h, None)

    def swiglu(self, x: Tensor | Normed) -> Tensor:
        """silu(gate) · up of the result, whose first half are the gates."""
        if self.matmul is _fastest and gemm.fuses(len(x), *self.weight.shape):
            return gemm.swiglu(x, self.weight, self.bias)
        if self.matmul is _fastest and self.bias is None and wide.pairs_fit(len(x), self.weight):
            return wide.swiglu(norm.rows_of(x), self.weight)
        return silu_mul.silu_mul(self.forward(x))


class FusedFp8Linear(Part):
    """y = x Wᵀ, W in FP8 blocks of 128 × 128 with float32 multipliers, x quantized by token and group of 128 columns."""

    def __init__(self, inputs: int, outputs: int, device: torch.device, product: Product) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs, dtype=torch.float8_e4m3fn, device=device)
        self.weight_scale = scales(outputs, inputs, device=device)
        self.product = product

    def forward(self, x: Tensor | Normed) -> Tensor:
        return self.product(x, self.weight, self.weight_scale)

    def add_(self, h: Tensor, x: Tensor) -> Tensor:
        """h += x Wᵀ, in place."""
        return self.product(x, self.weight, self.weight_scale, h)

    def swiglu(self, x: Tensor | Normed) -> Tensor:
        """silu(gate) · up of the result, whose first half are the gates."""
        return silu_mul.silu_mul(self.forward(x))


def scales(*shape: int, device: torch.device) -> nn.Parameter:
    """Multipliers of a weight of this shape: one for each block of its last two dims."""
    *lead, rows, columns = shape
    return parameter(*lead, -(-rows // 128), -(-columns // 128), dtype=torch.float32, device=device)


class FusedEmbedding(Part):
    """Rows of a [vocabulary, hidden] table; as a head, its scores."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device, matmul: Matmul) -> None:
        super().__init__()
        self.weight = parameter(vocab, hidden, dtype=dtype, device=device)
        self.matmul = matmul

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.weight.index_select(0, ids_T)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """float32 [N, vocabulary]."""
        return self.matmul(hidden_NH, self.weight, None, None, torch.float32)


class FusedMlp(Part):
    """down(silu(gate x) · up x); gate_up: gate rows first, then up."""

    def __init__(self, gate_up: FusedLinear | FusedFp8Linear, down: FusedLinear | FusedFp8Linear) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def add_(self, h_TH: Tensor, x_TH: Tensor | Normed, real_T: Tensor | None = None) -> Tensor:
        """h += mlp(x), in place; padding is computed, too."""
        return self.down.add_(h_TH, self.gate_up.swiglu(x_TH))


class FusedMoe(Part):
    """Σ_k w_k · expert_k(x), the shared experts behind the routed ones in the same stacks, chosen by every token with weight 1."""

    def __init__(
        self,
        moe: Moe,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        fp8: bool,
        run: AddExperts,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.router = FusedRouter(moe, hidden, dtype, device)
        self.experts = FusedExperts(moe, hidden, dtype, device, fp8)
        self.rule = routing.Rule(
            moe.experts, moe.topk, moe.scale, moe.groups, moe.topk_groups, moe.method, moe.normalise, moe.shared
        )
        self.fp8, self.run, self.deterministic = fp8, run, deterministic

    def add_(self, h_TH: Tensor, x_TH: Tensor | Normed, real_T: Tensor | None = None) -> Tensor:
        """h += moe(x), in place. real_T bool: False of padding, for which no expert is read."""
        if len(x_TH) > gemm.NORMED:
            x_TH = norm.rows_of(x_TH)  # once for the router and the experts
        routed = routing.route(
            x_TH, self.router.weight, self.router.bias, self.rule, real_T, self.fp8, self.deterministic
        )
        self.run(h_TH, x_TH, routed, self.experts.weights())
        return h_TH


class FusedRouter(Part):
    """The gate's weight as published; scores are float32."""

    def __init__(self, moe: Moe, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(moe.experts, hidden, dtype=dtype, device=device)
        self.bias = None
        if moe.method == "noaux_tc":
            self.bias = parameter(moe.experts, dtype=torch.float32, device=device)


class FusedExperts(Part):
    """w13 [E + shared, 2 I, H]: gate rows, then up rows; w2 [E + shared, H, I]. FP8: with their multipliers."""

    def __init__(self, moe: Moe, hidden: int, dtype: torch.dtype, device: torch.device, fp8: bool) -> None:
        super().__init__()
        count, wide = moe.experts + moe.shared, 2 * moe.intermediate
        kept = torch.float8_e4m3fn if fp8 else dtype
        self.w13 = parameter(count, wide, hidden, dtype=kept, device=device)
        self.w2 = parameter(count, hidden, moe.intermediate, dtype=kept, device=device)
        self.w13_scale = self.w2_scale = None
        if fp8:
            self.w13_scale = scales(count, wide, hidden, device=device)
            self.w2_scale = scales(count, hidden, moe.intermediate, device=device)

    def weights(self) -> Weights:
        return Weights(self.w13, self.w2, self.w13_scale, self.w2_scale)
