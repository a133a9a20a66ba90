"""A mixture of experts in plain torch: router, routed experts, shared experts."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from thalweg.config.model import MoeFacts
from thalweg.kernels.experts.ref import SCRIPTABLE, add_experts_, scripted
from thalweg.kernels.gemm.prefetch import PREFETCH_SINK, no_prefetch, prefetch_for
from thalweg.kernels.router import ref
from thalweg.kernels.router.ref import RouterConfig
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import Activation, ResidualStream
from thalweg.layers.linear import taken
from thalweg.layers.module import Module, parameter
from thalweg.layers.residual import rows_of
from thalweg.parallel.axis import width_of
from thalweg.parallel.experts import ExpertPlacement
from thalweg.quant.scheme import Quantized


class MoeBlock(Module):
    """Σ_k w_k · expert_k(x) + shared(x); the shared experts are one MLP, without a gate."""

    def __init__(self, layers: LayerFactory, name: str, moe: MoeFacts, hidden: int) -> None:
        super().__init__()
        layout = layers.layout
        self.router = Router(layers, f"{name}.gate", moe, hidden)
        self.placement = None if layout.is_single else ExpertPlacement(moe.experts, 0, layout, layers.device)
        self.experts = Experts(layers, f"{name}.experts", moe, hidden)
        self.shared = layers.shared_experts(name, moe, hidden) if moe.shared else None

    def add_to(self, h: ResidualStream, x: Activation, real_T: Tensor | None = None) -> None:
        """h += moe(x). On one rank padding is computed, too."""
        h.add_experts(self, x, real_T)
        if self.shared is not None:
            self.shared.add_to(h, x, real_T)

    def add_(self, h_TH: Tensor, x: Activation, real_T: Tensor | None) -> None:
        """h += routed experts(x), in place; their outputs are summed in float32."""
        total = h_TH.float()  # itself when it is float32
        self.experts.add_(total, x, *self.router.forward(x))
        if total is not h_TH:
            h_TH.copy_(total)

    def partial(self, x: Activation, real_T: Tensor | None) -> Tensor:
        """float32 [T, H]: this rank's part of the sum over tensor-parallel ranks."""
        placement, x_TH = self.placement, rows_of(x)
        assert placement is not None, "one rank adds to the stream itself"
        weights_TK, ids_TK = self.router.forward(x_TH)
        if real_T is not None:
            ids_TK = ids_TK.masked_fill(~real_T.unsqueeze(1), placement.slot_RE.shape[1])
        x_TH, weights_TK, ids_TK = placement.dispatch(x_TH, weights_TK, ids_TK)
        ids_TK = placement.local_ids(ids_TK, len(x_TH) // placement.layout.dp.size)
        return placement.combine(self.experts.partial(x_TH, weights_TK, ids_TK))


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


class Experts(Module):
    """w13: gate rows, then up rows of each expert here [E, 2 I, H]; w2: [E, H, I]. An expert's two weights are
    neighbours in memory.
    """

    def __init__(self, layers: LayerFactory, name: str, moe: MoeFacts, hidden: int) -> None:
        super().__init__()
        layout, device = layers.layout, layers.device
        count, inner = moe.experts // layout.ep.size, len(width_of(moe.intermediate, layout.moe_tp))
        memory = torch.empty(count, 3 * inner * hidden, dtype=layers.dtype, device=device)
        w13, w2 = torch.split(memory, [2 * inner * hidden, inner * hidden], 1)
        self.w13 = torch.nn.Parameter(w13.view(count, 2 * inner, hidden), requires_grad=False)
        self.w2 = torch.nn.Parameter(w2.view(count, hidden, inner), requires_grad=False)
        load_experts(self, layers, name, moe, hidden)
        # views on the parameters, which are loaded in place
        gate_up, down = ([weight.t() for weight in stack] for stack in (self.w13.data, self.w2.data))
        prefetched = [] if prefetch_for(memory[0]) is no_prefetch else list(memory)
        self._operands: tuple[list[Tensor], list[Tensor], list[Tensor], Tensor] = (
            gate_up,
            down,
            prefetched,
            PREFETCH_SINK,
        )
        self._run = scripted() if device.type == "cpu" and SCRIPTABLE else add_experts_

    def add_(self, out_TH: Tensor, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        """out (float32) += Σ_k weights · expert(x), in place."""
        self._run(out_TH, x_TH, ids_TK, weights_TK, *self._operands)

    def partial(self, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """float32 [T, H]: Σ_k weights · expert(x) of the experts here; an id of E is none."""
        out_TH = x_TH.new_zeros(x_TH.shape, dtype=torch.float32)
        token_N, k_N = (ids_TK < len(self.w13)).nonzero(as_tuple=True)
        if len(token_N):
            out_NH = x_TH.new_zeros(len(token_N), x_TH.shape[1], dtype=torch.float32)
            ids_N1, weights_N1 = ids_TK[token_N, k_N].unsqueeze(1), weights_TK[token_N, k_N].unsqueeze(1)
            add_experts_(out_NH, x_TH[token_N], ids_N1, weights_N1, *self._operands)
            out_TH.index_add_(0, token_N, out_NH)
        return out_TH


def load_experts(
    experts: Module, layers: LayerFactory, name: str, moe: MoeFacts, hidden: int, held: Quantized | None = None
) -> None:
    """The published tensors of the routed experts on this rank fill w13 and w2, in the order of their numbers."""
    layout, inter = layers.layout, moe.intermediate
    width = width_of(inter, layout.moe_tp)
    cut = width if layout.moe_tp.size > 1 else None
    count = moe.experts // layout.ep.size
    for i in range(count):
        load_expert(experts, f"{name}.{layout.ep.rank * count + i}", i, (inter, hidden), layers.published, cut, held)
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
