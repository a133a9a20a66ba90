"""Norms, linear layers and the embedding on a GPU's kernels: the parameters of the plain ones, other products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from thalweg.kernels.batch_invariant_gemm import triton as batch_invariant_gemm
from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.gemm.epilogue import PLAIN, Epilogue
from thalweg.kernels.norm import triton as norm
from thalweg.kernels.norm.triton import LazyNorm, Rows
from thalweg.kernels.silu_mul import triton as silu_mul
from thalweg.kernels.small_batch_gemm import triton as small_batch_gemm
from thalweg.layers.factory import LayerFactory
from thalweg.layers.linear import Embedding, LinearLayer, RMSNorm
from thalweg.layers.module import Module, parameter
from thalweg.quant.scheme import Quantized


class KernelNorm(RMSNorm):
    """See `RMSNorm`."""

    def forward(self, x_TH: Tensor) -> Tensor:
        return norm.rms_norm(x_TH, self.weight, self.eps)

    def forward_(self, x_TH: Tensor) -> Tensor:
        """The same, in place."""
        return x_TH.copy_(self.forward(x_TH))

    def lazy(self, x_TH: Tensor) -> LazyNorm:
        """The norm for a product or a mixture of experts to compute in its own way. x must not change before."""
        return LazyNorm(x_TH, self.weight, self.eps)


Matmul = Callable[[Rows, Tensor, Epilogue], Tensor]  # (x, weight, epilogue) → x Wᵀ + …


def matmul(deterministic: bool) -> Matmul:
    """The function that computes bf16 products."""
    return _batch_invariant if deterministic else _fastest


def _batch_invariant(x: Rows, w: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    return batch_invariant_gemm.linear(norm.rows_of(x), w, epilogue)


def _fastest(x: Rows, w: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """Own kernels for few rows, and where a weight fills the machine for some more; cuBLAS beyond."""
    bias, residual, out, dtype = epilogue
    if bias is None and residual is None and small_batch_gemm.linear_fits(len(x), w):
        return small_batch_gemm.linear(norm.rows_of(x), w, epilogue)
    if bias is None and not (residual is None and out is None) and small_batch_gemm.split_k_fits(len(x), w):
        return small_batch_gemm.split_k(norm.rows_of(x), w, epilogue)
    if gemm.is_faster(len(x), *w.shape):
        return gemm.linear(x, w, epilogue)
    x = norm.rows_of(x)
    if residual is not None:
        residual.addmm_(x, w.t())
        return residual if bias is None else residual.add_(bias)
    if dtype is not None and dtype != x.dtype:
        return torch.mm(x, w.t(), out_dtype=dtype)
    return epilogue.finish(nn.functional.linear(x, w, bias))


class KernelLinear(LinearLayer):
    """bf16."""

    def __init__(
        self, layers: LayerFactory, widths: Sequence[int], inputs: int, has_bias: bool = False, is_partial: bool = False
    ) -> None:
        super().__init__(widths, is_partial)
        self.matmul = matmul(layers.kernels.deterministic)
        self.weight = parameter(sum(widths), inputs, dtype=layers.dtype, device=layers.device)
        self.bias = parameter(sum(widths), dtype=layers.dtype, device=layers.device) if has_bias else None

    def computes_norm(self, rows: int) -> bool:
        is_own = self.matmul is _fastest and gemm.is_faster(rows, *self.weight.shape)
        return is_own and gemm.computes_norm(rows, len(self.weight))

    def forward(self, x: Rows) -> Tensor:
        return self.matmul(x, self.weight, Epilogue(self.bias))

    def add_(self, h: Tensor, x: Rows) -> Tensor:
        return self.matmul(x, self.weight, Epilogue(self.bias, h))

    def swiglu(self, x: Rows) -> Tensor:
        if self.matmul is _fastest and gemm.can_fuse_swiglu(len(x), *self.weight.shape):
            return gemm.swiglu(x, self.weight, self.bias)
        if self.matmul is _fastest and self.bias is None and small_batch_gemm.swiglu_fits(len(x), self.weight):
            return small_batch_gemm.swiglu(norm.rows_of(x), self.weight)
        return silu_mul.silu_mul(self.forward(x))


class QuantizedLinear(LinearLayer):
    """A weight that memory holds as the checkpoint stores it."""

    def __init__(
        self, layers: LayerFactory, scheme: Quantized, widths: Sequence[int], inputs: int, is_partial: bool = False
    ) -> None:
        super().__init__(widths, is_partial)
        self.product, self.reads_codes = scheme.product(layers.kernels), scheme.reads_codes
        self.has_normed_product = scheme.computes_norm(layers.kernels)
        self._held = quantized_parameters(self, "weight", scheme, (sum(widths), inputs), layers.device)

    def computes_norm(self, rows: int) -> bool:
        return self.has_normed_product and gemm.computes_norm(rows, sum(self.widths))

    def forward(self, x: Rows) -> Tensor:
        return self.product(x, self._held)

    def add_(self, h: Tensor, x: Rows) -> Tensor:
        return self.product(x, self._held, residual_MN=h)

    def swiglu(self, x: Rows) -> Tensor:
        return silu_mul.silu_mul(self.forward(x))


def quantized_parameters(
    module: Module, name: str, scheme: Quantized, shape: tuple[int, ...], device: torch.device
) -> tuple[nn.Parameter, ...]:
    """Gives the module the parameters that hold a weight of this shape. Returns them in the scheme's order."""
    for suffix, (size, dtype) in scheme.parameters(shape).items():
        setattr(module, name + suffix, parameter(*size, dtype=dtype, device=device))
    return tuple(getattr(module, name + suffix) for suffix in scheme.parameters(shape))


class MixedLinear(LinearLayer):
    """A packed linear whose parts have different schemes: one product for each scheme."""

    def __init__(self, linears: Sequence[LinearLayer], order: Sequence[tuple[int, int]]) -> None:
        """order: of each part, which linear has it, and as which of its parts."""
        super().__init__([linears[linear].widths[part] for linear, part in order])
        self.linears, self._linears, self.order = nn.ModuleList(linears), list(linears), list(order)

    def split(self, x: Rows) -> tuple[Tensor, ...]:
        if not all(linear.computes_norm(len(x)) for linear in self._linears):
            x = norm.rows_of(x)  # once for all products
        results = [linear.split(x) for linear in self._linears]
        return tuple(results[linear][part] for linear, part in self.order)

    def forward(self, x: Rows) -> Tensor:
        return torch.cat(self.split(x), 1)

    def add_(self, h: Tensor, x: Rows) -> Tensor:
        return h.add_(self.forward(x))

    def swiglu(self, x: Rows) -> Tensor:
        return silu_mul.silu_mul(self.forward(x))


class KernelEmbedding(Embedding):
    """See `Embedding`."""

    def __init__(self, layers: LayerFactory, name: str, vocab: int, hidden: int) -> None:
        super().__init__(layers, name, vocab, hidden)
        self.matmul = matmul(layers.kernels.deterministic)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return self.matmul(hidden_NH, self.weight, Epilogue(dtype=torch.float32))
