"""A mixture of experts on a GPU's kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thalweg.config.model import MoeFacts
from thalweg.kernels.experts.backends import coded_runner, runner
from thalweg.kernels.experts.triton import ExpertWeights
from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.norm import triton as norm
from thalweg.kernels.norm.triton import LazyNorm
from thalweg.kernels.router import triton as routing
from thalweg.kernels.weight_only.ref import Codes
from thalweg.kernels.weight_only.triton import CodedExperts
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.kernel_linear import quantized_parameters
from thalweg.layers.module import Module, parameter
from thalweg.layers.moe import RouterWeights, load_expert, load_experts
from thalweg.parallel.axis import width_of
from thalweg.parallel.experts import ExpertPlacement
from thalweg.quant.scheme import Quantized
from thalweg.quant.weight_only import WeightOnly


class KernelMoe(Module):
    """Σ_k w_k · expert_k(x) + shared(x).

    Shared experts whose scheme is the routed ones' lie behind these in the same stacks, and every token chooses them
    with weight 1; others are an MLP.
    """

    def __init__(
        self, layers: LayerFactory, name: str, moe: MoeFacts, hidden: int, scheme: Quantized | None, is_stacked: bool
    ) -> None:
        """scheme: of the stacks. is_stacked: whether they hold the shared experts too."""
        super().__init__()
        self.is_deterministic = layers.kernels.deterministic
        is_coded, backend = isinstance(scheme, WeightOnly), layers.kernels.moe
        self.run = coded_runner(self.is_deterministic) if is_coded else runner(backend, self.is_deterministic)
        stacked = moe.shared if is_stacked else 0
        self.router = RouterWeights(layers, f"{name}.gate", moe, hidden, layers.dtype, stacked)  # the gate as published
        self.experts = KernelExperts(layers, name, moe, hidden, scheme, stacked)
        self.shared = layers.shared_experts(name, moe, hidden) if moe.shared and not is_stacked else None
        layout, device = layers.layout, layers.device
        self.placement = None if layout.is_single else ExpertPlacement(moe.experts, stacked, layout, device)

    def add_to(self, h: ResidualStream, x: Activation, real_T: Tensor | None = None) -> None:
        """h += moe(x). real_T: False of padding, for which no expert is read."""
        if len(x) > gemm.NORMED:
            x = norm.rows_of(x)  # once for the router and the experts
        h.add_experts(self, x, real_T)
        if self.shared is not None:
            self.shared.add_to(h, x, real_T)

    def add_(self, h_TH: Tensor, x: Tensor | LazyNorm, real_T: Tensor | None) -> None:
        """h += the experts of the stacks, in place."""
        self.run(h_TH, x, self._route(x, real_T, self.experts.reads_codes), self.experts.stacks())

    def partial(self, x: Tensor | LazyNorm, real_T: Tensor | None) -> Tensor:
        """float32 [T, H]: this rank's part of the sum over tensor-parallel ranks."""
        placement, x_TH = self.placement, norm.rows_of(x)
        assert placement is not None, "one rank adds to the stream itself"
        routed = self._route(x_TH, real_T, False)
        x_TH, weights_TK, ids_TK = placement.dispatch(x_TH, routed.weights_TK, routed.ids_TK)
        ids_TK = placement.local_ids(ids_TK, len(x_TH) // placement.layout.dp.size)
        sum_TH = torch.empty_like(x_TH)
        codes, scales = self.experts.quantized(x_TH)
        self.run(
            sum_TH,
            x_TH,
            routing.RouterOutput(weights_TK, ids_TK, codes, scales),
            self.experts.stacks(),
            accumulate=False,
        )
        return placement.combine(sum_TH)

    def _route(self, x: Tensor | LazyNorm, real_T: Tensor | None, with_codes: bool) -> routing.RouterOutput:
        return routing.route(
            x, self.router.weight, self.router.bias, self.router.rule, real_T, with_codes, self.is_deterministic
        )


class KernelExperts(Module):
    """w13 [E, 2 I, H]: gate rows, then up rows; w2 [E, H, I]; the scales of quantized ones. Stacked shared experts lie
    behind the routed ones.
    """

    def __init__(
        self, layers: LayerFactory, name: str, moe: MoeFacts, hidden: int, scheme: Quantized | None, stacked: int
    ) -> None:
        """name: of the block; routed experts are published as its `experts`, shared ones as its `shared_experts`."""
        super().__init__()
        self.scheme = scheme
        for weight in ("w13", "w2"):  # what a scheme does not have stays None
            for suffix in ("_scale", "_zero", "_row"):
                setattr(self, weight + suffix, None)
        layout, inter = layers.layout, moe.intermediate
        routed, width = moe.experts // layout.ep.size, width_of(inter, layout.moe_tp)
        for weight, shape in (("w13", (2 * len(width), hidden)), ("w2", (hidden, len(width)))):
            stack = (routed + stacked, *shape)
            if scheme is None:
                setattr(self, weight, parameter(*stack, dtype=layers.dtype, device=layers.device))
            else:
                quantized_parameters(self, weight, scheme, stack, layers.device)
        load_experts(self, layers, f"{name}.experts", moe, hidden, scheme)
        # a SwiGLU of width s · I is the sum of s SwiGLUs of width I: each becomes an expert of the stack
        shared, full = f"{name}.shared_experts", (moe.shared * inter, hidden)
        for i in range(stacked):
            part = range(i * inter + width.start, i * inter + width.stop)
            load_expert(self, shared, routed + i, full, layers.published, part, scheme)

    w13: nn.Parameter
    w2: nn.Parameter
    w13_scale: nn.Parameter | None
    w2_scale: nn.Parameter | None
    w13_zero: nn.Parameter | None
    w2_zero: nn.Parameter | None
    w13_row: nn.Parameter | None
    w2_row: nn.Parameter | None

    def stacks(self) -> ExpertWeights | CodedExperts:
        if isinstance(self.scheme, WeightOnly):
            kind = self.scheme.codes.kind
            return CodedExperts(
                Codes(kind, self.w13, self.w13_scale, self.w13_zero, self.w13_row),
                Codes(kind, self.w2, self.w2_scale, self.w2_zero, self.w2_row),
            )
        return ExpertWeights(self.w13, self.w2, self.w13_scale, self.w2_scale)

    def quantized(self, x_TH: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The activations as the experts' scheme multiplies them; None for plain ones."""
        return norm.codes_of(x_TH) if self.reads_codes else (None, None)

    @property
    def reads_codes(self) -> bool:
        """Whether the products multiply quantized activations."""
        return self.scheme is not None and self.scheme.quantizes_activations
