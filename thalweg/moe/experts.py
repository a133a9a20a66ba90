"""The routed experts of a MoE layer, stacked."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thalweg.config.model import Moe
from thalweg.kernels.experts import script
from thalweg.kernels.experts.ref import add_experts_
from thalweg.kernels.gemm.warm import SINK, by_sum, warm_for


class Experts(nn.Module):
    """w13: gate rows, then up rows of each expert [E, 2 I, H]; w2: [E, H, I]. An expert's two weights are neighbours in memory."""

    def __init__(self, moe: Moe, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        count, wide = moe.experts, 2 * moe.intermediate
        memory = torch.empty(count, (wide + moe.intermediate) * hidden, dtype=dtype, device=device)
        w13, w2 = torch.split(memory, [wide * hidden, moe.intermediate * hidden], 1)
        self.w13 = nn.Parameter(w13.view(count, wide, hidden), requires_grad=False)
        self.w2 = nn.Parameter(w2.view(count, hidden, moe.intermediate), requires_grad=False)
        # views on the parameters, which are loaded in place
        gate_up, down = ([weight.t() for weight in stack] for stack in (self.w13.data, self.w2.data))
        self._given = (gate_up, down, list(memory) if warm_for(memory[0]) is by_sum else [], SINK)
        self._run = script.compiled() if device.type == "cpu" and script.AVAILABLE else add_experts_

    def add_(self, out_TH: Tensor, x_TH: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        """out (float32) += Σ_k weights · expert(x), in place."""
        self._run(out_TH, x_TH, ids_TK, weights_TK, *self._given)
