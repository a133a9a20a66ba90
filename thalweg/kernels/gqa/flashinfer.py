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
from thalweg.kernels.attend.case import to_device
from thalweg.kernels.check import check_results
from thalweg.kernels.gqa.backends import GqaShape, States, StepRows
from thalweg.kernels.gqa.case import paged_case
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


def pages(table_RL: Tensor, lengths_R: Tensor) -> tuple[Tensor, Tensor]:
    """The pages of some rows in FlashInfer's form, int32: where each row's begin [R + 1], on the host, and all of them,
    on the device. lengths_R: int32 context lengths on the host, at least 1 each.
    """
    counts_R = (lengths_R + PAGE - 1) // PAGE
    starts_R1 = torch.zeros(len(lengths_R) + 1, dtype=torch.int32)
    torch.cumsum(counts_R, 0, dtype=torch.int32, out=starts_R1[1:])
    width = int(counts_R.max())
    is_used = (torch.arange(width) < counts_R.unsqueeze(1)).to(table_RL.device)
    return starts_R1, table_RL[: len(lengths_R), :width][is_used].to(torch.int32)


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
        dtype, last_R = torch.bfloat16, (lengths_R - 1) % PAGE + 1
        rows = [*pages(table_RL, lengths_R), last_R]
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
    shape, lengths = GqaShape(case.heads, case.kv_heads, case.head_dim), RowLengths((1, 1, 70), (1, 130, 200))
    small = paged_case(torch.Generator().manual_seed(1), shape, lengths)
    query, kv, rows = (to_device(small.inputs[name], device) for name in ("q_THd", "kv", "rows"))

    def run() -> list[Tensor]:
        kernel, (table, positions, starts, longest, _) = FlashInferGqa(shape), rows
        step = kernel.prepare(StepRows(table, positions, lengths.queries, 2))
        decode = kernel.decode(query[:2], kv, DecodeRows(table, positions[:2]), step, with_lse=True)
        rest = PagedRows(table[2:], positions[2:], starts[2:] - 2, longest)
        ragged = kernel.ragged(query[2:], kv, rest, step, with_lse=True)
        return [torch.cat(parts) for parts in zip(decode, ragged, strict=True)]  # type: ignore[arg-type]

    needs = "it needs nvcc and ninja; or use --attention-backend triton"
    check_results("FlashInfer", needs, run, small.exact, 0.02)
