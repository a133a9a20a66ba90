"""Memory that all ranks of a host can address: torch's symmetric memory, over NVLink or PCIe, without multicast."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from thalweg.core.errors import UnsupportedConfig


class SymmetricMemory:
    """Zeroed memory of equal size on each rank of a group. It is made before anything is captured."""

    def __init__(self, group: dist.ProcessGroup, count: int, device: torch.device) -> None:
        """count: bytes. All ranks call it at the same time. Raises UnsupportedConfig where ranks cannot address each
        other's memory.
        """
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
