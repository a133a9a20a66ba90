"""The sum over tensor-parallel ranks on the GPUs of one host, with residual addition and RMSNorm, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.kernels.all_reduce import triton as all_reduce
from thalweg.kernels.norm.triton import LazyNorm, ReadyNorm, rms_norm
from thalweg.kernels.peer_words import PROGRAMS
from thalweg.parallel.axis import Axis
from thalweg.parallel.symmetric import SymmetricMemory, slowest_microseconds

MAX_ROWS = 512  # memory: 2 (W + 1) rows of twice the width, 150 MB for 4 ranks and rows of 7,168
MEASURED = (1, 4, 16, 32, 64, 128, 256, 512)  # rows

SumAndNormCall = Callable[[Tensor, Tensor], object]  # (partial, x)


class SumAndNorm:
    """x + the sum over ranks, and its norm. Every rank calls it with as many rows, in the same order.

    Both of its ways add in the same order, so a row has the same bits whatever the number of rows.
    """

    def __init__(self, axis: Axis, group: dist.ProcessGroup, width: int, device: torch.device) -> None:
        """All ranks call it at the same time, before anything is captured. Raises UnsupportedConfig where GPUs cannot
        address each other's memory.
        """
        count = all_reduce.bytes_for(axis.size, MAX_ROWS, width)
        self._memory = SymmetricMemory(group, count, device)
        self._buffers = all_reduce.PeerBuffers.of(self._memory.addresses, axis.rank, device, rows=MAX_ROWS, width=width)
        self.axis, self.width, self.device = axis, width, device
        self.with_codes = False  # whether readers of the norm multiply it in e4m3
        self.rows, self.one_shot_rows = MAX_ROWS, PROGRAMS  # the most of a call, and of a one-shot one

    def takes(self, x: object) -> bool:
        """Whether the sum is computed here before this norm. x: what `Norm.lazy` gives."""
        if not isinstance(x, LazyNorm) or x.x_TH.dtype != torch.bfloat16:
            return False
        return 0 < len(x) <= self.rows and x.x_TH.shape[1] == self.width

    def __call__(self, partial_TH: Tensor, x: LazyNorm) -> tuple[Tensor, ReadyNorm]:
        """partial [T, H]: this rank's part of the sum. → x + sum in new memory, and its norm."""
        return self._call(partial_TH, x.x_TH, x.weight_H, x.eps, two_shot=len(x) > self.one_shot_rows)

    def _call(
        self, partial_TH: Tensor, x_TH: Tensor, weight_H: Tensor, eps: float, *, two_shot: bool
    ) -> tuple[Tensor, ReadyNorm]:
        x_TH, rows_TH, codes_TH, scales_TG = all_reduce.add_norm(
            partial_TH.to(x_TH.dtype).contiguous(),
            x_TH.contiguous(),
            weight_H,
            eps,
            self._buffers,
            two_shot=two_shot,
            with_codes=self.with_codes,
        )
        quantized = None if codes_TH is None or scales_TG is None else (codes_TH, scales_TG)
        return x_TH, ReadyNorm(rows_TH, quantized)

    def measure(self) -> dict[int, dict[str, float]]:
        """Chooses the ways by row count, equally on all ranks. → microseconds of each way by rows, of the slowest
        rank.
        """
        weight_H = torch.ones(self.width, device=self.device)
        times: dict[int, dict[str, float]] = {}
        for rows in MEASURED:
            partial_TH = torch.zeros(rows, self.width, dtype=torch.bfloat16, device=self.device)
            x_TH = torch.zeros_like(partial_TH)
            times[rows] = {
                name: slowest_microseconds(self.axis, partial(way, partial_TH, x_TH), self.device)
                for name, way in self._ways(rows, weight_H)
            }
        self.one_shot_rows, self.rows = limits(times)
        return times

    def _ways(self, rows: int, weight_H: Tensor) -> Iterator[tuple[str, SumAndNormCall]]:
        def by_library(partial_TH: Tensor, x_TH: Tensor) -> Tensor:
            self.axis.add_(x_TH, partial_TH)
            return rms_norm(x_TH, weight_H, 1e-6)

        if rows <= PROGRAMS:
            yield "one-shot", partial(self._call, weight_H=weight_H, eps=1e-6, two_shot=False)
        yield "two-shot", partial(self._call, weight_H=weight_H, eps=1e-6, two_shot=True)
        yield "library", by_library


def limits(times: dict[int, dict[str, float]]) -> tuple[int, int]:
    """(most rows of a one-shot call, most rows of any call): up to where another way is faster."""
    one_shot = most = 0
    for rows, by_way in times.items():
        if by_way.get("one-shot", torch.inf) > by_way["two-shot"]:
            break
        one_shot = rows
    for rows, by_way in times.items():
        if min(us for way, us in by_way.items() if way != "library") > by_way["library"]:
            break
        most = rows
    return one_shot, most
