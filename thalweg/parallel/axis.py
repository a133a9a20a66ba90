"""An axis is a group of ranks that compute parts of the same tensors, and the collectives between them.

An axis of size 1 is the identity. Every reduction adds in rank order, in float32, so that all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from thalweg.core.errors import UnsupportedConfig

if TYPE_CHECKING:
    from thalweg.parallel.peer_exchange import PeerExchange  # needs Triton
    from thalweg.parallel.sum_and_norm import SumAndNorm

BLOCK = 128  # rows or columns that stay together where a width is cut: tiles of products and FP8 blocks are as wide


class Axis(Protocol):
    """A group of ranks. Every rank calls the same collectives in the same order with tensors of the same shape and
    dtype.
    """

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int:
        """This process's position in the group, from 0."""

    @property
    def sum_and_norm(self) -> SumAndNorm | None:
        """What adds and norms few rows in one launch, where GPUs have it."""

    @property
    def exchange(self) -> PeerExchange | None:
        """What dispatches rows and combines their results in one launch each, where GPUs have it."""

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over all ranks in float32."""

    def add_(self, x: Tensor, partial: Tensor) -> None:
        """x += the sum over all ranks, in float32 and rounded once. x has the same bits on all ranks, also then."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: the tensors of all ranks, in rank order."""

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        """partial [size, ...]: entry r is this rank's contribution to rank r. Returns the float32 sum of what is for
        this rank.
        """

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [size, ...]: entry r is for rank r. Returns what all ranks have for this one, in rank order."""

    def transfer(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Sends tensors to ranks and fills others from ranks. Those of a pair of ranks arrive in the order in which
        they were sent. No rank sends to itself.
        """

    def post(self, x: Tensor, ranks: Sequence[int]) -> Callable[[], object]:
        """Sends a tensor to ranks without waiting for them. It must not change until the returned function has, which
        waits until all have it.
        """


class SingleRank:
    """The axis of size 1."""

    size = 1
    rank = 0
    sum_and_norm = exchange = None

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial.float()

    def add_(self, x: Tensor, partial: Tensor) -> None:
        x.add_(partial)  # in the wider type

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        return partial[0].float()

    def all_to_all(self, x: Tensor) -> Tensor:
        return x

    def transfer(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        assert not sends and not receives, "there is no other rank"

    def post(self, x: Tensor, ranks: Sequence[int]) -> Callable[[], object]:
        assert not ranks, "there is no other rank"
        return lambda: None


SINGLE = SingleRank()


MAX_TEXT = 1000  # bytes


def gather_texts(axis: Axis, text: str, device: torch.device) -> list[str]:
    """The texts of all ranks, cut to MAX_TEXT bytes."""
    data = text.encode()[:MAX_TEXT].ljust(MAX_TEXT, b"\0")
    texts = axis.all_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device))
    return [bytes(one.tolist()).rstrip(b"\0").decode(errors="ignore") for one in texts]


def gather_number(axis: Axis, value: float, device: torch.device) -> list[float]:
    """The values of all ranks, on every rank."""
    if axis.size == 1:
        return [value]
    return list(axis.all_gather(torch.tensor(value, dtype=torch.float64, device=device)).tolist())


def share_of(units: int, axis: Axis, what: str, may_repeat: bool = False) -> range:
    """The units (heads, experts) of this rank: equally many on each. may_repeat: with fewer units than ranks,
    neighbouring ranks hold the same one, as of key heads; the outputs of others are summed over ranks.

    Raises UnsupportedConfig, with the sizes that divide, if they cannot be shared equally. what: their name in that
    error.
    """
    size, rank = axis.size, axis.rank
    if units >= size and units % size == 0:
        each = units // size
        return range(rank * each, (rank + 1) * each)
    if may_repeat and units < size and size % units == 0:
        unit = rank * units // size
        return range(unit, unit + 1)
    legal = [n for n in range(1, units + 1) if units % n == 0]
    raise UnsupportedConfig(f"{units} {what} cannot be shared by {size} ranks: use one of {', '.join(map(str, legal))}")


def width_of(width: int, axis: Axis) -> range:
    """The columns of a layer's inner width on this rank: whole blocks of 128, as even as they can be, the first ranks
    with one more.

    A width with fewer blocks than ranks is cut into smaller pieces, down to single columns.
    """
    block = BLOCK
    while block > 1 and (width % block or width // block < axis.size):
        block //= 2
    blocks, rank = width // block, axis.rank
    each, more = divmod(blocks, axis.size)
    first = rank * each + min(rank, more)
    return range(first * block, (first + each + (rank < more)) * block)


def vocabulary_of(vocab: int, axis: Axis) -> range:
    """The token ids whose embedding or head rows are on this rank: equally many on each, but for the last ones."""
    each = -(-vocab // axis.size)
    return range(min(axis.rank * each, vocab), min((axis.rank + 1) * each, vocab))
