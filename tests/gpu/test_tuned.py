"""Tiles found by `thalweg tune` replace the tables' and are right; sized cases agree with their references."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from thalweg.bench.kernels import KernelBenchmark, KernelWork, cloned, difference
from thalweg.core.kernels import TunedKernel
from thalweg.kernels.case import TimedCase
from thalweg.kernels.catalog import OPERATIONS
from thalweg.kernels.tuned import TUNED, flat

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a CUDA device and triton", allow_module_level=True)

from thalweg.bench.tune import Tuner
from thalweg.kernels.experts import tuning as experts
from thalweg.kernels.gemm import triton as gemm
from thalweg.kernels.gemm import tuning

CUDA = torch.device("cuda")
TOP = {"read": 3e12, "float32": 5e13, "bf16": 8e14, "fp8": 1.5e15}
SMALL = 1 << 25  # bytes of an ideal implementation


@pytest.fixture(autouse=True)
def nothing_tuned() -> Iterator[None]:
    yield
    TUNED.use(())


def test_a_tuned_tile_takes_the_tables_place_and_gives_the_same() -> None:
    n, k = 200, 2048
    x, w = torch.randn(1, k, device=CUDA).bfloat16(), (torch.randn(n, k, device=CUDA) * k**-0.5).bfloat16()
    before, tile = gemm.linear(x, w), gemm.tabled(1, n, k, 2)
    assert tile is not None
    other = next(one for one in tuning.candidates(tile, 1, k, 2) if one != tile)
    TUNED.use([TunedKernel("gemv", (n, k, 2, 0), flat(tile), flat(other))])
    assert gemm.gemv_tile(1, n, k, 2) == other and gemm.gemv_tile(1, n + 8, k, 2) == gemm.tabled(1, n + 8, k, 2)
    assert difference((gemm.linear(x, w),), (before,)) < 1e-2


@pytest.mark.parametrize("which", range(2), ids=("product", "experts"))
def test_a_search_ends_with_a_choice_that_is_right(which: int) -> None:
    search = next((tuning.searches(200, 2048, 2), experts.searches(6, 256, 128, 3, 1, False))[which])
    outcome = Tuner(CUDA, 6, 1 << 24).run(search)
    assert outcome.found.candidates >= 2 and 0 < outcome.found.us <= outcome.found.default_us


def small() -> list[tuple[str, TimedCase]]:
    return [
        (name, case)
        for name, operation in OPERATIONS.items()
        for case in operation.sizes(CUDA)
        if len(case.backends) > 1
        and not name.startswith("experts")
        and "4096" not in case.name
        and "prefill" not in case.name
    ]


@pytest.mark.parametrize(("name", "case"), small(), ids=lambda one: one if isinstance(one, str) else one.name)
def test_backends_of_a_size_agree_with_their_reference(name: str, case: TimedCase) -> None:
    generator = torch.Generator(CUDA).manual_seed(5)
    given = case.draw(generator, None)
    if case.cost(given)[1] > SMALL:
        pytest.skip("timed by `thalweg bench kernels`, which compares first")
    first, *others = case.backends
    with torch.inference_mode():
        expected = case.compared(case.backends[first](**cloned(given)))
        for backend in others:
            assert difference(case.compared(case.backends[backend](**cloned(given))), expected) <= case.tolerance, (
                backend
            )


def test_a_backend_is_timed_in_a_graph() -> None:
    case = next(case for case in OPERATIONS["norm"].sizes(CUDA))
    (row,) = KernelBenchmark(CUDA, TOP, 0.01).rows(KernelWork("norm", case, False), ["triton"])
    assert not row.failed and row.how == "graph" and 0 < row.share < 1
