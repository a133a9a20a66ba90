"""What a model on a GPU's kernels has that can be tuned: its weights' shapes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from thalweg.kernels.experts import tuning as experts
from thalweg.kernels.gemm import tuning as gemm
from thalweg.kernels.search import TuningSearch
from thalweg.layers.kernel_linear import KernelEmbedding, KernelLinear, QuantizedLinear
from thalweg.layers.kernel_moe import KernelMoe
from thalweg.models.decoder import Model


def of_model(model: Model, fp8_gemm: str) -> Iterator[TuningSearch]:
    """Experts first, then the largest products; each shape once. fp8_gemm: the backend of products with FP8 weights."""
    assert isinstance(model, nn.Module)
    stacks: dict[tuple[int, int, int, int, int, bool], None] = {}
    weights: dict[tuple[int, int, int], None] = {}
    for part in model.modules():
        if isinstance(part, KernelMoe):
            count, hidden, inner = part.experts.w2.shape
            stacks[
                count, hidden, inner, part.rule.topk + part.rule.shared, part.rule.shared, part.experts.reads_codes
            ] = None
        elif isinstance(part, KernelLinear | QuantizedLinear | KernelEmbedding):
            weight = part.weight
            assert isinstance(weight, torch.Tensor)
            if weight.dtype in (torch.bfloat16, torch.float8_e4m3fn):
                weights[(*weight.shape, weight.itemsize)] = None
    for stack in stacks:
        yield from experts.searches(*stack)
    for n, k, itemsize in sorted(weights, key=lambda one: -one[0] * one[1] * one[2]):
        yield from gemm.searches(n, k, itemsize)
        if itemsize == 1 and fp8_gemm == "triton+deep_gemm":
            yield gemm.threshold(n, k)
