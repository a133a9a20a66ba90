"""Kernels in Triton's interpreter equal their references: of sampling, experts, sparse attention and hot sets. Each
kind in a process of its own, since Triton looks once whether it interprets.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest


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
