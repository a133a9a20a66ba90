"""Whether reading a weight before it is multiplied pays on this CPU, for each size of weight (`prefetch.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.core.kernels import TuningValues
from thalweg.kernels.case import Inputs, draw_tensor
from thalweg.kernels.gemm.prefetch import read_weight
from thalweg.kernels.search import TuningSearch

COLUMNS = 256  # inputs of a weight of this many numbers: of what is read ahead at once only the size is known
DTYPES = {4: torch.float32, 2: torch.bfloat16}


def search(key: TuningValues, default: int) -> TuningSearch | None:
    """key: numbers of the weight, and bytes of each. None for a weight that is no whole number of rows."""
    numbers, itemsize = (int(one) for one in key)
    dtype = DTYPES[itemsize]
    if numbers % COLUMNS:
        return None

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        x = draw_tensor(generator, 1, COLUMNS, dtype=dtype)
        return {"x_1K": x, "w_NK": draw_tensor(generator, numbers // COLUMNS, COLUMNS, dtype=dtype)}

    def run(ahead: int, given: Inputs) -> tuple[Tensor, ...]:
        if ahead:
            read_weight(given["w_NK"])
        return reference(given)

    def reference(given: Inputs) -> tuple[Tensor, ...]:
        return (torch.mm(given["x_1K"], given["w_NK"].t()),)

    label = f"one row and {numbers * itemsize / 1e6:.2f} MB"
    return TuningSearch("read_ahead", key, label, default, (1, 0), draw, run, reference, 0.0, numbers * itemsize)
