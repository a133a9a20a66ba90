"""A mixture of experts in plain torch: router, routed experts, shared experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from thalweg.config.model import MoeFacts
from thalweg.kernels.experts.ref import SCRIPTABLE, add_experts_, scripted
from thalweg.kernels.gemm.prefetch import PREFETCH_SINK, no_prefetch, prefetch_for
from thalweg.kernels.quantize.ref import Activations
from thalweg.kernels.router import ref
from thalweg.kernels.router.ref import RouterConfig
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.linear import taken
from thalweg.layers.module import Module, parameter
from thalweg.layers.residual import rows_of
from thalweg.layers.rounded import InputScales
from thalweg.parallel.axis import width_of
from thalweg.parallel.experts import ExpertPlacement
from thalweg.quant.scheme import Quantized
from thalweg.weights.table import WeightTable


class MoeBlock(Module):
    """Σ_k w_k · expert_k(x) + shared(x); the shared experts are one MLP, without a gate."""

    def __init__(
        self,
        layers: LayerFactory,
        layer: int,
        name: str,
        moe: MoeFacts,
        hidden: int,
        activations: Activations | None = None,
    ) -> None:
        """activations: how routed experts round theirs."""
        super().__init__()
        self.router = Router(layers, f"{name}.gate", moe, hidden)
        self.placement = layers.placement(layer, moe)
        self.is_partial = self.placement is None or not self.placement.sends_pairs
        self.experts = Experts(layers, f"{name}.experts", moe, hidden, self.placement, activations)
        self.shared = layers.shared_experts(name, moe, hidden) if moe.shared else None

    def add_to(self, h: ResidualStream, x: Activation, real_T: Tensor | None = None) -> None:
        """h += moe(x). On one rank padding is computed, too."""
        h.add_experts(self, x, real_T)
        if self.shared is not None:
            self.shared.add_to(h, x, real_T)

    def add_(self, h_TH: Tensor, x: Activation, real_T: Tensor | None) -> None:
        """h += routed experts(x), in place; their outputs are summed in float32."""
        total = h_TH.float()  # itself when it is float32
        if self.placement is None:
            self.experts.add_(total, x, *self.router.forward(x))
        else:
            weights_TK, ids_TK, x_TH = self._route(self.placement, x, real_T)
            pair_TKH = self.placement.pairs(ids_TK, [x_TH], self.experts.partial)
            for token, pair_KH in enumerate(pair_TKH):  # as `add_experts_` adds up one token
                total[token : token + 1].addmm_(weights_TK[token : token + 1], pair_KH)
        if total is not h_TH:
            h_TH.copy_(total)

    def partial(self, x: Activation, real_T: Tensor | None) -> Tensor:
        """[T, H]: this rank's part of the sum over tensor-parallel ranks."""
        placement = self.placement
        assert placement is not None, "one rank adds to the stream itself"
        weights_TK, ids_TK, x_TH = self._route(placement, x, real_T)
        return placement.compute(ids_TK, weights_TK, [x_TH], self.experts.partial)

    def _route(self, placement: ExpertPlacement, x: Activation, real_T: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, ids and rows; padding has no expert."""
        x_TH = rows_of(x)
        weights_TK, ids_TK = self.router.forward(x_TH)
        if real_T is not None:
            ids_TK = ids_TK.masked_fill(~real_T.unsqueeze(1), placement.experts)
        return weights_TK, ids_TK, x_TH


class RouterWeights(Module):
    """weight [E, H] and, where the model has one, a float32 bias [E]."""

    def __init__(
        self, layers: LayerFactory, name: str, moe: MoeFacts, hidden: int, dtype: torch.dtype, shared: int = 0
    ) -> None:
        """shared: experts that every token chooses besides."""
        super().__init__()
        self.rule = RouterConfig(
            moe.experts, moe.topk, moe.scale, moe.groups, moe.topk_groups, moe.method, moe.renormalize, shared
        )
        self.weight = parameter(moe.experts, hidden, dtype=dtype, device=layers.device)
        self.loads("weight", f"{name}.weight", (moe.experts, hidden), layers.published)
        self.bias = None
        if moe.method == "noaux_tc":
            self.bias = parameter(moe.experts, dtype=torch.float32, device=layers.device)
            self.loads("bias", f"{name}.e_score_correction_bias", (moe.experts,), torch.float32)


class Router(RouterWeights):
    """Weight and bias are float32 and so are the scores."""

    def __init__(self, layers: LayerFactory, name: str, moe: MoeFacts, hidden: int) -> None:
        super().__init__(layers, name, moe, hidden, torch.float32)
        self._transposed = self.weight.data.t()

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [T, topk] and ids int64 [T, topk]."""
        logits = torch.mm(x_TH if x_TH.dtype == torch.float32 else x_TH.float(), self._transposed)
        return ref.choose_experts(logits, self.bias, self.rule)


class ExpertStacks(Module):
    """The stacks of a layer's experts on one rank: parameters whose first dim is the slot. Experts may move."""

    placement: ExpertPlacement | None
    declare: Callable[[], None]  # which published tensors fill which slot

    def slot_tensors(self, slot: int) -> list[Tensor]:
        """What a slot holds."""
        return [parameter.data[slot] for parameter in self.parameters(recurse=False)]

    def place(self, by_slot: Sequence[int]) -> None:
        """Experts have moved: the router sends tokens there, and published weights go there from now on."""
        assert self.placement is not None, "experts move between ranks"
        self.placement.place(by_slot)
        self.weights = WeightTable()
        self.declare()


class Experts(ExpertStacks):
    """w13: gate rows, then up rows of each expert here [E, 2 I, H]; w2: [E, H, I]. An expert's two weights are
    neighbours in memory.
    """

    def __init__(
        self,
        layers: LayerFactory,
        name: str,
        moe: MoeFacts,
        hidden: int,
        placement: ExpertPlacement | None,
        activations: Activations | None,
    ) -> None:
        super().__init__()
        layout, device, self.placement = layers.layout, layers.device, placement
        count, inner = len(experts_here(placement, moe)), len(width_of(moe.intermediate, layout.moe_tp))
        memory = torch.empty(count, 3 * inner * hidden, dtype=layers.dtype, device=device)
        w13, w2 = torch.split(memory, [2 * inner * hidden, inner * hidden], 1)
        self.w13 = torch.nn.Parameter(w13.view(count, 2 * inner, hidden), requires_grad=False)
        self.w2 = torch.nn.Parameter(w2.view(count, hidden, inner), requires_grad=False)
        self.declare = partial(load_experts, self, layers, name, moe, hidden)
        self.declare()
        # views on the parameters, which are loaded in place
        gate_up, down = ([weight.t() for weight in stack] for stack in (self.w13.data, self.w2.data))
        prefetched = [] if prefetch_for(memory[0]) is no_prefetch else list(memory)
        is_static = activations is not None and activations.is_static
        self.inputs = InputScales(layers, name, moe, hidden) if is_static else None
        scales = [] if self.inputs is None else list(self.inputs.of_products())
        kind, group = ("", 0) if activations is None else activations[:2]
        self._operands = gate_up, down, prefetched, PREFETCH_SINK, kind, group, scales
        self._run = scripted() if device.type == "cpu" and SCRIPTABLE else add_experts_

    def add_(self, out_TH: Tensor, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        """out (float32) += Σ_k weights · expert(x), in place."""
        self._run(out_TH, x_TH, ids_TK, weights_TK, *self._operands)

    def partial(self, ids_TK: Tensor, weights_TK: Tensor, x_TH: Tensor) -> Tensor:
        """float32 [T, H]: Σ_k weights · expert(x) of the slots here; an id of their number is none."""
        if len(x_TH) > 1 and self.placement is not None and self.placement.is_deterministic:
            # tokens of other ranks come along, by which the bits must not change
            rows = zip(*(torch.split(x, 1) for x in (ids_TK, weights_TK, x_TH)), strict=True)
            return torch.cat([self.partial(*row) for row in rows])
        out_TH = x_TH.new_zeros(x_TH.shape, dtype=torch.float32)
        token_N, k_N = (ids_TK < len(self.w13)).nonzero(as_tuple=True)
        if len(token_N):
            out_NH = x_TH.new_zeros(len(token_N), x_TH.shape[1], dtype=torch.float32)
            ids_N1, weights_N1 = ids_TK[token_N, k_N].unsqueeze(1), weights_TK[token_N, k_N].unsqueeze(1)
            add_experts_(out_NH, x_TH[token_N], ids_N1, weights_N1, *self._operands)
            out_TH.index_add_(0, token_N, out_NH)
        return out_TH


def experts_here(placement: ExpertPlacement | None, moe: MoeFacts) -> Sequence[int]:
    """The routed expert of each slot of this rank."""
    return range(moe.experts) if placement is None else placement.here


def load_experts(
    experts: ExpertStacks, layers: LayerFactory, name: str, moe: MoeFacts, hidden: int, held: Quantized | None = None
) -> None:
    """The published tensors of the routed experts on this rank fill the slots of w13 and w2."""
    layout, inter = layers.layout, moe.intermediate
    width = width_of(inter, layout.moe_tp)
    cut = width if layout.moe_tp.size > 1 else None
    for slot, expert in enumerate(experts_here(experts.placement, moe)):
        load_expert(experts, f"{name}.{expert}", slot, (inter, hidden), layers.published, cut, held)
    if layout.ep.size > 1:
        experts.weights.skips.append(rf"{re.escape(name)}\.\d+\..*")


def load_expert(
    experts: Module,
    name: str,
    slot: int,
    shape: tuple[int, int],
    published: torch.dtype,
    width: range | None,
    held: Quantized | None,
) -> None:
    """The published MLP `name` of this shape (inner width, hidden) fills slot `slot` of w13 and w2. width: the inner
    columns that go there; None is all.
    """
    inner = shape[0] if width is None else len(width)
    for first, half in ((0, "gate"), (inner, "up")):
        into = (slot, slice(first, first + inner))
        experts.loads("w13", f"{name}.{half}_proj.weight", shape, published, into=into, take=taken(width), held=held)
    down, take = f"{name}.down_proj.weight", taken(columns=width)
    experts.loads("w2", down, shape[::-1], published, into=(slot,), take=take, held=held)
