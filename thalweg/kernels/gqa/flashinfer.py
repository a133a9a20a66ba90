"""FlashInfer's attention over pages (`flashinfer`, tested with flashinfer-python 0.6.14): decode rows by
BatchDecodeWithPagedKVCacheWrapper on tensor cores, the others by BatchPrefillWithPagedKVCacheWrapper.

It compiles with nvcc and ninja when first used (minutes; then cached in ~/.cache/flashinfer), and plans every step on
the host, from lengths that are copied there: it waits for the device once a step, and no CUDA graph can capture it. An
alternative to compare with, never needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import KvPlanes, RowLengths
from thalweg.kernels.attend.check import NVCC, check_ragged

PAGE = 64
WORKSPACE = 128 << 20  # bytes that FlashInfer recommends
LN2 = 0.6931471805599453  # the library's LSE is a binary logarithm


def available() -> bool:
    """Whether FlashInfer and what it compiles with are installed, and there is a GPU."""
    compiles = shutil.which("nvcc") is not None and shutil.which("ninja") is not None
    return importlib.util.find_spec("flashinfer") is not None and compiles and torch.cuda.is_available()


@cache
def library() -> ModuleType:
    return importlib.import_module("flashinfer")


class RowPages(NamedTuple):
    """The pages of some rows in FlashInfer's form, int32."""

    starts_R1: Tensor  # on the host: where each row's pages begin in indices_N
    indices_N: Tensor  # on the device
    lengths_R: Tensor  # on the host: of each context, in tokens

    def last_R(self) -> Tensor:
        """Tokens in each row's last page."""
        return (self.lengths_R - 1) % PAGE + 1


def pages(table_RL: Tensor, lengths_R: Tensor) -> RowPages:
    """lengths_R: int32 on the host, at least 1 each."""
    counts_R = (lengths_R + PAGE - 1) // PAGE
    starts_R1 = torch.zeros(len(lengths_R) + 1, dtype=torch.int32)
    torch.cumsum(counts_R, 0, dtype=torch.int32, out=starts_R1[1:])
    width = int(counts_R.max())
    is_used = (torch.arange(width) < counts_R.unsqueeze(1)).to(table_RL.device)
    return RowPages(starts_R1, table_RL[: len(lengths_R), :width][is_used].to(torch.int32), lengths_R)


class PlannedStep(NamedTuple):
    """The wrappers that compute a step."""

    decode: Any
    ragged: Any


@dataclass(frozen=True, slots=True)
class FlashInferGqa:
    """What all layers of a model share."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    single: Any  # wrapper for decode rows of one query token
    several: Any  # for decode rows of several
    ragged: Any  # for other rows

    def plan(self, table_RL: Tensor, lengths_R: Tensor, queries: list[int], decoding: int) -> PlannedStep:
        """A step of rows with so many query tokens each, the last of their contexts; the first `decoding` rows have
        equally many. lengths_R: int32 on the host. Copies to the device, and waits for it.
        """
        decode = ragged = None
        if decoding and queries[0] == 1:
            row_pages, decode = pages(table_RL, lengths_R[:decoding]), self.single
            decode.plan(row_pages.starts_R1, row_pages.indices_N, row_pages.last_R(), *self._shape(), **self._options())
        elif decoding:
            decode = self._plan_ragged(self.several, table_RL, lengths_R[:decoding], queries[:decoding])
        if decoding < len(queries):
            ragged = self._plan_ragged(self.ragged, table_RL[decoding:], lengths_R[decoding:], queries[decoding:])
        return PlannedStep(decode, ragged)

    def _plan_ragged(self, wrapper: Any, table_RL: Tensor, lengths_R: Tensor, queries: list[int]) -> Any:
        row_pages = pages(table_RL, lengths_R)
        starts_R1 = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        rows = starts_R1, row_pages.starts_R1, row_pages.indices_N, row_pages.last_R()
        wrapper.plan(*rows, *self._shape(), causal=True, **self._options())
        return wrapper

    def _shape(self) -> tuple[int, int, int, int]:
        return self.heads, self.kv_heads, self.dim, PAGE

    def _options(self) -> dict[str, Any]:
        return {"sm_scale": self.scale, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def attention(heads: int, kv_heads: int, dim: int, scale: float, device: torch.device) -> FlashInferGqa:
    """Allocates 128 MiB for partial results."""
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    single = library().BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    several, ragged = (library().BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2") for _ in range(2))
    return FlashInferGqa(heads, kv_heads, dim, scale, single, several, ragged)


def run(wrapper: Any, query_THd: Tensor, kv: KvPlanes) -> Tensor:
    """One layer of the planned rows: → bfloat16 [T, H, d]."""
    out: Tensor = wrapper.run(query_THd, (kv.key, kv.value))
    return out


def run_with_lse(wrapper: Any, query_THd: Tensor, kv: KvPlanes) -> tuple[Tensor, Tensor]:
    """The same, with the LSE of each token and head: → ([T, H, d], [T, H])."""
    out, lse = wrapper.run(query_THd, (kv.key, kv.value), return_lse=True)
    return out, lse * LN2


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with its definition, compiling what is not yet compiled; RuntimeError if the library cannot
    run here or is wrong.
    """
    heads, kv_heads, dim = case.heads, case.kv_heads, case.head_dim
    table = torch.tensor([[3, 0, 0, 0], [5, 1, 7, 0], [2, 4, 6, 8]], dtype=torch.int32, device=device)

    def computed(query: Tensor, key: Tensor, value: Tensor, rows: RowLengths) -> tuple[Tensor, Tensor]:
        planes = [torch.zeros(9 * PAGE, kv_heads, dim, dtype=torch.bfloat16, device=device) for _ in range(2)]
        for plane, x in zip(planes, (key, value), strict=True):
            for row, own in enumerate(torch.split(x, list(rows.contexts))):
                position = torch.arange(len(own), device=device)
                plane[table[row, position // PAGE] * PAGE + position % PAGE] = own
        kv = KvPlanes(*(plane.view(9, PAGE, kv_heads, dim) for plane in planes))
        lengths = torch.tensor(rows.contexts, dtype=torch.int32)
        step = attention(heads, kv_heads, dim, dim**-0.5, device).plan(table, lengths, list(rows.queries), 2)
        parts = run_with_lse(step.decode, query[:2], kv), run_with_lse(step.ragged, query[2:], kv)
        out, lse = (torch.cat(both) for both in zip(*parts, strict=True))
        return out, lse

    check_ragged(
        "FlashInfer", NVCC, computed, device, case._replace(value_dim=dim), RowLengths((1, 1, 70), (1, 130, 200))
    )
