"""The middle of a SwiGLU, gate columns first."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.fp8_block.ref import quantize_rows


def silu_mul(gate_up_MI: Tensor) -> Tensor:
    """[M, 2 I] → silu(gate) · up [M, I], computed in float32, of the same dtype."""
    gate, up = gate_up_MI.float().chunk(2, 1)
    return (F.silu(gate) * up).to(gate_up_MI.dtype)


def silu_mul_quantize(gate_up_MI: Tensor) -> tuple[Tensor, Tensor]:
    """→ e4m3 [M, I], float32 scales [M, I / 128], of the result in the input's dtype. I a multiple of 128."""
    return quantize_rows(silu_mul(gate_up_MI), 128, False)
