"""A mixture of experts on a GPU's kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thalweg.config.model import Moe
from thalweg.kernels.experts.backends import AddExperts
from thalweg.kernels.experts.triton import Weights
from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.norm import triton as norm
from thalweg.kernels.norm.triton import Normed
from thalweg.kernels.router import triton as routing
from thalweg.layers.kernel_linear import quantized_parameters
from thalweg.layers.mlp import Mlp
from thalweg.layers.module import Module, parameter
from thalweg.layers.moe import declare_experts, declare_router
from thalweg.layers.residual import Activation, ResidualStream
from thalweg.parallel.axis import width_of
from thalweg.parallel.experts import ExpertPlacement
from thalweg.parallel.layout import Layout
from thalweg.quant.scheme import Quantized, TensorSpec
from thalweg.weights.table import WeightRule, unchanged


class KernelMoe(Module):
    """Σ_k w_k · expert_k(x) + shared(x).

    Shared experts whose scheme is the routed ones' lie behind these in the same stacks, and every token chooses them
    with weight 1; others are an MLP.
    """

    def __init__(
        self,
        name: str,
        moe: Moe,
        hidden: int,
        experts: KernelExperts,
        run: AddExperts,
        published: torch.dtype,
        is_deterministic: bool,
        shared: Mlp | None,
    ) -> None:
        super().__init__()
        self.router = KernelRouter(f"{name}.gate", moe, hidden, published, experts.dtype, experts.w13.device)
        self.experts, self.shared, self.run, self.is_deterministic = experts, shared, run, is_deterministic
        stacked = 0 if shared is not None else moe.shared
        self.rule = routing.Rule(
            moe.experts, moe.topk, moe.scale, moe.groups, moe.topk_groups, moe.method, moe.normalise, stacked
        )
        layout = experts.layout
        self.placement = None if layout.is_single else ExpertPlacement(moe.experts, stacked, layout, experts.w13.device)

    def add_to(self, h: ResidualStream, x: Activation, real_T: Tensor | None = None) -> None:
        """h += moe(x). real_T: False of padding, for which no expert is read."""
        if len(x) > gemm.NORMED:
            x = norm.rows_of(x)  # once for the router and the experts
        h.add_experts(self, x, real_T)
        if self.shared is not None:
            self.shared.add_to(h, x, real_T)

    def add_(self, h_TH: Tensor, x: Tensor | Normed, real_T: Tensor | None) -> None:
        """h += the experts of the stacks, in place."""
        self.run(h_TH, x, self._route(x, real_T, self.experts.reads_codes), self.experts.stacks())

    def partial(self, x: Tensor | Normed, real_T: Tensor | None) -> Tensor:
        """float32 [T, H]: this rank's part of the sum over tensor-parallel ranks."""
        placement, x_TH = self.placement, norm.rows_of(x)
        assert placement is not None, "one rank adds to the stream itself"
        routed = self._route(x_TH, real_T, False)
        x_TH, weights_TK, ids_TK = placement.dispatch(x_TH, routed.weights_TK, routed.ids_TK)
        ids_TK = placement.local_ids(ids_TK, len(x_TH) // placement.layout.dp.size)
        sum_TH = torch.zeros_like(x_TH)
        codes, scales = self.experts.quantized(x_TH)
        self.run(sum_TH, x_TH, routing.Routed(weights_TK, ids_TK, codes, scales), self.experts.stacks())
        return placement.combine(sum_TH)

    def _route(self, x: Tensor | Normed, real_T: Tensor | None, quantise: bool) -> routing.Routed:
        return routing.route(
            x, self.router.weight, self.router.bias, self.rule, real_T, quantise, self.is_deterministic
        )


class KernelRouter(Module):
    """The gate's weight as published; scores are float32."""

    def __init__(
        self, name: str, moe: Moe, hidden: int, published: torch.dtype, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter(moe.experts, hidden, dtype=dtype, device=device)
        self.bias = None
        if moe.method == "noaux_tc":
            self.bias = parameter(moe.experts, dtype=torch.float32, device=device)
        declare_router(self, name, moe, hidden, published)


class KernelExperts(Module):
    """w13 [E, 2 I, H]: gate rows, then up rows; w2 [E, H, I]; the scales of quantized ones. Stacked shared experts lie
    behind the routed ones.
    """

    def __init__(
        self, name: str, moe: Moe, hidden: int, published: torch.dtype, dtype: torch.dtype, device: torch.device, layout: Layout,
        scheme: Quantized | None, stacked: int,
    ) -> None:  # fmt: skip
        """name: of the block; routed experts are published as its `experts`, shared ones as its `shared_experts`.
        scheme: in which memory holds them.
        """
        super().__init__()
        self.layout, self.scheme, self.dtype = layout, scheme, dtype
        self.w13_scale: nn.Parameter | None = None
        self.w2_scale: nn.Parameter | None = None
        routed, inner = moe.experts // layout.ep.size, len(width_of(moe.intermediate, layout.moe_tp))
        for weight, shape in (("w13", (2 * inner, hidden)), ("w2", (hidden, inner))):
            stack = (routed + stacked, *shape)
            if scheme is None:
                setattr(self, weight, parameter(*stack, dtype=dtype, device=device))
            else:
                quantized_parameters(self, weight, scheme, stack, device)
        declare_experts(self.weights, f"{name}.experts", moe, hidden, published, layout, scheme)
        self._declare_shared(f"{name}.shared_experts", moe, hidden, published, routed, stacked)

    w13: nn.Parameter
    w2: nn.Parameter

    def _declare_shared(
        self, name: str, moe: Moe, hidden: int, published: torch.dtype, routed: int, stacked: int
    ) -> None:
        """A SwiGLU of width s · I is the sum of s SwiGLUs of width I: each becomes an expert of the stack."""
        width = width_of(moe.intermediate, self.layout.moe_tp)
        full = moe.shared * moe.intermediate
        for i in range(stacked):
            start = i * moe.intermediate + width.start
            part = slice(start, start + len(width))
            for half, first in (("gate", 0), ("up", len(width))):
                spec = TensorSpec(f"{name}.{half}_proj.weight", (full, hidden), published)
                into = (routed + i, slice(first, first + len(width)))
                self.weights.rules.append(WeightRule(spec, "w13", into, (part,), unchanged, self.scheme))
            spec = TensorSpec(f"{name}.down_proj.weight", (hidden, full), published)
            take = (slice(None), part)
            self.weights.rules.append(WeightRule(spec, "w2", (routed + i,), take, unchanged, self.scheme))

    def stacks(self) -> Weights:
        return Weights(self.w13, self.w2, self.w13_scale, self.w2_scale)

    def quantized(self, x_TH: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The activations as the experts' scheme multiplies them; None for plain ones."""
        return norm.codes_of(x_TH) if self.reads_codes else (None, None)

    @property
    def reads_codes(self) -> bool:
        """Whether the products multiply quantized activations."""
        return self.scheme is not None and self.scheme.quantizes_activations
