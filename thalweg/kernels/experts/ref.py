"""Routed SwiGLU experts, added into the output."""

from __future__ import annotations

from typing import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.gemm.warm import Warm


def add_experts_(
    out_TH: Tensor,
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w13_HI2: Sequence[Tensor],
    w2_IH: Sequence[Tensor],
    warm: Warm,
) -> Tensor:
    """out[t] += Σ_k weights[t, k] · w2[e](silu(gate(x[t])) · up(x[t])), e = ids[t, k]; in place, returns out.

    out and weights: float32. w13_HI2: for each expert the transposed gate and up weights side by side [H, 2 I]; w2_IH: [I, H].
    Tokens are sorted by expert, then one GEMM pair for each expert that has some, at most min(E, T · K): on a CPU, reading only the
    weights that are used is all that counts, and counts cost nothing to read there.
    """
    topk = ids_TK.shape[1]
    if len(x_TH) == 1:
        return _add_one_token_(out_TH, x_TH, ids_TK[0].tolist(), weights_TK, w13_HI2, w2_IH, warm)
    pairs = ids_TK.reshape(-1)
    order = pairs.argsort()
    counts = torch.bincount(pairs, minlength=len(w13_HI2)).tolist()
    used = [expert for expert, count in enumerate(counts) if count]
    sizes = [counts[expert] for expert in used]
    tokens = order // topk
    hidden = _swiglu(_each(x_TH.index_select(0, tokens), sizes, [w13_HI2[expert] for expert in used], warm))
    y = _each(hidden, sizes, [w2_IH[expert] for expert in used], warm)
    return out_TH.index_add_(0, tokens, y * weights_TK.reshape(-1).index_select(0, order).unsqueeze(1))


def _add_one_token_(
    out_1H: Tensor,
    x_1H: Tensor,
    ids: list[int],
    weights_1K: Tensor,
    w13_HI2: Sequence[Tensor],
    w2_IH: Sequence[Tensor],
    warm: Warm,
) -> Tensor:
    """Every expert has the one row: nothing to sort."""
    hidden = _swiglu(_each(x_1H.expand(len(ids), -1), [1] * len(ids), [w13_HI2[expert] for expert in ids], warm))
    y = _each(hidden, [1] * len(ids), [w2_IH[expert] for expert in ids], warm)
    return out_1H.addmm_(weights_1K, y.float())


def _each(x: Tensor, sizes: list[int], weights: list[Tensor], warm: Warm) -> Tensor:
    """Consecutive blocks of rows, each times its own weight."""
    parts = []
    for block, weight in zip(torch.split(x, sizes), weights, strict=True):
        warm(weight)
        parts.append(torch.mm(block, weight))
    return torch.cat(parts)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
