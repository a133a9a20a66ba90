"""One-sided dispatch and combine between the ranks of an axis, one launch each, on the GPUs of one host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from thalweg.kernels.exchange import triton as exchange
from thalweg.kernels.exchange.ref import MAX_ROWS, bytes_for, row_words
from thalweg.kernels.exchange.triton import Destinations
from thalweg.parallel.symmetric import SymmetricMemory, slowest_microseconds

if TYPE_CHECKING:
    from thalweg.parallel.process_axis import ProcessAxis

MEASURED = (1, 16, 64, 128, 256, 512)  # rows


class PeerExchange:
    """Every rank of the axis calls it with as many rows, in the same order."""

    def __init__(
        self, axis: ProcessAxis, group: dist.ProcessGroup, row_bytes: int, hidden: int, device: torch.device
    ) -> None:
        """row_bytes: the most of a row that is sent. All ranks call it at the same time, before anything is captured.
        Raises UnsupportedConfig where GPUs cannot address each other's memory.
        """
        self.axis, self.hidden, self.device, self.rows = axis, hidden, device, MAX_ROWS
        self.words, _ = sizes = row_words(row_bytes, hidden)
        self._memories = [SymmetricMemory(group, bytes_for(axis.size, MAX_ROWS, words), device) for words in sizes]
        self._sending, self._returning = (
            exchange.PeerRows.of(memory.addresses, axis.rank, device, rows=MAX_ROWS, words=words)
            for memory, words in zip(self._memories, sizes, strict=True)
        )
        self._everyone: dict[int, Destinations] = {}  # by rows

    def takes(self, rows: int, row_bytes: int) -> bool:
        return 0 < rows <= self.rows and row_bytes % 4 == 0 and row_bytes <= 4 * self.words

    def dispatch(
        self, bytes_NB: Tensor, marked: int, goes_RN: Tensor | None = None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Sends rows of bytes. → the rows of all ranks, [R, N, B], and the function that combines results [R, N, H] of
        these rows into float32 [N, H], the sums over ranks; results are sent in bf16.

        goes: bool, whether a row goes to a rank; None: to all. marked: how many int32 numbers at the beginning of an
        empty row are -1.
        """
        to = self._to_all(len(bytes_NB)) if goes_RN is None else Destinations.of(goes_RN)
        received_RNW, arrived_R = exchange.dispatch(bytes_NB.view(torch.int32), to, self._sending, marked)

        def combine(results_RNH: Tensor) -> Tensor:
            results_RNH = results_RNH.to(torch.bfloat16).contiguous()
            return exchange.combine(results_RNH, to, arrived_R, self._returning)

        return received_RNW.view(torch.uint8), combine

    def _to_all(self, rows: int) -> Destinations:
        if rows not in self._everyone:
            goes_RN = torch.ones(self.axis.size, rows, dtype=torch.bool, device=self.device)
            self._everyone[rows] = Destinations.of(goes_RN)
        return self._everyone[rows]

    def measure(self) -> dict[int, dict[str, float]]:
        """Chooses the most rows, equally on all ranks. → microseconds of both ways by rows, of the slowest rank."""
        times: dict[int, dict[str, float]] = {}
        for rows in MEASURED:
            bytes_NB = torch.zeros(rows, 4 * self.words, dtype=torch.uint8, device=self.device)
            results_RNH = torch.zeros(self.axis.size, rows, self.hidden, device=self.device)  # experts add in float32
            self._to_all(rows)  # made before a graph is captured
            ways = {"one-sided": self._one_sided, "library": self._by_library}
            times[rows] = {
                name: slowest_microseconds(self.axis, partial(way, bytes_NB, results_RNH), self.device)
                for name, way in ways.items()
            }
        self.rows = 0
        for rows, by_way in times.items():
            if by_way["one-sided"] > by_way["library"]:
                break
            self.rows = rows
        return times

    def _one_sided(self, bytes_NB: Tensor, results_RNH: Tensor) -> Tensor:
        return self.dispatch(bytes_NB, 0)[1](results_RNH)

    def _by_library(self, bytes_NB: Tensor, results_RNH: Tensor) -> Tensor:
        self.axis.all_gather(bytes_NB)
        return self.axis.reduce_scatter(results_RNH)
