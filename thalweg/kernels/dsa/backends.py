"""Sparse attention (DSA): one interface for all backends. A backend is a class that `config` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from thalweg.kernels.attend.args import LatentPlane, QueryRows
from thalweg.kernels.dsa import triton
from thalweg.kernels.mla.backends import values_of_splits


class SparseShape(NamedTuple):
    """The facts of a model that a kernel needs."""

    rank: int
    topk: int
    scale: float  # of scores


class SparseKernel(Protocol):
    """Attention of query tokens, each to its choice. Kernels of one kind and shape are equal.

    masked: (tokens of a context, share of them): while contexts are no longer, and a step computes this share of their
    tokens or more, dense attention to what a mask leaves of the expanded contexts takes less time. With 128 heads on an
    H200 (benchmarks/gpu/sparse_prompts.py).
    """

    masked: ClassVar[tuple[tuple[int, float], ...]]

    def attend(
        self,
        query_THD: Tensor,
        latents: LatentPlane,
        chosen_TK: Tensor | None,
        rows: QueryRows,
        uv_HRv: Tensor,
        schedules: dict[int, Any],
    ) -> Tensor:
        """Absorbed queries over chosen tokens, times W_UV: → [T, H * v].

        chosen_TK: as `triton.attend` takes it. schedules: what all layers of a step share, by tokens of a launch;
        kernels fill it.
        """


@dataclass(frozen=True, slots=True)
class TritonSparse:
    """The project's own kernel."""

    shape: SparseShape
    masked: ClassVar[tuple[tuple[int, float], ...]] = ((6144, 0.125), (8192, 0.25), (12288, 1.0))

    def attend(
        self,
        query_THD: Tensor,
        latents: LatentPlane,
        chosen_TK: Tensor | None,
        rows: QueryRows,
        uv_HRv: Tensor,
        schedules: dict[int, Any],
    ) -> Tensor:
        rank, topk, scale = self.shape
        states = triton.attend(query_THD, latents, chosen_TK, rows, topk, scale=scale, rank=rank)
        return values_of_splits(*states, uv_HRv)
