"""Kernels of native sparse attention in Triton's interpreter: their cases, a model over pages, what is pooled, ties,
and equal bits in steps of any size. A process of its own, since Triton looks once whether it interprets.

    TRITON_INTERPRET=1 python -m tests.cpu.interpreted_nsa
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.runtime import interpreter

from tests.cpu import nsa_model
from tests.cpu.interpreter import prepare
from thalweg.kernels.nsa import case
from thalweg.kernels.nsa import triton as nsa

CPU = torch.device("cpu")


def reverse_programs() -> None:
    """Runs the last program of a launch first: a token must not count on what an earlier one stores."""
    builder: Any = vars(interpreter)["interpreter_builder"]
    set_index = builder.set_grid_idx
    builder.set_grid_idx = lambda x, *rest: set_index(builder.grid_dim[0] - 1 - x, *rest)


def main() -> int:
    prepare()
    reverse_programs()
    cases = list(case.cases(torch.Generator().manual_seed(1)))[::2]  # the interpreter multiplies no bf16
    for one in cases:
        errors = one.errors(case.run_triton(**one.fresh_inputs()))
        assert max(errors) <= one.tolerance, (one.name, errors)
    nsa_model.check_bits(nsa, cases[1].inputs)
    nsa_model.check_pooling(nsa, CPU)
    nsa_model.check_ties(nsa, CPU)
    nsa_model.check_generation(nsa, 4, 1, CPU)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
