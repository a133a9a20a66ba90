"""Many engines of one process, each with recorded steps of its own."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """After each test nothing is left of its engines: TorchScript keeps what it recorded, 130 MB of each, until it is told to forget."""
    yield
    gc.collect()
    torch._C._jit_clear_class_registry()  # its only door
