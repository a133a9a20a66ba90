"""FlashInfer's attention over pages (`flashinfer`, tested with flashinfer-python 0.6.14): decode rows by
BatchDecodeWithPagedKVCacheWrapper on tensor cores, the others by BatchPrefillWithPagedKVCacheWrapper.

It compiles with nvcc and ninja when first used (minutes; then it lies in ~/.cache/flashinfer), and plans every step on
the host, from lengths that are copied there: the device is waited for once a step, and no CUDA graph can hold it. An
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

PAGE = 64
WORKSPACE = 128 << 20  # bytes that FlashInfer recommends


def available() -> bool:
    """Whether FlashInfer and what it compiles with are installed, and there is a GPU."""
    return (
        importlib.util.find_spec("flashinfer") is not None
        and shutil.which("nvcc") is not None
        and shutil.which("ninja") is not None
        and torch.cuda.is_available()
    )


@cache
def library() -> ModuleType:
    return importlib.import_module("flashinfer")


class Pages(NamedTuple):
    """The pages of some rows in FlashInfer's form, int32. starts_R1, on the host: where each row's begin in indices_N,
    on the device. lengths_R, on the host: of each context, in tokens.
    """

    starts_R1: Tensor
    indices_N: Tensor
    lengths_R: Tensor

    def last_R(self) -> Tensor:
        """Tokens in each row's last page."""
        return (self.lengths_R - 1) % PAGE + 1


def pages(table_RL: Tensor, lengths_R: Tensor) -> Pages:
    """lengths_R: int32 on the host, at least 1 each."""
    counts_R = (lengths_R + PAGE - 1) // PAGE
    starts_R1 = torch.zeros(len(lengths_R) + 1, dtype=torch.int32)
    torch.cumsum(counts_R, 0, dtype=torch.int32, out=starts_R1[1:])
    wide = int(counts_R.max())
    held = torch.arange(wide) < counts_R.unsqueeze(1)
    return Pages(starts_R1, table_RL[: len(lengths_R), :wide][held.to(table_RL.device)].to(torch.int32), lengths_R)


class Planned(NamedTuple):
    """A step: what computes its decode rows, and what its other rows."""

    decode: Any
    ragged: Any


@dataclass(frozen=True, slots=True)
class Attention:
    """What all layers of a model share. decode, several, ragged: FlashInfer's wrappers, for decode rows of one query
    token, of several, and for other rows.
    """

    heads: int
    kv_heads: int
    dim: int
    scale: float
    decode: Any
    several: Any
    ragged: Any

    def plan(self, table_RL: Tensor, lengths_R: Tensor, queries: list[int], decoding: int) -> Planned:
        """A step of rows with so many query tokens each, the last of their contexts; the first `decoding` rows have
        equally many.

        table_RL: their pages; lengths_R: int32 on the host. Copies to the device, and waits for it.
        """
        decode = ragged = None
        if decoding and queries[0] == 1:
            held, decode = pages(table_RL, lengths_R[:decoding]), self.decode
            decode.plan(held.starts_R1, held.indices_N, held.last_R(), *self._shape(), **self._given())
        elif decoding:
            decode = self._ragged(self.several, table_RL, lengths_R[:decoding], queries[:decoding])
        if decoding < len(queries):
            ragged = self._ragged(self.ragged, table_RL[decoding:], lengths_R[decoding:], queries[decoding:])
        return Planned(decode, ragged)

    def _ragged(self, wrapper: Any, table_RL: Tensor, lengths_R: Tensor, queries: list[int]) -> Any:
        held = pages(table_RL, lengths_R)
        starts_R1 = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        of = starts_R1, held.starts_R1, held.indices_N, held.last_R()
        wrapper.plan(*of, *self._shape(), causal=True, **self._given())
        return wrapper

    def _shape(self) -> tuple[int, int, int, int]:
        return self.heads, self.kv_heads, self.dim, PAGE

    def _given(self) -> dict[str, Any]:
        return {"sm_scale": self.scale, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}


def attention(heads: int, kv_heads: int, dim: int, scale: float, device: torch.device) -> Attention:
    """Allocates 128 MiB for partial results."""
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    decode = library().BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    several, ragged = (library().BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2") for _ in range(2))
    return Attention(heads, kv_heads, dim, scale, decode, several, ragged)


def run(wrapper: Any, query_THd: Tensor, key_PSKd: Tensor, value_PSKd: Tensor) -> Tensor:
    """One layer of the planned rows: → bfloat16 [T, H, d]. Planes [P, 64, K, d], bfloat16."""
    out: Tensor = wrapper.run(query_THd, (key_PSKd, value_PSKd))
    return out


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with its definition, compiling what is not yet compiled; RuntimeError if the library cannot
    run here or is wrong.
    """
    heads, kv_heads, dim = case.heads, case.kv_heads, case.head_dim
    generator = torch.Generator(device).manual_seed(1)
    queries, contexts, scale = [1, 1, 70], (1, 130, 200), dim**-0.5

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    planes, query = (drawn(9, PAGE, kv_heads, dim), drawn(9, PAGE, kv_heads, dim)), drawn(72, heads, dim)
    table = torch.tensor([[3, 0, 0, 0], [5, 1, 7, 0], [2, 4, 6, 8]], dtype=torch.int32, device=device)
    try:
        planned = attention(heads, kv_heads, dim, scale, device).plan(
            table, torch.tensor(contexts, dtype=torch.int32), queries, 2
        )
        out = torch.cat((run(planned.decode, query[:2], *planes), run(planned.ragged, query[2:], *planes)))
        torch.cuda.synchronize(device)
    except (RuntimeError, AttributeError, TypeError, ValueError, OSError, ImportError) as error:
        raise RuntimeError(
            f"FlashInfer does not run here ({error}): it needs nvcc and ninja; or use --attention-backend triton"
        ) from error
    token = 0
    for row, (count, context) in enumerate(zip(queries, contexts, strict=True)):
        key, value = (x[table[row].long()].flatten(0, 1)[:context].float() for x in planes)
        key, value = (x.repeat_interleave(heads // kv_heads, 1) for x in (key, value))
        scores = torch.einsum("qhd,shd->qhs", query[token : token + count].float(), key) * scale
        behind = torch.arange(context, device=device) > context - count + torch.arange(count, device=device)[:, None]
        scores.masked_fill_(behind.unsqueeze(1), -torch.inf)
        exact = torch.einsum("qhs,shv->qhv", scores.softmax(-1), value)
        wrong = float((out[token : token + count].float() - exact).norm() / exact.norm())
        if not wrong < 0.02:
            raise RuntimeError(f"FlashInfer is wrong here by {wrong:.3f}: use --attention-backend triton")
        token += count
