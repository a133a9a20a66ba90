"""Rounding that feeds the error of each column back into the next ones (GPTQ, arXiv 2210.17323): what counts is the
error of the layer's output on calibration data, not that of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.quantize.round import Grouped, group_of, group_scales, levels, nearest, pack

BLOCK = 128  # columns between two updates of all the later ones
DAMPING = 0.01  # of the mean of the diagonal, added to it


def second_moments(x_TK: Tensor) -> Tensor:
    """float32 [K, K]: the mean of x xᵀ over tokens."""
    total = torch.zeros(x_TK.shape[1], x_TK.shape[1], device=x_TK.device)
    for some in torch.split(x_TK, 4096):
        wide = some.float()
        total.addmm_(wide.t(), wide)
    return total / len(x_TK)


def round_with_feedback(scheme: Grouped, numbers_NK: Tensor, moments_KK: Tensor, largest: float) -> tuple[Tensor, ...]:
    """The tensors of `scheme.stored`, for weights in float32. moments: of the inputs, as `second_moments` makes them.
    largest: as in `round.encode`.
    """
    weights, columns = numbers_NK.clone(), numbers_NK.shape[1]
    group, factor_KK = group_of(scheme, columns), _factor(moments_KK)
    weights[:, moments_KK.diagonal() == 0] = 0.0  # inputs that are never there
    codes, scales, steps_N = list[Tensor](), list[Tensor](), weights[:, 0]
    more: tuple[Tensor, ...] = ()
    for begin in range(0, columns, BLOCK):
        stop = min(begin + BLOCK, columns)
        errors = torch.empty(len(weights), stop - begin, device=weights.device)
        for column in range(begin, stop):
            if column % group == 0:
                # columns beyond this block have not had its errors yet, so a group is at most a block, or a whole row
                amax = weights[:, column : column + group].abs().amax(1, keepdim=True)
                stored, steps_N1, more = group_scales(scheme, amax, largest)
                scales.append(stored)
                steps_N = steps_N1.squeeze(1)
            code = nearest(scheme, weights[:, column] / steps_N)
            codes.append(code)
            error = (weights[:, column] - levels(scheme, code) * steps_N) / factor_KK[column, column]
            weights[:, column:stop] -= error[:, None] * factor_KK[column, column:stop]
            errors[:, column - begin] = error
        weights[:, stop:] -= errors @ factor_KK[begin:stop, stop:]
    return pack(scheme, torch.stack(codes, 1), torch.cat(scales, 1), more)


def _factor(moments_KK: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, damped."""
    diagonal, damping = moments_KK.diagonal(), DAMPING
    while True:
        damped = moments_KK + torch.diag(torch.where(diagonal == 0, 1.0, damping * diagonal.mean()))
        try:
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
            factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
            return factor
        except RuntimeError:  # torch's error of a matrix that is not positive
            damping *= 10
            if damping > 1e6:  # inputs beyond float32: every column by itself
                return torch.eye(len(diagonal), device=diagonal.device)
