"""Sums over ranks that the residual stream asks for: of few and of many rows, by the library and by one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.cpu.ranks import Rendezvous, on_ranks
from thalweg.kernels.all_reduce import ref
from thalweg.kernels.norm.triton import LazyNorm, ReadyNorm
from thalweg.layers.interface import Norm
from thalweg.layers.residual import ShardedStream
from thalweg.parallel.axis import SINGLE
from thalweg.parallel.process_axis import SHARED_ROWS, ProcessAxis
from thalweg.parallel.sum_and_norm import SumAndNorm, limits


@dataclass(eq=False)
class ThreadExchange(ProcessAxis):
    """A process axis whose ranks are threads: the library's two collectives, without the library."""

    rendezvous: Rendezvous = cast(Rendezvous, None)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.rendezvous.exchange(self.rank, "all_gather", x))

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([offer[self.rank] for offer in self.rendezvous.exchange(self.rank, "exchange", x)])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, SHARED_ROWS - 1, SHARED_ROWS, SHARED_ROWS + 3])
def test_many_rows_have_the_bits_of_few(size: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x_TH = torch.randn(rows, 24, generator=generator).bfloat16()
    partials_WTH = torch.randn(size, rows, 24, generator=generator).bfloat16()
    rendezvous = Rendezvous(size)

    def add(rank: int) -> Tensor:
        own = x_TH.clone()
        ThreadExchange(cast(Any, None), size, rank, True, rendezvous=rendezvous).add_(own, partials_WTH[rank])
        return own

    sums = on_ranks(size, add)
    want = ref.add_norm(partials_WTH, x_TH, torch.ones(24), 1e-6).x_TH
    assert all(torch.equal(total, want) for total in sums)
    shares_rows = size > 2 and rows >= SHARED_ROWS
    assert rendezvous.calls == (["exchange", "all_gather"] if shares_rows else ["all_gather"])


class GpuNorm:
    """A norm whose reader computes it."""

    weight = torch.linspace(0.5, 1.5, 8)

    def lazy(self, x_TH: Tensor) -> LazyNorm:
        return LazyNorm(x_TH, self.weight, 1e-6)


class CountedKernel(SumAndNorm):
    """As a kernel of two ranks would sum, for up to `rows` rows."""

    def __init__(self, rows: int, others_TH: Tensor) -> None:
        self.rows, self.width, self.others_TH, self.calls = rows, 8, others_TH, 0

    def __call__(self, partial_TH: Tensor, x: LazyNorm) -> tuple[Tensor, ReadyNorm]:
        self.calls += 1
        sums = ref.add_norm(torch.stack([partial_TH, self.others_TH]), x.x_TH, x.weight_H, x.eps)
        return sums.x_TH, ReadyNorm(sums.rows_TH)


class KernelAxis:
    size, rank = 2, 0

    def __init__(self, kernel: CountedKernel) -> None:
        self.sum_and_norm = kernel

    def add_(self, x: Tensor, partial: Tensor) -> None:
        x.add_(partial + self.sum_and_norm.others_TH)


@pytest.mark.parametrize(("most", "dtype"), [(3, torch.bfloat16), (2, torch.bfloat16), (3, torch.float32)])
def test_the_stream_takes_the_kernel_where_it_fits_and_once(most: int, dtype: torch.dtype) -> None:
    x_TH, partial_TH, others_TH = (torch.full((3, 8), value, dtype=dtype) for value in (1.0, 2.0, 4.0))
    kernel = CountedKernel(most, others_TH)
    stream = ShardedStream(x_TH, cast(Any, KernelAxis(kernel)))
    stream.pending_TH = partial_TH
    norm = cast(Norm, GpuNorm())
    first, second = stream.normed(norm), stream.normed(norm)
    fits = most == 3 and dtype == torch.bfloat16
    assert kernel.calls == fits and isinstance(first, ReadyNorm if fits else LazyNorm)
    assert isinstance(second, LazyNorm)  # nothing is pending the second time
    assert torch.equal(stream.value(), torch.full((3, 8), 7.0, dtype=dtype))


def test_ways_are_chosen_up_to_where_another_is_faster() -> None:
    times = {
        1: {"one-shot": 6.0, "two-shot": 9.0, "library": 20.0},
        16: {"one-shot": 11.0, "two-shot": 10.0, "library": 20.0},
        32: {"one-shot": 9.0, "two-shot": 12.0, "library": 20.0},
        128: {"one-shot": 40.0, "two-shot": 30.0, "library": 29.0},
        256: {"two-shot": 40.0, "library": 50.0},
    }
    assert limits(times) == (1, 32)


def test_one_rank_adds_alone() -> None:
    x_TH = torch.ones(2, 4).bfloat16()
    SINGLE.add_(x_TH, torch.full((2, 4), 0.5))
    assert torch.equal(x_TH, torch.full((2, 4), 1.5).bfloat16())
