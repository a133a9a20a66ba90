"""FlashInfer where it is installed: its self-checks, and whole models against the reference. It compiles for minutes on
first use.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.gpu.shapes import KERNELS, Part, batches, pair, planes
from thalweg.core.kernels import CheckCase
from thalweg.kernels.gqa import flashinfer as gqa
from thalweg.kernels.mla import flashinfer as mla

STEPS: tuple[list[Part], ...] = (
    [(1, 0, 100), (17, 0, 65)],
    [(1, 100, 1), (17, 65, 1)],
    [(1, 101, 1), (17, 66, 70), (33, 0, 200)],
    [(1, 102, 3), (17, 136, 3)],
)


@pytest.fixture(autouse=True)
def installed() -> None:
    if not gqa.available():
        pytest.skip("flashinfer, nvcc or ninja is not installed")


def test_its_own_checks(cuda: torch.device) -> None:
    gqa.check(cuda, CheckCase(heads=28))
    mla.check(cuda, CheckCase(heads=16))


@pytest.mark.parametrize("shape", ["qwen2", "v2-lite"])
def test_models_on_it_are_the_reference(shape: str, cuda: torch.device) -> None:
    prefill = "flashinfer" if shape == "qwen2" else "triton"
    reference, kernels = pair(shape, cuda, msgspec.structs.replace(KERNELS, decode="flashinfer", prefill=prefill))
    there, here = planes(reference, cuda), planes(kernels, cuda)
    for rows in STEPS:
        plain, paged = batches(rows, cuda, torch.Generator().manual_seed(1), 1000)
        with torch.inference_mode():
            exact = reference.logits(reference.forward(plain, there)).double()
            got = kernels.logits(kernels.forward(paged, here)).double()
        error = float((got - exact).norm() / exact.norm())
        assert error < 0.02, f"{rows}: {error:.4f}"
