"""The library `deep_gemm` (tested with sgl-deep-gemm 0.1.5.post1): whether it can be used, and how it finds a
compiler.
"""

from __future__ import annotations

import importlib
import os
import shutil
from functools import cache
from types import ModuleType

from thalweg.kernels.launch import hopper_has


def available() -> bool:
    """Whether it is installed and the current device is a Hopper."""
    return hopper_has("deep_gemm")


@cache
def library() -> ModuleType:
    """The module. It compiles its kernels itself, with nvcc or, where that is missing, NVRTC. Raises ImportError."""
    if shutil.which("nvcc") is None:
        os.environ.setdefault("DG_JIT_USE_NVRTC", "1")
    return importlib.import_module("deep_gemm")
