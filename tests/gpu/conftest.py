"""Tests that need a CUDA device say so where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def cuda() -> torch.device:
    """The device that the tests of this folder run on."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.device("cuda")
