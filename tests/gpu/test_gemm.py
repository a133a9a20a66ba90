"""Few-row products on the GPU: every tile of the tables against float64, with and without norm, bias and residual."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.seed import SEED
from thalweg.kernels.case import KernelCase, normal
from thalweg.kernels.catalog import OPERATIONS
from thalweg.kernels.fp8_block.ref import dequantize
from thalweg.kernels.fp8_block.ref import quantize as quantize_blocks

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a CUDA device and triton", allow_module_level=True)

from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.gemm.epilogue import Epilogue
from thalweg.kernels.norm.triton import LazyNorm, rms_norm
from thalweg.kernels.quantize.triton import quantize

EPS = 1e-6


@pytest.fixture(autouse=True)
def poison() -> object:
    """torch.empty gives NaN: what a kernel forgot to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape: int) -> Tensor:
    return normal(torch.Generator().manual_seed(SEED + sum(shape)), *shape).cuda()


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).abs().max() / exact.abs().max())


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """float64."""
    wide = x.double()
    return wide * torch.rsqrt((wide * wide).mean(1, keepdim=True) + EPS) * weight


@pytest.mark.parametrize(
    "case", OPERATIONS["gemm"].cases(torch.Generator().manual_seed(SEED)), ids=lambda case: case.name
)
def test_triton_meets_the_definition(case: KernelCase) -> None:
    with torch.inference_mode():
        errors = case.errors(OPERATIONS["gemm"].backends["triton"](**case.fresh_inputs()))
    assert max(errors) <= case.tolerance, f"TEST_SEED={SEED}"


# rows 1, 8, 16: one of each BLOCK_M; K: all loaded ahead, a loop over it, an odd number of steps; N: not a multiple of
# the tile, and many rows
@pytest.mark.parametrize("rows", [1, 2, 8, 11, 16, 40])
@pytest.mark.parametrize(("n", "k"), [(1000, 2048), (520, 1024), (72, 3584), (16400, 2048), (16392, 3072)])
def test_bf16_products_meet_float64(rows: int, n: int, k: int) -> None:
    x, w = draw(rows, 2 * k)[:, :k].bfloat16(), (draw(n, k) * k**-0.5).bfloat16()
    norm, bias, residual = draw(k).abs() + 0.5, draw(n).bfloat16(), draw(rows, n).bfloat16()
    with torch.inference_mode():
        assert error(gemm.linear(x, w), x.double() @ w.double().t()) < 1e-2, f"TEST_SEED={SEED}"
        assert gemm.linear(x, w, Epilogue(dtype=torch.float32)).dtype == torch.float32
        exact = normed(x, norm) @ w.double().t()
        assert error(gemm.linear(LazyNorm(x, norm, EPS), w), exact) < 1e-2, f"TEST_SEED={SEED}"
        exact = x.double() @ w.double().t() + bias.double() + residual.double()
        got = gemm.linear(x, w, Epilogue(bias, residual))
        assert got is residual and error(got, exact) < 1e-2, f"TEST_SEED={SEED}"


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 31])
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (300, 1536), (7168, 2048), (17000, 1024), (130, 256), (200, 640)])
def test_fp8_products_meet_float64(rows: int, n: int, k: int) -> None:
    x = draw(rows, k).bfloat16()
    # block scales far from one another, so that a wrong one shows
    spread = torch.rand(-(-n // 128), k // 128, generator=torch.Generator().manual_seed(SEED)).cuda() * 9 + 1
    w = draw(n, k) * k**-0.5 * spread.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    codes, scale = quantize_blocks(w, (128, 128), False)
    wide = dequantize(codes, scale, (128, 128), torch.float32).double()
    norm, residual = draw(k).abs() + 0.5, draw(rows, n).bfloat16()
    with torch.inference_mode():
        assert error(gemm.linear_fp8(x, codes, scale), x.double() @ wide.t()) < 1e-2, f"TEST_SEED={SEED}"
        got = gemm.linear_fp8(LazyNorm(x, norm, EPS), codes, scale)
        assert error(got, normed(x, norm) @ wide.t()) < 1e-2, f"TEST_SEED={SEED}"
        exact = x.double() @ wide.t() + residual.double()
        assert error(gemm.linear_fp8(x, codes, scale, Epilogue(residual_MN=residual)), exact) < 1e-2, (
            f"TEST_SEED={SEED}"
        )


def test_a_row_does_not_depend_on_the_others_of_its_tile() -> None:
    x, w = draw(8, 2048).bfloat16(), (draw(777, 2048) * 0.02).bfloat16()
    x[5] = torch.nan
    with torch.inference_mode():
        alone, among = gemm.linear(x[:2], w), gemm.linear(x, w)
    assert torch.equal(alone, among[:2]), f"TEST_SEED={SEED}"
    assert among[5].isnan().all()


def test_a_norm_is_the_same_computed_or_not() -> None:
    x, weight = draw(3, 2048).bfloat16(), draw(2048).abs()
    with torch.inference_mode():
        assert torch.equal(LazyNorm(x, weight, EPS).rows(), rms_norm(x, weight, EPS))


@pytest.mark.parametrize(("rows", "width"), [(1, 7168), (33, 1536), (130, 256)])
def test_a_norm_quantised_at_once_is_the_same(rows: int, width: int) -> None:
    x, weight = draw(rows, 2 * width).bfloat16()[:, :width], draw(width).abs()
    with torch.inference_mode():
        codes, scales = LazyNorm(x, weight, EPS).codes()
        apart, apart_scales = quantize(rms_norm(x, weight, EPS))
    assert torch.equal(codes.view(torch.uint8), apart.view(torch.uint8)), f"TEST_SEED={SEED}"
    assert torch.equal(scales, apart_scales), f"TEST_SEED={SEED}"
