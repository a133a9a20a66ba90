"""The reference through TorchScript: the loop over experts runs without Python, and inside a traced step
(`models/traced.py`).
"""

from __future__ import annotations

import sys
import warnings
from functools import cache

import torch

from thalweg.kernels.case import Run
from thalweg.kernels.experts.ref import add_experts_

AVAILABLE = sys.version_info < (3, 14)  # TorchScript supports no later Python


@cache
def compiled() -> Run:
    """The scripted `add_experts_`; compiled at the first call, 30 ms."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # torch prefers torch.compile, which needs a C++ compiler here
        function: Run = torch.jit.script(add_experts_)
    return function
