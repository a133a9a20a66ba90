"""Every kernel of a step compiles for a Hopper, where Triton is installed: a GPU is not needed for that."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("shape", ["v2-lite:plain", "v3:plain", "qwen3:plain"])
def test_kernels_compile_without_a_gpu(shape: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu.offline", shape], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
