"""Products of some dozen rows with wide weights, and the merge of split results, against float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.seed import SEED
from thalweg.kernels.case import normal

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a CUDA device and triton", allow_module_level=True)

from thalweg.kernels.attend.triton import merge
from thalweg.kernels.gemm.epilogue import Epilogue
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.small_batch_gemm import triton as small_batch_gemm


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


# rows: one, few and all of both tiles; columns: of each width, and some that end within a program
@pytest.mark.parametrize("rows", [9, 40, 64, 65, 128])
@pytest.mark.parametrize(("n", "k"), [(18944, 3584), (8200, 1024), (10944, 2048), (14336, 512)])
def test_pairs_meet_float64(rows: int, n: int, k: int) -> None:
    x, w = draw(rows, k).bfloat16(), (draw(2 * n, k) * k**-0.5).bfloat16()
    with torch.inference_mode():
        got = small_batch_gemm.swiglu(x, w)
    both = x.double() @ w.double().t()
    gate, up = (half.bfloat16().double() for half in both.split(n, 1))
    assert error(got, torch.nn.functional.silu(gate) * up) < 2e-2, f"TEST_SEED={SEED}"
    assert small_batch_gemm.swiglu_fits(rows, w)


@pytest.mark.parametrize("rows", [9, 64, 100])
@pytest.mark.parametrize(("n", "k"), [(65536, 1024), (65551, 512)])
def test_heads_meet_float64(rows: int, n: int, k: int) -> None:
    x, w = draw(rows, k).bfloat16(), (draw(n, k) * k**-0.5).bfloat16()
    with torch.inference_mode():
        got = small_batch_gemm.linear(x, w, Epilogue(dtype=torch.float32))
    assert error(got, x.double() @ w.double().t()) < 1e-5, f"TEST_SEED={SEED}"
    assert small_batch_gemm.linear_fits(rows, w)


@pytest.mark.parametrize("rows", [9, 33, 64])
@pytest.mark.parametrize(("n", "k"), [(3584, 18944), (2900, 12032)])
def test_a_product_of_parts_adds_to_what_is_there(rows: int, n: int, k: int) -> None:
    x, w, h = draw(rows, k).bfloat16(), (draw(n, k) * k**-0.5).bfloat16(), draw(rows, n).bfloat16()
    exact, out = x.double() @ w.double().t(), torch.full_like(h, torch.nan)
    added = h.double() + exact
    with torch.inference_mode():
        assert small_batch_gemm.split_k(x, w, Epilogue(residual_MN=h)) is h
        assert small_batch_gemm.split_k(x, w, Epilogue(out_MN=out)) is out
    assert error(h, added) < 1e-2 and error(out, exact) < 1e-2, f"TEST_SEED={SEED}"
    assert small_batch_gemm.split_k_fits(rows, w)


def test_results_are_the_same_each_time() -> None:
    x, w = draw(48, 1024).bfloat16(), draw(16384, 1024).bfloat16()
    with torch.inference_mode():
        first = small_batch_gemm.swiglu(x, w)
        assert all(torch.equal(first, small_batch_gemm.swiglu(x, w)) for _ in range(8)), f"TEST_SEED={SEED}"


@pytest.mark.parametrize(("tokens", "splits"), [(5, 2), (33, 3), (64, 4)])
def test_splits_are_joined_in_the_product_that_reads_them(tokens: int, splits: int) -> None:
    partial, lse = draw(tokens, 128, splits, 512).bfloat16(), draw(tokens, 128, splits)
    up = draw(128, 128, 512).bfloat16().transpose(1, 2)
    lse[2], lse[3, :, 1] = -torch.inf, -torch.inf  # a token that has seen nothing, a split that has not
    partial[3, :, 1] = torch.nan
    with torch.inference_mode():
        got = mla.merge_up_many(partial, lse, up)
        joined = merge(partial, lse).double()
    exact = torch.einsum("thr,hrv->thv", joined, up.double()).flatten(1)
    assert error(got, exact) < 1e-2, f"TEST_SEED={SEED}"
    assert mla.merges_many(tokens, 128, splits, 512) and not got[2].any()
