"""Memory that all ranks of a host can address: torch's symmetric memory, over NVLink or PCIe, without multicast. Also
the time of what uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from thalweg.core.errors import UnsupportedConfig
from thalweg.parallel.axis import Axis

CALLS, REPLAYS = 30, 5  # calls of a captured graph, and how often it is replayed


def slowest_microseconds(axis: Axis, call: Callable[[], object], device: torch.device) -> float:
    """Of a call in a captured graph of many, the median of some replays; the slowest rank's."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
        samples = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            samples.append(1e3 * begin.elapsed_time(end) / CALLS)
        graph.reset()
    return float(axis.all_gather(torch.tensor([median(samples)], device=device)).max())


class SymmetricMemory:
    """Zeroed memory of equal size on each rank of a group. It is made before anything is captured."""

    def __init__(self, group: dist.ProcessGroup, count: int, device: torch.device) -> None:
        """count: bytes. All ranks call it at the same time. Raises UnsupportedConfig where ranks cannot address each
        other's memory, or the programs of a kernel, which wait for those of other ranks, could not all run at once.
        """
        from thalweg.kernels.peer_words import PROGRAMS  # needs Triton

        least = torch.tensor(torch.cuda.get_device_properties(device).multi_processor_count, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group)
        if int(least) < PROGRAMS:
            raise UnsupportedConfig(f"a GPU of this group has {int(least)} multiprocessors; {PROGRAMS} are needed")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # switches lose packets with it on shared hosts
        import torch.distributed._symmetric_memory as symmetric  # takes a second to import

        self.local = symmetric.empty(-(-count // 8), dtype=torch.int64, device=device)
        try:
            self.handle = symmetric.rendezvous(self.local, group)
        except RuntimeError as error:
            raise UnsupportedConfig(
                f"the GPUs of this group cannot address each other's memory: {str(error).partition(chr(10))[0]}"
            ) from error
        self.local.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(group)  # nobody writes before all have zeroed

    @property
    def addresses(self) -> list[int]:
        """Where each rank's memory begins, as this process sees it."""
        return list(self.handle.buffer_ptrs)
