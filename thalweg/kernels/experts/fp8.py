"""Experts with FP8 block weights in plain torch: the oracle of the kernels that compute in FP8. Activations are rounded
to e4m3 in groups of 128, before each product. The activations between the products are rounded to bf16 first.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.fp8_block.ref import dequantize, quantize_rows

BLOCK = (128, 128)


def add_experts_(
    out_TH: Tensor,
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w13: tuple[Tensor, Tensor],
    w2: tuple[Tensor, Tensor],
) -> Tensor:
    """out[t] += Σ_k weights[t, k] · expert ids[t, k] of x[t]; in place, returns out. w13, w2: codes e4m3 [N, 2 I, H],
    [N, H, I] with scales float32 [N, 2 I / 128, H / 128], [N, H / 128, I / 128]. ids of N or more are none. Sums in
    out's dtype.
    """
    seen = rounded(x_TH).to(out_TH.dtype)
    for expert in range(w13[0].shape[0]):
        token, k = (ids_TK == expert).nonzero(as_tuple=True)
        gate_up, down = (dequantize(q[expert], s[expert], BLOCK, out_TH.dtype) for q, s in (w13, w2))
        gate, up = (seen[token] @ gate_up.t()).chunk(2, 1)
        inner = rounded((F.silu(gate) * up).bfloat16()).to(out_TH.dtype)
        out_TH.index_add_(0, token, inner @ down.t() * weights_TK[token, k].to(out_TH.dtype)[:, None])
    return out_TH


def rounded(x_TK: Tensor) -> Tensor:
    """Activations as an FP8 product rounds them, in float32."""
    q, scale = quantize_rows(x_TK.float(), BLOCK[1], False)
    return q.float() * scale.repeat_interleave(BLOCK[1], 1)
