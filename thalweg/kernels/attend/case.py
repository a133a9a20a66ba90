"""Inputs and exact results of attention cases: pages in any order, rows of unequal length, large numbers in everything
that must not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.attend.args import RowLengths
from thalweg.kernels.case import normal

PAGE = 64


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors, and the tensors of records, on this device."""
    if isinstance(value, tuple):
        return type(value)(*(to_device(x, device) for x in value))
    return value.to(device) if isinstance(value, Tensor) else value


def page_table(generator: torch.Generator, contexts: Sequence[int]) -> tuple[Tensor, int]:
    """A page table int32 [R, L] of rows of these lengths, pages in random order and 0 beyond a row's end; and how many
    pages there are.
    """
    counts = [-(-context // PAGE) for context in contexts]
    order = torch.randperm(sum(counts), generator=generator).to(torch.int32) + 1
    table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    for row, pages in enumerate(torch.split(order, counts)):
        table[row, : len(pages)] = pages
    return table, sum(counts) + 1


def paged_plane(
    generator: torch.Generator, table_RL: Tensor, contexts: Sequence[int], *dims: int, dtype: torch.dtype
) -> Tensor:
    """A plane [P, 64, *dims] of normal numbers for these pages. Tokens that no row may read hold large finite values: a
    page may be reused, so it holds anything finite.
    """
    plane_PSX = normal(generator, int(table_RL.max()) + 1, PAGE, *dims)
    allowed = torch.zeros(plane_PSX.shape[:2], dtype=torch.bool)
    for table_L, context in zip(table_RL.long(), contexts, strict=True):
        index = torch.arange(context)
        allowed[table_L[index // PAGE], index % PAGE] = True
    allowed[0, 0] = True  # where padding reads
    return torch.where(allowed.view(*allowed.shape, *(1 for _ in dims)), plane_PSX, torch.full((), 1e3)).to(dtype)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes and one float32 scale [1]."""
    scale = torch.tensor([0.05])
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def row_tokens(plane_PSX: Tensor, table_RL: Tensor, contexts: Sequence[int]) -> list[Tensor]:
    """The context [S, X] of each row."""
    return [plane_PSX[row.long()].flatten(0, 1)[:context] for row, context in zip(table_RL, contexts, strict=True)]


def starts_of(counts: Sequence[int]) -> Tensor:
    """int32 [R + 1]: where each row begins."""
    return torch.tensor((0, *counts)).cumsum(0).to(torch.int32)


def last_positions(lengths: RowLengths) -> Tensor:
    """int64 [T]: the position of each query token."""
    return torch.cat([torch.arange(context - query, context) for query, context in zip(*lengths, strict=True)])


def causal_bias(query: int, context: int) -> Tensor:
    """float32 [q, S] of the last tokens of a context."""
    return torch.full((query, context), -torch.inf).triu_(1 + context - query)


def exact_attention(
    q_NHd: Tensor, key_SKd: Tensor, value_SKv: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """The definition, in float64: (out [N, H, v], LSE [N, H])."""
    key, value = (x.double().repeat_interleave(q_NHd.shape[1] // x.shape[1], 1) for x in (key_SKd, value_SKv))
    scores = torch.einsum("nhd,shd->nhs", q_NHd.double(), key) * scale + bias.double().unsqueeze(1)
    return torch.einsum("nhs,shv->nhv", scores.softmax(-1), value), scores.logsumexp(-1)


def exact_rows(
    q_THd: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    lengths: RowLengths,
    scale: float,
    causal: bool = True,
) -> tuple[Tensor, ...]:
    """`exact_attention` of ragged rows: (out [T, H, v], LSE [T, H])."""
    parts = []
    for q, key, value in zip(torch.split(q_THd, list(lengths.queries)), keys, values, strict=True):
        bias = causal_bias(len(q), len(key)) if causal else torch.zeros(len(q), len(key))
        parts.append(exact_attention(q, key, value, bias, scale))
    return tuple(torch.cat(both) for both in zip(*parts, strict=True))
