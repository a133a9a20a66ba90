"""The library `deep_gemm` (tested with sgl-deep-gemm 0.1.5.post1): whether it can be used, and how it finds a
compiler.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

from thalweg.kernels.gemm import toolchain
from thalweg.kernels.launch import hopper_has


def available() -> bool:
    """Whether it is installed and the current device is a Hopper."""
    return hopper_has("deep_gemm")


@cache
def library() -> ModuleType:
    """The module, with a compiler that was tried (`toolchain`). Raises ImportError."""
    with toolchain.for_import():
        return importlib.import_module("deep_gemm")
