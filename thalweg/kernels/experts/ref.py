"""Routed SwiGLU experts, added into the output. Written so that TorchScript reads it too: then the loop over experts
runs without Python, and inside a traced step (`models/traced.py`).
"""

import sys
import warnings
from functools import cache
from typing import Any, Callable, List, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.quantize.ref import rounded_rows

SCRIPTABLE = sys.version_info < (3, 14)  # TorchScript supports no later Python


def add_experts_(
    out_TH: Tensor,
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    gate_up_HI: List[Tensor],
    down_IH: List[Tensor],
    memory: List[Tensor],
    sink: Tensor,
    kind: str = "",
    group: int = 0,
    scales: Optional[List[Tensor]] = None,
) -> Tensor:
    """out[t] += Σ_k weights[t, k] · down(silu(gate(x[t])) · up(x[t])) of expert ids[t, k]; in place, returns out.

    out and weights: float32. Weights are transposed: gate_up_HI: gate columns, then up columns of each expert [H, 2 I];
    down_IH: [I, H]. Tokens are sorted by expert, then one GEMM pair runs for each expert that has some, at most min(E,
    T · K): on a CPU only the weights that are read count, and counts cost nothing to read there. memory: for each
    expert the memory that holds both weights, to be read ahead into sink (`gemm/prefetch.py`); empty: nothing is read
    ahead. kind, group, scales: of activations that are rounded before both products, see `rounded_rows`; "": they are
    not. scales: static ones, of each product.
    """
    up_scales: Optional[Tensor] = None
    down_scales: Optional[Tensor] = None
    if scales is not None and len(scales) > 0:
        up_scales, down_scales = scales[0], scales[1]
    if kind != "":
        x_TH = rounded_rows(x_TH, kind, group, up_scales)
    pairs = ids_TK.reshape(-1)
    chosen: List[int] = []
    sizes: List[int] = []
    order, tokens = pairs, pairs
    if x_TH.size(0) == 1:  # every expert has the one row: nothing to sort
        experts: List[int] = pairs.tolist()  # TorchScript wants a type here
        chosen = experts
        sizes = [1] * len(chosen)
        rows = [x_TH] * len(chosen)
    else:
        order = pairs.argsort()
        counts: List[int] = torch.bincount(pairs, minlength=len(down_IH)).tolist()
        for expert, count in enumerate(counts):
            if count > 0:
                chosen.append(expert)
                sizes.append(count)
        tokens = order // ids_TK.size(1)
        rows = list(torch.split_with_sizes(x_TH.index_select(0, tokens), sizes))
    hidden: List[Tensor] = []
    for i, expert in enumerate(chosen):
        if len(memory) > 0:
            torch.sum(memory[expert], [0], dtype=torch.float32, out=sink)
        hidden.append(torch.mm(rows[i], gate_up_HI[expert]))
    gate, up = torch.cat(hidden).chunk(2, -1)
    inner = F.silu(gate).mul_(up)
    if kind != "":
        inner = rounded_rows(inner, kind, group, down_scales)
    rows = list(torch.split_with_sizes(inner, sizes))
    y: List[Tensor] = []
    for i, expert in enumerate(chosen):
        y.append(torch.mm(rows[i], down_IH[expert]))
    if x_TH.size(0) == 1:
        return out_TH.addmm_(weights_TK, torch.cat(y).float())
    return out_TH.index_add_(0, tokens, torch.cat(y) * weights_TK.reshape(-1).index_select(0, order).unsqueeze(1))


@cache
def scripted() -> Callable[..., Any]:
    """`add_experts_` in TorchScript; compiled at the first call, 30 ms."""
    with warnings.catch_warnings():
        # torch prefers torch.compile, which needs a C++ compiler here
        warnings.simplefilter("ignore", DeprecationWarning)
        function: Callable[..., Any] = torch.jit.script(add_experts_)
    return function
