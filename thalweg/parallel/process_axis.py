"""Axes whose ranks are processes: Gloo on CPUs, NCCL on GPUs.

Sums are computed here and not by the library: every rank receives the parts of all ranks and adds them in rank order in
float32. So all ranks hold equal bits, whatever algorithm the library chooses.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import (  # torch.distributed has them without exporting them
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from thalweg.core.errors import RankLost

if TYPE_CHECKING:
    from thalweg.parallel.peer_exchange import PeerExchange  # needs Triton
    from thalweg.parallel.sum_and_norm import SumAndNorm

# its name since torch 2.13
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor

SHARED_ROWS = 256  # from so many on, each rank adds up some of them
POLL_S = 0.005  # between two looks at a store
REACH_S = 30.0  # to connect to a store on another node


@dataclass(eq=False, slots=True)
class ProcessAxis:
    """See `parallel.axis.Axis`. group: the processes, in rank order."""

    group: dist.ProcessGroup
    size: int
    rank: int
    on_cpu: bool
    sum_and_norm: SumAndNorm | None = None  # once its memory is there
    exchange: PeerExchange | None = None
    is_on_one_node: bool = True

    def all_reduce(self, partial: Tensor) -> Tensor:
        return _ordered_sum(self.all_gather(partial))

    def add_(self, x: Tensor, partial: Tensor) -> None:
        """Of many rows each rank adds up some: 2 (size - 1) / size of all leave a rank, instead of size - 1 times
        all.
        """
        if self.size == 2 or len(x) < SHARED_ROWS:
            x.copy_(x.float() + self.all_reduce(partial))
            return
        each = -(-len(x) // self.size)
        padded = F.pad(partial, (0, 0, 0, each * self.size - len(x))).view(self.size, each, -1)
        own = x[self.rank * each : (self.rank + 1) * each].float()
        mine = self.reduce_scatter(padded)
        mine[: len(own)] += own
        x.copy_(self.all_gather(mine.to(x.dtype)).flatten(0, 1)[: len(x)])

    def all_gather(self, x: Tensor) -> Tensor:
        if self.on_cpu:  # Gloo gathers in size - 1 hops of a ring, and exchanges in one: 4.6 and 1.9 ms for 4 ranks
            return self.all_to_all(x.expand(self.size, *x.shape))
        gathered = x.new_empty(self.size, *x.shape)
        _all_gather(gathered, x.contiguous(), group=self.group)
        return gathered

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        return _ordered_sum(self.all_to_all(partial))

    def all_to_all(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=self.group)
        return received

    def transfer(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        for work in self._begin(sends, receives):
            work.wait()

    def post(self, x: Tensor, ranks: Sequence[int]) -> Callable[[], object]:
        sends = self._begin([(rank, x) for rank in ranks], [])
        return lambda: [x, *(send.wait() for send in sends)]  # holds the tensor until then

    def _begin(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Sequence[dist.Work]:
        """In one batch: NCCL would run single transfers of a group one after the other."""
        directions = (dist.isend, sends), (dist.irecv, receives)
        transfers = [
            dist.P2POp(way, tensor, group=self.group, group_peer=rank)
            for way, some in directions
            for rank, tensor in some
        ]
        return dist.batch_isend_irecv(transfers) if transfers else ()


def _ordered_sum(parts: Tensor) -> Tensor:
    """float32: parts[0] + parts[1] + ... in this order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def nothing_lost() -> str:
    return ""


class StoreAddress(NamedTuple):
    """Of a TCPStore that processes of several nodes reach. prefix: of their keys in it."""

    host: str
    port: int
    prefix: str

    def part(self, name: str) -> StoreAddress:
        return self._replace(prefix=f"{self.prefix}/{name}")


Rendezvous = Path | StoreAddress  # where processes find each other: a file that all can write to, or a server


class WatchedStore(Store):
    """A store through which processes find each other. torch's own waits until a timeout for one that has ended."""

    def __init__(self, file: Store, timeout: float, lost: Callable[[], str]) -> None:
        super().__init__()
        self.file, self.seconds, self.lost = file, timeout, lost

    def set(self, key: str, value: str) -> None:
        self.file.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.file.get(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.file.compare_set(key, expected, desired)

    def add(self, key: str, value: int) -> int:
        return self.file.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.file.check(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are set. Raises RankLost."""
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while not self.file.check(keys):
            if why := self.lost():
                raise RankLost(why)
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self.file.check([key])]
                raise RankLost(f"no {', '.join(missing)} after {seconds:g} s")
            time.sleep(POLL_S)


def connect(
    rendezvous: Rendezvous,
    rank: int,
    size: int,
    device: torch.device,
    timeout: float,
    lost: Callable[[], str] = nothing_lost,
) -> WatchedStore:
    """Joins the processes that share a model. timeout: seconds after which a collective that some rank does not join
    fails. lost: why another process will not come; "" while all may. Returns what the caller keeps until all groups are
    made. Raises RankLost.
    """
    if _is_left:
        disconnect()
    own: Store = FileStore(str(rendezvous), size) if isinstance(rendezvous, Path) else _reached(rendezvous, timeout)
    store = WatchedStore(own, timeout, lost)
    store.set(f"here{rank}", "")
    store.wait([f"here{other}" for other in range(size)])
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink: no kernel here needs it, and it may hang
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=store if device.type == "cpu" else store.file,  # NCCL's own threads use it, too
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=None if device.type == "cpu" else device,
    )
    return store


def _reached(address: StoreAddress, timeout: float) -> Store:
    server = TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=REACH_S))
    server.set_timeout(timedelta(seconds=timeout))
    return PrefixStore(address.prefix, server)


def abort() -> None:
    """Ends the collectives in flight on this process's GPU, from another thread: a process that they wait for has
    ended. Gloo notices that itself.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


_is_left = False  # the processes have ended, and only this one still has their group


def leave() -> None:
    """Use it in place of `disconnect` on GPUs; `connect` then makes room for other processes.

    Destroying NCCL's communicators waits for the captured graphs that hold their collectives, also at the end of the
    interpreter. So they are kept, and the process calls `_exit` with its status after Python's own exit handlers.
    """
    global _is_left
    _is_left = True
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        atexit.register(libc.fflush, None)
        libc.on_exit(libc._exit, None)


def disconnect() -> None:
    """Leaves the processes, some of which may have ended. On GPUs only when no captured graph holds a collective: NCCL
    would wait for its end.
    """
    global _is_left
    _is_left = False
    if dist.is_initialized():
        dist.destroy_process_group()
