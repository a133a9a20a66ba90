"""y = x Wᵀ (+ b) (+ residual), each row by itself, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.kernels.gemm import ref
from thalweg.kernels.gemm.epilogue import PLAIN, Epilogue


def linear(x_MK: Tensor, w_NK: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """y [M, N], summed in float32."""
    plain = epilogue._replace(residual_MN=None, out_MN=None, dtype=torch.float32)
    rows = [ref.linear(x_K, w_NK, plain) for x_K in torch.split(x_MK, 1)]
    y = torch.cat(rows)
    if epilogue.residual_MN is not None:
        y += epilogue.residual_MN.float()
    return epilogue.result(len(x_MK), len(w_NK), x_MK).copy_(y)
