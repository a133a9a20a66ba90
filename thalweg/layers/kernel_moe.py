"""A mixture of experts on a GPU's kernels."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from thalweg.config.model import MoeFacts
from thalweg.kernels.experts.backends import coded_runner, runner
from thalweg.kernels.experts.triton import ExpertWeights
from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.moe_align.triton import combine
from thalweg.kernels.norm import triton as norm
from thalweg.kernels.norm.triton import ReadyNorm, Rows
from thalweg.kernels.quantize.triton import scales_like
from thalweg.kernels.router import triton as routing
from thalweg.kernels.weight_only.ref import KernelCodes
from thalweg.kernels.weight_only.triton import CodedExperts
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.kernel_linear import quantized_parameters
from thalweg.layers.module import Module, parameter
from thalweg.layers.moe import ExpertStacks, RouterWeights, experts_here, load_expert, load_experts
from thalweg.layers.rounded import InputScales
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
        self,
        layers: LayerFactory,
        layer: int,
        name: str,
        moe: MoeFacts,
        hidden: int,
        scheme: Quantized | None,
        is_stacked: bool,
    ) -> None:
        """scheme: of the stacks. is_stacked: whether they hold the shared experts too."""
        super().__init__()
        self.is_deterministic, self.dtype = layers.kernels.deterministic, layers.dtype
        is_coded, backend = isinstance(scheme, WeightOnly), layers.kernels.moe
        self.run = coded_runner(self.is_deterministic) if is_coded else runner(backend, self.is_deterministic)
        stacked = moe.shared if is_stacked else 0
        self.router = RouterWeights(layers, f"{name}.gate", moe, hidden, layers.dtype, stacked)  # the gate as published
        self.placement = layers.placement(layer, moe, stacked)
        self.is_partial = self.placement is None or not self.placement.sends_pairs
        self.experts = KernelExperts(layers, name, moe, hidden, scheme, stacked, self.placement)
        self.shared = layers.shared_experts(name, moe, hidden) if moe.shared and not is_stacked else None

    def add_to(self, h: ResidualStream, x: Activation, real_T: Tensor | None = None) -> None:
        """h += moe(x). real_T: False of padding, for which no expert is read."""
        # once for the router and the experts; an MLP of shared experts reads it when these are in the stream
        if (len(x) > gemm.NORMED or self.shared is not None) and not isinstance(x, ReadyNorm):
            x = norm.rows_of(x)
        h.add_experts(self, x, real_T)
        if self.shared is not None:
            self.shared.add_to(h, x, real_T)

    def add_(self, h_TH: Tensor, x: Rows, real_T: Tensor | None) -> None:
        """h += the experts of the stacks, in place."""
        if self.placement is None:
            self.run(h_TH, x, self._route(x, real_T, self.experts.reads_codes), self.experts.stacks())
            return
        routed, rows = self._sent(self.placement, x, real_T)
        pair_PH = self.placement.pairs(routed.ids_TK, rows, self._stored_sum).to(h_TH.dtype).flatten(0, 1)
        combine(h_TH, pair_PH, None, routed.ids_TK, routed.weights_TK, len(self.placement.slot_EC))

    def partial(self, x: Rows, real_T: Tensor | None) -> Tensor:
        """[T, H]: this rank's part of the sum over tensor-parallel ranks."""
        placement = self.placement
        assert placement is not None, "one rank adds to the stream itself"
        if placement.has_all_experts:
            return self._sum(x, self._route(x, real_T, self.experts.reads_codes))
        routed, rows = self._sent(placement, x, real_T)
        return placement.compute(routed.ids_TK, routed.weights_TK, rows, self._stored_sum)

    def _sent(
        self, placement: ExpertPlacement, x: Rows, real_T: Tensor | None
    ) -> tuple[routing.RouterOutput, list[Tensor]]:
        """The choice, and what goes with the tokens."""
        x = x if isinstance(x, ReadyNorm) else norm.rows_of(x)
        # codes of the rows are half as many bytes to send
        sends_codes = self.experts.reads_codes and placement.dispatcher.sends_codes
        routed = self._route(x, real_T, sends_codes)
        rows = [x_TH := norm.rows_of(x)]
        if sends_codes:
            codes_TH, scales_TG = routed.codes_TH, routed.scales_TG
            if codes_TH is None or scales_TG is None:
                codes_TH, scales_TG = norm.codes_of(x_TH)
            rows = [codes_TH, scales_TG]
        return routed, rows

    def _stored_sum(self, ids_TK: Tensor, weights_TK: Tensor, x_TH: Tensor, scales_TG: Tensor | None = None) -> Tensor:
        """Of the slots on this rank. x: rows, or their codes with scales."""
        codes_TH: Tensor | None = None
        if scales_TG is not None:
            codes_TH = x_TH
            if scales_TG.stride(0) != 1 or scales_TG.stride(1) % 4:  # as no kernel reads them
                scales_TG = scales_like(len(x_TH), x_TH.shape[1], x_TH.device).copy_(scales_TG)
        elif self.experts.reads_codes:
            codes_TH, scales_TG = norm.codes_of(x_TH)
        return self._sum(x_TH, routing.RouterOutput(weights_TK, ids_TK, codes_TH, scales_TG))

    def _sum(self, x: Rows, routed: routing.RouterOutput) -> Tensor:
        """[T, H]: the sum of the chosen slots. x: rows or their norm; not read if routed has their codes."""
        device = routed.ids_TK.device
        sum_TH = torch.empty(len(x), self.router.weight.shape[1], dtype=self.dtype, device=device)
        self.run(sum_TH, x, routed, self.experts.stacks(), accumulate=False)
        return sum_TH

    def _route(self, x: Rows, real_T: Tensor | None, with_codes: bool) -> routing.RouterOutput:
        """with_codes: also x in e4m3, by the kernel that has normed it or by the router's."""
        codes = x.quantized if with_codes and isinstance(x, ReadyNorm) else None
        makes_codes, rule = with_codes and codes is None, self.router.rule
        routed = routing.route(
            x, self.router.weight, self.router.bias, rule, real_T, makes_codes, self.is_deterministic
        )
        return routed if codes is None else routed._replace(codes_TH=codes[0], scales_TG=codes[1])


class KernelExperts(ExpertStacks):
    """w13 [E, 2 I, H]: gate rows, then up rows; w2 [E, H, I]; the scales of quantized ones. Stacked shared experts lie
    behind the routed ones.
    """

    def __init__(
        self,
        layers: LayerFactory,
        name: str,
        moe: MoeFacts,
        hidden: int,
        scheme: Quantized | None,
        stacked: int,
        placement: ExpertPlacement | None,
    ) -> None:
        """name: of the block; routed experts are published as its `experts`, shared ones as its `shared_experts`."""
        super().__init__()
        self.scheme = scheme
        for weight in ("w13", "w2"):  # what a scheme does not have stays None
            for suffix in ("_scale", "_zero", "_row"):
                setattr(self, weight + suffix, None)
        self.placement, routed = placement, len(experts_here(placement, moe))
        width = width_of(moe.intermediate, layers.layout.moe_tp)
        for weight, shape in (("w13", (2 * len(width), hidden)), ("w2", (hidden, len(width)))):
            stack = (routed + stacked, *shape)
            if scheme is None:
                setattr(self, weight, parameter(*stack, dtype=layers.dtype, device=layers.device))
            else:
                quantized_parameters(self, weight, scheme, stack, layers.device)
        rule = None if scheme is None else scheme.activations
        is_static = rule is not None and rule.is_static
        self.inputs = InputScales(layers, f"{name}.experts", moe, hidden) if is_static else None
        self.declare = partial(self._load, layers, name, moe, hidden, stacked)
        self.declare()

    def _load(self, layers: LayerFactory, name: str, moe: MoeFacts, hidden: int, stacked: int) -> None:
        load_experts(self, layers, f"{name}.experts", moe, hidden, self.scheme)
        # a SwiGLU of width s · I is the sum of s SwiGLUs of width I: each becomes an expert of the stack
        inter, routed = moe.intermediate, len(experts_here(self.placement, moe))
        width = width_of(inter, layers.layout.moe_tp)
        for i in range(stacked):
            part, full = range(i * inter + width.start, i * inter + width.stop), (moe.shared * inter, hidden)
            load_expert(self, f"{name}.shared_experts", routed + i, full, layers.published, part, self.scheme)

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
            kind, rule = self.scheme.codes.kind, self.scheme.activations
            up, down = (None, None) if self.inputs is None else self.inputs.of_products()
            return CodedExperts(
                KernelCodes(kind, self.w13, self.w13_scale, self.w13_zero, self.w13_row, rule, up),
                KernelCodes(kind, self.w2, self.w2_scale, self.w2_zero, self.w2_row, rule, down),
            )
        return ExpertWeights(self.w13, self.w2, self.w13_scale, self.w2_scale)

    @property
    def reads_codes(self) -> bool:
        """Whether the products read the codes that a router or a norm writes."""
        return self.scheme is not None and self.scheme.reads_codes
