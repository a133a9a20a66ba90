"""Whole models on kernels against the same models in float32 by the reference, step after step on the same pages.

bf16: each GEMM rounds its result to 8 bits, 2^-9 relative, and a layer chains a handful of them: 2 %. FP8: activations
are quantized too, to 4 bits of fraction, about 2.5 % in each of five chained products: 15 %. INT8: the reference rounds
activations alike, but bf16 moves some codes, each by 0.8 % of the largest: 5 %.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.shapes import ROUNDED, SHAPES, Part, batches, facts, pair, planes

STEPS: dict[str, list[Part]] = {
    "a prompt": [(1, 0, 100)],
    "three prompts": [(4, 0, 130), (8, 0, 7), (10, 0, 64)],
    "decode": [(1, 100, 1), (4, 130, 1), (8, 7, 1)],
    "chunks on a prefix": [(1, 101, 90), (4, 131, 33)],
    "decode beside prompts": [(1, 191, 1), (8, 8, 1), (10, 64, 70), (20, 0, 200)],
    "verification": [(1, 192, 3), (4, 164, 3)],
    "more decode": [(1, 195, 1), (4, 167, 1), (8, 9, 1), (10, 134, 1), (20, 200, 1)],
}


@pytest.mark.parametrize("shape", [*SHAPES, *ROUNDED])
def test_logits_are_the_references(shape: str, cuda: torch.device) -> None:
    reference, kernels = pair(shape, cuda)
    there, here = planes(reference, cuda), planes(kernels, cuda)
    bound = 0.05 if shape == "v3-int8" else 0.15 if facts(shape).quantization_config else 0.02
    generator = torch.Generator().manual_seed(1)
    for name, rows in STEPS.items():
        plain, paged = batches(rows, cuda, generator, 1024)
        with torch.inference_mode():
            exact = reference.logits(reference.forward(plain, there)).double()
            got = kernels.logits(kernels.forward(paged, here)).double()
        error = float((got - exact).norm() / exact.norm())
        assert error < bound, f"{name}: {error:.4f}"
