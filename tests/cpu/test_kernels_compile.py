"""Every kernel of a step compiles for Hopper, and sampling kernels equal their references. Needs Triton, but no GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("shape", ["v2-lite:plain", "v3:plain", "v3-w4afp8:plain", "qwen3:plain", "sparse"])
def test_kernels_compile_without_a_gpu(shape: str) -> None:
    done = subprocess.run([sys.executable, "-m", "tests.gpu.offline", shape], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "words",
    [
        "interpreted",
        "interpreted_sparse",
        "interpreted_nsa",
        "interpreted_hot few",  # of one kind of model
        *(pytest.param(f"interpreted_{name}", marks=pytest.mark.soak) for name in ("hot", "sharded", "context")),
    ],
)
def test_kernels_are_interpreted_as_their_references(words: str) -> None:
    name, *few = words.split()
    command = [sys.executable, "-m", f"tests.cpu.{name}", *few]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
