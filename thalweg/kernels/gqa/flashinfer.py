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
from thalweg.kernels.attend.args import DecodeRows, KvPlanes, PagedRows, RowLengths
from thalweg.kernels.attend.case import last_positions, starts_of
from thalweg.kernels.attend.check import NVCC, check_ragged
from thalweg.kernels.gqa.backends import GqaShape, States, StepRows
from thalweg.kernels.gqa.triton import NewTokens

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


class Wrappers(NamedTuple):
    """FlashInfer's objects, which a plan is made with; all layers share them."""

    single: Any  # decode rows of one query token
    several: Any  # decode rows of several
    ragged: Any  # other rows


@cache
def _wrappers(device: torch.device) -> Wrappers:
    """With 128 MiB for partial results."""
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    single = library().BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    several, ragged = (library().BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2") for _ in range(2))
    return Wrappers(single, several, ragged)


class PlannedStep(NamedTuple):
    """The wrappers that compute a step."""

    decode: Any
    ragged: Any


@dataclass(frozen=True, slots=True)
class FlashInferGqa:
    """See `backends.GqaKernel`."""

    shape: GqaShape
    plans: bool = True
    stores_new: bool = False

    def prepare(self, step: StepRows) -> PlannedStep:
        """Copies to the device, and waits for it."""
        device, queries, decoding = step.positions_T.device, list(step.queries), step.decoding
        last = (torch.tensor(queries).cumsum(0) - 1).to(device)
        lengths_R = (step.positions_T.index_select(0, last) + 1).to("cpu", torch.int32)
        wrappers, decode, ragged = _wrappers(device), None, None
        if decoding:
            is_single = queries[0] == 1
            decode = wrappers.single if is_single else wrappers.several
            self._plan(decode, step.table_RL, lengths_R[:decoding], None if is_single else queries[:decoding])
        if decoding < len(queries):
            ragged = wrappers.ragged
            self._plan(ragged, step.table_RL[decoding:], lengths_R[decoding:], queries[decoding:])
        return PlannedStep(decode, ragged)

    def _plan(self, wrapper: Any, table_RL: Tensor, lengths_R: Tensor, queries: list[int] | None) -> None:
        """queries: of each row; None is one."""
        row_pages, dtype = pages(table_RL, lengths_R), torch.bfloat16
        rows = [row_pages.starts_R1, row_pages.indices_N, row_pages.last_R()]
        options: dict[str, Any] = {"sm_scale": self.shape.dim**-0.5, "q_data_type": dtype, "kv_data_type": dtype}
        if queries is not None:
            rows.insert(0, torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32))
            options["causal"] = True
        wrapper.plan(*rows, *self.shape, PAGE, **options)

    def decode(
        self,
        query_THd: Tensor,
        kv: KvPlanes,
        rows: DecodeRows,
        prepared: PlannedStep,
        new: NewTokens | None = None,
        with_lse: bool = False,
    ) -> States:
        return _run(prepared.decode, query_THd, kv, with_lse)

    def ragged(
        self, query_THd: Tensor, kv: KvPlanes, rows: PagedRows, prepared: PlannedStep, with_lse: bool = False
    ) -> States:
        return _run(prepared.ragged, query_THd, kv, with_lse)


def _run(wrapper: Any, query_THd: Tensor, kv: KvPlanes, with_lse: bool) -> States:
    if not with_lse:
        return wrapper.run(query_THd, (kv.key, kv.value)), None
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
        kernel = FlashInferGqa(GqaShape(heads, kv_heads, dim))
        queries, positions = torch.split(query, [2, len(query) - 2]), last_positions(rows).to(device)
        step = kernel.prepare(StepRows(table, positions, rows.queries, 2))
        decode = kernel.decode(queries[0], kv, DecodeRows(table, positions[:2]), step, with_lse=True)
        rest = PagedRows(table[2:], positions[2:], starts_of(rows.queries[2:]).to(device), len(queries[1]))
        ragged = kernel.ragged(queries[1], kv, rest, step, with_lse=True)
        assert decode[1] is not None and ragged[1] is not None
        return torch.cat((decode[0], ragged[0])), torch.cat((decode[1], ragged[1]))

    check_ragged(
        "FlashInfer", NVCC, computed, device, case._replace(value_dim=dim), RowLengths((1, 1, 70), (1, 130, 200))
    )
