"""FlashInfer's latent decode for Hopper (`flashinfer`, tested with flashinfer-python 0.6.14):
BatchMLAPagedAttentionWrapper of its fa3 kernels.

See `kernels.gqa.flashinfer` for what it needs and costs. Measured on an H100, 128 heads: 64 x 4,096 tokens 135 µs, 16
heads 113 µs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import DecodeRows, LatentPlane
from thalweg.kernels.gqa.flashinfer import LN2, PAGE, WORKSPACE, library, pages
from thalweg.kernels.mla.backends import MlaShape, project_values
from thalweg.kernels.mla.check import check_decode

ROPE = 64


@dataclass(frozen=True, slots=True)
class FlashInferMlaDecode:
    """Planned on the host, once a step, from lengths that are copied there: no CUDA graphs. bfloat16 latents only."""

    shape: MlaShape

    def prepare(self, rows: DecodeRows) -> Any:
        lengths_R = (rows.positions_T[rows.query - 1 :: rows.query] + 1).to(torch.int32).cpu()
        queries_R1 = torch.arange(0, (len(lengths_R) + 1) * rows.query, rows.query, dtype=torch.int32)
        heads, rank, scale, _ = self.shape
        wrapper = _wrapper(rows.positions_T.device)
        dims = (heads, rank, ROPE, PAGE, True, scale, torch.bfloat16, torch.bfloat16)
        wrapper.plan(queries_R1, *pages(rows.table_RL, lengths_R), lengths_R, *dims)
        return wrapper

    def attend(
        self, query_THD: Tensor, latents: LatentPlane, uv_HRv: Tensor, rows: DecodeRows, prepared: Any
    ) -> Tensor:
        return project_values(prepared.run(*self._parts(query_THD, latents)), uv_HRv)

    def attend_with_lse(
        self, query_THD: Tensor, latents: LatentPlane, rows: DecodeRows, prepared: Any
    ) -> tuple[Tensor, Tensor]:
        out, lse = prepared.run(*self._parts(query_THD, latents), return_lse=True)
        return out, lse * LN2

    def _parts(self, query_THD: Tensor, latents: LatentPlane) -> list[Tensor]:
        """Queries of latents and of the rotated key; latents and rotated keys."""
        return [part for x in (query_THD, latents.paged_PSD) for part in torch.split(x, [self.shape.rank, ROPE], -1)]


@cache
def _wrapper(device: torch.device) -> Any:
    """With 128 MiB for partial results."""
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    return library().mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with its definition, compiling what is not yet compiled; RuntimeError if the library cannot
    run here or is wrong.
    """
    check_decode("FlashInfer", "it needs nvcc and ninja", FlashInferMlaDecode, device, case)
