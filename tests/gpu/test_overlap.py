"""Programmatic dependent launch: layers in a graph at full speed equal the same kernels launched one after the other,
bit for bit.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.seed import SEED
from thalweg.kernels.case import normal
from thalweg.kernels.fp8_block.ref import quantize as quantize_blocks

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a CUDA device and triton", allow_module_level=True)

from thalweg.kernels import launch
from thalweg.kernels.experts.triton import ExpertWeights, run_experts
from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.gemm.epilogue import Epilogue
from thalweg.kernels.norm.triton import LazyNorm, rms_norm
from thalweg.kernels.router.triton import RouterConfig, route

HIDDEN, INNER, EXPERTS, LAYERS, REPLAYS = 1024, 384, 12, 6, 60
RULE = RouterConfig(EXPERTS, 4, 1.0, 1, 1, "greedy", True, 2)


@dataclass
class Layer:
    """What a layer multiplies by."""

    norms: tuple[Tensor, Tensor]
    into: Tensor
    out: Tensor
    gate: Tensor
    experts: ExpertWeights


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return (normal(generator, *shape) * shape[-1] ** -0.5).cuda()


def layer(generator: torch.Generator, codes: bool) -> Layer:
    wide = EXPERTS + RULE.shared
    stacks = draw(generator, wide, 2 * INNER, HIDDEN), draw(generator, wide, HIDDEN, INNER)
    if codes:
        pairs = [[quantize_blocks(each, (128, 128), False) for each in stack] for stack in stacks]
        (w13, w2), (s13, s2) = ([torch.stack([pair[part] for pair in each]) for each in pairs] for part in (0, 1))
        weights = ExpertWeights(w13, w2, s13, s2)
    else:
        weights = ExpertWeights(stacks[0].bfloat16(), stacks[1].bfloat16())
    first, second = (normal(generator, HIDDEN).abs().cuda() + 0.5 for _ in range(2))
    into, out = draw(generator, HIDDEN + 576, HIDDEN).bfloat16(), draw(generator, HIDDEN, HIDDEN).bfloat16()
    return Layer((first, second), into, out, draw(generator, EXPERTS, HIDDEN), weights)


def forward(h: Tensor, layers: list[Layer], codes: bool) -> None:
    """Edits h as a model's layers do."""
    few = len(h) <= gemm.NORMED
    for one in layers:
        x = LazyNorm(h, one.norms[0], 1e-6) if few else rms_norm(h, one.norms[0], 1e-6)
        mixed = gemm.linear(x, one.into)
        gemm.linear(mixed[:, :HIDDEN], one.out, Epilogue(residual_MN=h))
        x = LazyNorm(h, one.norms[1], 1e-6) if few else rms_norm(h, one.norms[1], 1e-6)
        routed = route(x, one.gate, None, RULE, None, codes)
        run_experts(h, x, routed, one.experts)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 4, 24])
def test_overlapped_is_serial_bit_by_bit(tokens: int, codes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(SEED)
    layers = [layer(generator, codes) for _ in range(LAYERS)]
    h = torch.zeros(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        forward(h, layers, codes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward(h, layers, codes)
        monkeypatch.setattr(launch, "_overlaps", lambda device: False)  # each launch waits for the one before it
        for _ in range(REPLAYS):
            given = normal(generator, tokens, HIDDEN).bfloat16().cuda()
            alone = given.clone()
            forward(alone, layers, codes)
            h.copy_(given)
            graph.replay()
            assert torch.equal(h, alone), f"TEST_SEED={SEED}"
            assert bool(h.isfinite().all())
