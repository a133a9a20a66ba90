"""Grouped-query attention as a layer: the kernel that stores and attends at once, FP8 pages, FlashAttention 3 for
prompts, equal bits in deterministic mode, and SwiGLU within a few-row product.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.gpu.shapes import KERNELS, Part, batches, facts, kernel_layers
from tests.seed import SEED
from thalweg.batch.batch import Attend
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.attend.args import ContextChunk, DecodeRows, KvPlanes, KvWrite
from thalweg.kernels.attend.case import page_table
from thalweg.kernels.case import normal
from thalweg.kernels.gqa import fa3
from thalweg.layers.residual import SingleStream
from thalweg.memory.planes import Planes

pytest.importorskip("triton")
TOKENS = 3000  # whose projections a sequence is made of; the same for every way of computing it


def quantized(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "norms"), [(28, 4, 128, False), (16, 8, 128, True), (40, 1, 64, False)]
)
def test_storing_and_attending_at_once_is_doing_one_after_the_other(
    heads: int, kv_heads: int, dim: int, norms: bool, fp8: bool, splits: int, cuda: torch.device
) -> None:
    from thalweg.kernels.attend.triton import merge
    from thalweg.kernels.gqa import triton as gqa
    from thalweg.kernels.rope.triton import QkNorms, gqa_write

    generator, contexts = torch.Generator().manual_seed(SEED), (1, 64, 65, 700)
    table, pages = page_table(generator, contexts)
    positions = torch.tensor(contexts) - 1
    write = table[torch.arange(4), positions // 64].long() * 64 + positions % 64
    table, positions, write = table.to(cuda), positions.to(cuda), write.to(cuda)
    drawn = normal(generator, 2, pages, 64, kv_heads, dim, dtype=torch.bfloat16).to(cuda)
    scales = torch.tensor([0.02], device=cuda), torch.tensor([0.03], device=cuda)
    planes = [quantized(x, s) if fp8 else x.clone() for x, s in zip(drawn, scales, strict=True)]
    qkv = normal(generator, 4, heads + 2 * kv_heads, dim, dtype=torch.bfloat16).to(cuda)
    angles = (normal(generator, 800, dim // 2) * 9).to(cuda)
    cos, sin = angles.cos(), angles.sin()
    query_norm, key_norm = (normal(generator, dim).to(cuda) for _ in range(2)) if norms else (None, None)
    given = scales if fp8 else (None, None)
    rows, turn = DecodeRows(table, positions), KvWrite(cos, sin, positions, write)
    norms = QkNorms(query_norm, key_norm)

    def split() -> tuple[Tensor, ...]:
        return torch.split(qkv.clone(), [heads, kv_heads, kv_heads], 1)

    stored, (query, key, value) = [x.clone() for x in planes], split()
    gqa_write(query, key, value, norms, turn, KvPlanes(*stored, *given))
    exact = merge(*gqa.decode(query, KvPlanes(*stored, *given), rows, scale=0.09, splits=splits))
    query, key, value = split()
    new = gqa.NewTokens(key, value, turn, norms)
    got = merge(*gqa.decode(query, KvPlanes(*planes, *given), rows, scale=0.09, splits=splits, new=new))
    for mine, theirs in zip(planes, stored, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert float((got.float() - exact.float()).abs().max() / exact.float().abs().max()) < 0.01, f"TEST_SEED={SEED}"


@pytest.mark.parametrize("fp8", [False, True])
def test_cached_keys_are_gathered_row_by_row(fp8: bool, cuda: torch.device) -> None:
    from thalweg.kernels.gqa import triton as gqa

    generator = torch.Generator().manual_seed(SEED)
    planes = normal(generator, 2, 9, 64, 4, 128, dtype=torch.bfloat16).to(cuda)
    table = torch.tensor([[3, 1, 4], [2, 5, 8], [7, 0, 0]], dtype=torch.int32, device=cuda)
    starts, first = (torch.tensor(x, dtype=torch.int32, device=cuda) for x in ([0, 70, 83, 83], [64, 128, 64]))
    scales = torch.tensor([0.02], device=cuda), torch.tensor([0.03], device=cuda)
    kept = [quantized(x, s) if fp8 else x for x, s in zip(planes, scales, strict=True)]
    kv = KvPlanes(*kept, *(scales if fp8 else ()))
    got = gqa.gather(kv, table, ContextChunk(first, starts, 83, 70))
    for made, plane, scale in zip(got, kept, scales, strict=True):
        exact = torch.cat([plane[[1, 4]].flatten(0, 1)[:70], plane[8][:13]])
        assert torch.equal(made, (exact.float() * scale).bfloat16() if fp8 else exact)


class Fixed:
    """A seam that gives attention fixed projections of the step's tokens, and keeps what it makes of them."""

    def __init__(self, qkv_TX: Tensor) -> None:
        self.qkv_TX, self.out = qkv_TX, qkv_TX

    def __call__(self, attend: Attend, step: Any, *inputs: Tensor) -> Tensor:
        self.out = attend(step, self.qkv_TX.clone())
        return self.out


class Sequences:
    """A layer of 28 heads over 4, and the projections of sequences' tokens; a sequence is its first page."""

    def __init__(self, choice: KernelConfig, device: torch.device) -> None:
        of = facts("qwen2")
        layers = kernel_layers(of, device, choice)
        self.device, self.layer = device, layers.gqa(of, 0, "attention")
        self.metadata = layers.metadata(of, None)  # type: ignore[arg-type]
        self.planes = Planes(tuple(layers.plane(name, 0, 512, "heads") for name in ("key", "value")), 64, device)
        generator = torch.Generator(device).manual_seed(1)
        self.qkv = torch.randn(4, TOKENS, 36 * 128, generator=generator, device=device).bfloat16()

    def step(self, *rows: Part) -> list[Tensor]:
        """What attention makes of each row."""
        _, batch = batches(list(rows), self.device, torch.Generator().manual_seed(1), 1000)
        graph_break = Fixed(torch.cat([self.qkv[page // 16, at : at + n] for page, at, n in rows]))
        batch = dataclasses.replace(batch, graph_break=graph_break)
        h = torch.zeros(len(batch.ids_T), 3584, dtype=torch.bfloat16, device=self.device)
        with torch.inference_mode():
            self.layer.add_to(SingleStream(h), h.clone(), self.metadata.build(batch, self.planes))
        return list(torch.split(graph_break.out, [n for _, _, n in rows]))


STEPS: tuple[tuple[Part, ...], ...] = (
    ((1, 0, 100), (17, 0, 300), (33, 0, 1)),
    ((1, 100, 1), (17, 300, 1), (33, 1, 1)),
    ((1, 101, 1), (17, 301, 70), (33, 2, 200), (49, 0, 65)),
    ((1, 102, 3), (17, 371, 3)),
)


@pytest.mark.parametrize(
    ("other", "bound"),
    [
        (msgspec.structs.replace(KERNELS, prefill="fa3"), 0.01),
        (msgspec.structs.replace(KERNELS, kv="fp8_e4m3"), 0.06),  # 2.6 % in keys and in values each
        (msgspec.structs.replace(KERNELS, kv="fp8_e4m3", prefill="fa3"), 0.06),
        (msgspec.structs.replace(KERNELS, deterministic=True), 0.01),
    ],
    ids=["fa3", "fp8", "fa3 on fp8", "deterministic"],
)
def test_other_kernels_agree(other: KernelConfig, bound: float, cuda: torch.device) -> None:
    if other.prefill == "fa3" and not fa3.available():
        pytest.skip("fa3-fwd is not installed, or this is no Hopper")
    own, its = Sequences(KERNELS, cuda), Sequences(other, cuda)
    for rows in STEPS:
        for row, exact, got in zip(rows, own.step(*rows), its.step(*rows), strict=True):
            error = float((got.float() - exact.float()).norm() / exact.float().norm())
            assert error < bound, f"{row}: {error:.4f}"


def test_a_token_has_the_same_bits_however_it_is_computed(cuda: torch.device) -> None:
    """Alone, in a batch, in chunks, as the continuation of cached pages, and as a decode row."""
    choice = msgspec.structs.replace(KERNELS, deterministic=True)
    whole = Sequences(choice, cuda).step((1, 0, 300))[0]
    alone = Sequences(choice, cuda)
    chunks = [alone.step((1, 0, 130)), alone.step((1, 130, 1)), alone.step((1, 131, 169))]
    assert torch.equal(torch.cat([chunk[0] for chunk in chunks]), whole)
    batch = Sequences(choice, cuda)
    batch.step((17, 0, 500), (33, 0, 70), (1, 0, 128))
    assert torch.equal(batch.step((17, 500, 1), (33, 70, 1), (1, 128, 1))[2], whole[128:129])
    assert torch.equal(batch.step((17, 501, 1), (1, 129, 171))[1], whole[129:])
    assert torch.equal(batch.step((1, 128, 172))[0], whole[128:]), "the pages before are a prefix hit"


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 8])
@pytest.mark.parametrize(("inner", "inputs"), [(18944, 3584), (516, 1024)])
def test_swiglu_within_the_product_has_the_bits_of_swiglu_after_it(
    inner: int, inputs: int, tokens: int, normed: bool, cuda: torch.device
) -> None:
    from thalweg.kernels.gemm import triton as gemm
    from thalweg.kernels.gemm.epilogue import Epilogue
    from thalweg.kernels.norm.triton import LazyNorm
    from thalweg.kernels.silu_mul.triton import silu_mul

    generator = torch.Generator(cuda).manual_seed(SEED)
    x = torch.randn(tokens, inputs, generator=generator, device=cuda).bfloat16()
    w = torch.randn(2 * inner, inputs, generator=generator, device=cuda).mul_(inputs**-0.5).bfloat16()
    bias = torch.randn(2 * inner, generator=generator, device=cuda).bfloat16()
    given = LazyNorm(x, torch.rand(inputs, generator=generator, device=cuda), 1e-6) if normed else x
    assert gemm.can_fuse_swiglu(tokens, *w.shape)
    assert torch.equal(gemm.swiglu(given, w, bias), silu_mul(gemm.linear(given, w, Epilogue(bias)))), (
        f"TEST_SEED={SEED}"
    )
