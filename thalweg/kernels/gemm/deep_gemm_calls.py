"""Compiles the kernels of recorded DeepGEMM calls: `python -m thalweg.kernels.gemm.deep_gemm_calls [NVRTC]`. Several
such processes run at once.

A call is a JSON line on standard input: its name, its arguments with shapes for tensors, its options. All tensors lie
on one block of memory, so a process takes little of the GPU. Results are never read. NVRTC: the library to load, where
NVRTC compiles.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.check import FAILURES
from thalweg.kernels.gemm import toolchain

BLOCK = 1 << 30  # bytes
# a grouped product of groups without rows, and scores by an empty schedule, read and write nothing, so their tensors
# may be larger than the block
UNREAD = "m_grouped_", "fp8_paged_mqa_logits"
SCHEDULE = "get_paged_mqa_logits_metadata"  # all lengths 0 leave nothing to schedule


class Memory:
    """Memory of a GPU for `torch.as_tensor`, which does not ask how much of it there is."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def encode(value: Any) -> Any:
    """A call's argument for JSON."""
    if isinstance(value, Tensor):
        return {"shape": value.shape, "stride": value.stride(), "dtype": str(value.dtype).removeprefix("torch.")}
    return [encode(one) for one in value] if isinstance(value, (tuple, list)) else value


def decode(value: Any, block: Tensor, is_limited: bool, end: int = 0) -> Any:
    """The inverse of `encode`. Integers, which are ends of groups and of contexts, are `end`; other tensors, and bytes,
    lie on the block. is_limited: raises ValueError for one that is larger.
    """
    if isinstance(value, list):
        return tuple(decode(one, block, is_limited, end) for one in value)
    if not isinstance(value, dict):
        return value
    shape, stride, dtype = value["shape"], value["stride"], getattr(torch, value["dtype"])
    if not dtype.is_floating_point and dtype != torch.uint8:
        return torch.full(shape, end, dtype=dtype, device=block.device)
    size = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))) * dtype.itemsize
    if size > len(block) and is_limited:
        raise ValueError(f"{size} bytes are more than the block has")
    if size > len(block):
        block = torch.as_tensor(Memory(block.data_ptr(), size), device=block.device)
    return block[:size].view(dtype).as_strided(shape, stride)


def main(argv: list[str]) -> int:
    """Answers each line with a line: an error, or nothing."""
    answers = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # DeepGEMM prints what a compiler says
    os.dup2(quiet, 2)
    for file in argv:
        toolchain.load_nvrtc(file)
    library = importlib.import_module("deep_gemm")
    block = torch.empty(BLOCK, dtype=torch.uint8, device="cuda")
    for line in sys.stdin:
        name, arguments, options = json.loads(line)
        error = ""
        try:
            operands = decode(arguments, block, not name.startswith(UNREAD), int(name == SCHEDULE))
            getattr(library, name)(*operands, **options)
            torch.cuda.synchronize()
        except FAILURES as reason:  # another process compiles this kernel, or it does not compile
            error = str(reason).partition("\n")[0]
        print(error, file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
