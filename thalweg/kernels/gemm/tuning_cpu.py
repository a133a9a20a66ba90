"""Whether reading a weight before it is multiplied pays on this CPU, for each size of weight (`prefetch.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.core.kernels import TuningValues
from thalweg.kernels.case import Inputs, draw_tensor
from thalweg.kernels.gemm.prefetch import reader
from thalweg.kernels.search import TuningSearch

COLUMNS = 256  # inputs of a weight of this many numbers: only the size of the weight counts
DTYPES = {4: torch.float32, 2: torch.bfloat16}


def search(key: TuningValues, default: int) -> TuningSearch | None:
    """key: numbers of the weight, and bytes of each. None for a weight that is no whole number of rows."""
    numbers, itemsize = map(int, key)
    if numbers % COLUMNS:
        return None

    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        shapes = {"x_1K": (1, COLUMNS), "w_NK": (numbers // COLUMNS, COLUMNS)}
        return {name: draw_tensor(generator, *shape, dtype=DTYPES[itemsize]) for name, shape in shapes.items()}

    def run(ahead: int, inputs: Inputs) -> tuple[Tensor, ...]:
        if ahead:
            reader(2)(inputs["w_NK"])
        return reference(inputs)

    def reference(inputs: Inputs) -> tuple[Tensor, ...]:
        return (torch.mm(inputs["x_1K"], inputs["w_NK"].t()),)

    label, read = f"one row and {numbers * itemsize / 1e6:.2f} MB", numbers * itemsize
    return TuningSearch("read_ahead", key, label, default, (1, 0), draw, run, reference, 0.0, read)
