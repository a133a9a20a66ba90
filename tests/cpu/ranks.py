"""Ranks as threads of one process: axes whose collectives meet at a barrier, in rank order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from thalweg.config.context_parallel import INTERLEAVE
from thalweg.parallel.axis import SINGLE, Axis
from thalweg.parallel.layout import Layout

PATIENCE = 60.0  # seconds until a rank that waits alone fails

T = TypeVar("T")


@dataclass
class Rendezvous:
    """Where the ranks of one axis exchange tensors. Every call must be the same on all of them: name, shape, dtype."""

    size: int
    barrier: threading.Barrier = field(init=False)
    offered: list[Any] = field(init=False)
    calls: list[str] = field(default_factory=list)  # that were made, as rank 0 sees them

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=PATIENCE)
        self.offered = [None] * self.size

    def gather(self, rank: int, offer: Any) -> list[Any]:
        self.offered[rank] = offer
        self.barrier.wait()
        offers = list(self.offered)
        self.barrier.wait()
        return offers

    def exchange(self, rank: int, name: str, x: Tensor) -> list[Tensor]:
        self.offered[rank] = (name, tuple(x.shape), x.dtype, x.detach().clone())
        self.barrier.wait()
        offers = list(self.offered)
        if len({offer[:3] for offer in offers}) != 1:
            self.barrier.abort()
            raise RuntimeError("; ".join(f"rank {i}: {offer[:3]}" for i, offer in enumerate(offers)))
        if rank == 0:
            self.calls.append(name)
        self.barrier.wait()
        return [offer[3] for offer in offers]


@dataclass(frozen=True)
class ThreadAxis:
    """See `parallel.axis.Axis`."""

    rendezvous: Rendezvous
    rank: int
    sum_and_norm = None
    exchange: Any = None

    @property
    def size(self) -> int:
        return self.rendezvous.size

    def all_reduce(self, partial: Tensor) -> Tensor:
        return _sum(self.rendezvous.exchange(self.rank, "all_reduce", partial))

    def add_(self, x: Tensor, partial: Tensor) -> None:
        x.copy_(x.float() + self.all_reduce(partial))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack(self.rendezvous.exchange(self.rank, "all_gather", x))

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        return _sum([offer[self.rank] for offer in self.rendezvous.exchange(self.rank, "reduce_scatter", partial)])

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.stack([offer[self.rank] for offer in self.rendezvous.exchange(self.rank, "all_to_all", x)])

    def transfer(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Ranks that take no part still meet the others."""
        offers = self.rendezvous.gather(self.rank, [(to, tensor.clone()) for to, tensor in sends])
        sent = [iter([tensor for to, tensor in offer if to == self.rank]) for offer in offers]
        for rank, tensor in receives:
            tensor.copy_(next(sent[rank]))


def _sum(partials: list[Tensor]) -> Tensor:
    """In float32, in rank order."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return total


def layouts(
    tp: int = 1,
    dp: int = 1,
    ep: int = 1,
    dense: int | None = None,
    cp: int = 1,
    strategy: str = INTERLEAVE,
    dcp: int = 1,
    shards_indexer: bool = False,
) -> list[Layout]:
    """The layout of each of tp x cp x dp ranks, data-parallel groups first.

    ep: groups that the experts are divided over. dense: ranks that share dense MLPs. strategy: of the cp ranks. dcp:
    ranks that share contexts. shards_indexer: the tp ranks share index heads.
    """
    requests, dp = dp, dp * cp  # the axis `dp` has all that have other tokens
    world = tp * dp
    tps, dps = [Rendezvous(tp) for _ in range(dp)], [Rendezvous(dp) for _ in range(tp)]
    cps = [[Rendezvous(cp) for _ in range(tp)] for _ in range(requests)]
    eps, moe_tps = [Rendezvous(ep) for _ in range(world // ep)], [Rendezvous(world // ep) for _ in range(ep)]

    dcps = [Rendezvous(dcp) for _ in range(world // dcp)]

    def axis(rendezvous: Rendezvous, rank: int) -> Axis:
        return SINGLE if rendezvous.size == 1 else ThreadAxis(rendezvous, rank)

    made = []
    for rank in range(world):
        of_dp, of_tp = divmod(rank, tp)
        of_ep, of_moe_tp = divmod(rank, world // ep)
        own = axis(tps[of_dp], of_tp)
        made.append(
            Layout(
                tp=own,
                dp=axis(dps[of_tp], of_dp),
                dense=own if dense in (None, tp) else SINGLE,
                ep=axis(eps[of_moe_tp], of_ep),
                moe_tp=axis(moe_tps[of_ep], of_moe_tp),
                dcp=axis(dcps[rank // dcp], rank % dcp),
                cp=axis(cps[of_dp // cp][of_tp], of_dp % cp),
                cp_strategy=strategy,
                indexer=own if shards_indexer else SINGLE,
            )
        )
    return made


def on_ranks(count: int, work: Callable[[int], T]) -> list[T]:
    """Runs `work(rank)` in a thread each. Raises the first error of any rank."""
    results: list[Any] = [None] * count
    errors: list[Exception] = []

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (broken or errors)[0]
    return results
