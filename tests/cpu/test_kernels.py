"""Every backend of every operation on the cases of its case.py, and FP8 arithmetic that no case covers."""

from __future__ import annotations

import pytest
import torch

from tests.seed import SEED
from thalweg.attention.selection import RandomSelection, select_top_k
from thalweg.kernels.case import KernelCase, Run
from thalweg.kernels.catalog import OPERATIONS
from thalweg.kernels.fp8_block.ref import dequantize, quantize, quantize_rows, scales_of
from thalweg.kernels.temperature import case as temperature
from thalweg.kernels.topk_topp import case as topk_topp


def every_case() -> list[object]:
    cases = []
    for operation, offered in OPERATIONS.items():
        for case in offered.cases(torch.Generator().manual_seed(SEED)):
            cases += [
                pytest.param(case, run, id=f"{operation}-{name}-{case.name}") for name, run in offered.backends.items()
            ]
    return cases


@pytest.mark.parametrize(("case", "run"), every_case())
def test_backend_meets_the_definition(case: KernelCase, run: Run) -> None:
    with torch.inference_mode():
        errors = case.errors(run(**case.fresh_inputs()))
    assert max(errors) <= case.tolerance, f"TEST_SEED={SEED}"


def test_cases_that_are_timed_have_a_cost() -> None:
    for name, offered in OPERATIONS.items():
        if not any(offered.sizes(torch.device("cpu"))):
            assert all(case.flops and case.bytes for case in offered.cases(torch.Generator().manual_seed(SEED))), name


def test_a_wrong_result_is_noticed() -> None:
    case = KernelCase("", {}, (torch.tensor([1.0, 2.0]),), 1e-6, 1, 1)
    assert case.errors((torch.tensor([1.0, 2.1]),))[0] == pytest.approx(0.05, rel=1e-3)
    assert case.errors((torch.tensor([1.0, torch.nan]),))[0] == torch.inf
    assert case.errors((torch.tensor([[1.0, 2.0]]),))[0] == torch.inf
    masked = KernelCase("", {}, (torch.tensor([1.0, -torch.inf]),), 1e-6, 1, 1)
    assert masked.errors((torch.tensor([1.0, -torch.inf]),))[0] == 0.0
    assert masked.errors((torch.tensor([1.0, -1e9]),))[0] == torch.inf


def test_a_wrong_sampled_token_is_noticed() -> None:
    """With the same score, too."""
    for case in temperature.cases(torch.Generator().manual_seed(SEED)):
        left = case.exact[0]
        noisy = left + topk_topp.noise(case.inputs["ints_EI"], left.shape[1])
        assert max(case.errors(temperature.with_best(left, noisy))) <= case.tolerance
        assert min(case.errors(temperature.with_best(left, noisy.roll(1, 1)))[2:]) > case.tolerance


def test_exact_powers_of_two_stay() -> None:
    """ue8m0 rounds up: 2^k stays 2^k, anything above it doubles."""
    exponents = torch.arange(-8, 9).float()
    assert torch.equal(scales_of(448 * exponents.exp2(), True), exponents.exp2())
    assert torch.equal(scales_of(448 * exponents.exp2() * 1.0001, True), (exponents + 1).exp2())


def test_zero_blocks_have_a_floor_and_large_values_saturate() -> None:
    q, scale = quantize_rows(torch.zeros(2, 256), 128, False)
    assert torch.equal(scale, torch.full((2, 2), 1e-4 / 448)) and not q.float().any()
    x = torch.tensor([[1000.0] + [0.5] * 127])
    q, scale = quantize_rows(x, 128, False)
    assert q.float().max() == 448.0 and scale[0, 0] == pytest.approx(1000 / 448)
    q, _ = quantize_rows(-x, 128, True)
    assert q.float().min() >= -448.0


@pytest.mark.parametrize("power_of_two", [False, True])
def test_quantisation_error_is_the_published_one(power_of_two: bool) -> None:
    """2.6 % of the norm for Gaussian weights in 128 × 128 blocks."""
    w = torch.randn(512, 512, generator=torch.Generator().manual_seed(1))
    q, scale = quantize(w, (128, 128), power_of_two)
    assert q.dtype == torch.float8_e4m3fn and scale.shape == (4, 4)
    error = (dequantize(q, scale, (128, 128), torch.float32) - w).norm() / w.norm()
    assert 0.024 < float(error) < 0.029


def test_random_choice_is_uniform_over_candidates_and_repeatable() -> None:
    scores = torch.randn(4000, 12).masked_fill_(torch.arange(12) >= 9, -torch.inf)
    choice = RandomSelection(seed=3)
    chosen = torch.zeros_like(scores).scatter_(1, choice(scores, 3), 1.0)
    assert bool((chosen.sum(1) == 3).all()) and not chosen[:, 9:].any()
    assert float((chosen[:, :9].mean(0) - 1 / 3).abs().max()) < 0.04
    assert torch.equal(RandomSelection(3)(scores, 3), RandomSelection(3)(scores, 3))
    assert not torch.equal(RandomSelection(3)(scores, 3).sort(-1).values, select_top_k(scores, 3).sort(-1).values)
