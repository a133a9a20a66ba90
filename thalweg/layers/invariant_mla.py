"""Latent attention of the deterministic mode: one formula for every token, whatever the step."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.kernels.mla import triton as mla
from thalweg.layers.paged import PagedStep
from thalweg.layers.paged_mla import PagedMla

PARTS = 1 << 27  # elements of partial sums at a time: 256 MiB


class InvariantMla(PagedMla):
    """Tokens of prompts too attend to latents, each by itself, its context cut at positions that follow from its own: bits depend on neither the
    batch, nor chunks, nor cache hits. What that costs a prompt is the work of latents, 3.4 times that of keys and values."""

    def attention(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        tokens = len(query_THd)
        at_once = max(PARTS // (self.heads * mla.DETERMINISTIC_SPLITS * self.rank), 1)
        # in order: a token's context is stored before it attends
        parts = [
            self._some(step, query_THd, latent_TD, slice(first, min(first + at_once, tokens)))
            for first in range(0, tokens, at_once)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _some(self, step: PagedStep, query_THd: Tensor, latent_TD: Tensor, some: slice) -> Tensor:
        partial, lse = mla.decode(
            self.absorb(query_THd[some], latent_TD[some], step, some, True),
            step.planes.paged("latent", self.layer),
            step.batch.table_RP,
            step.batch.positions_T[some],
            scale=self.scale,
            rank=self.rank,
            splits=mla.DETERMINISTIC_SPLITS,
            plane_scale=step.planes.scale("latent", self.layer),
            rows_T=step.prepared[some],
            fixed=True,
        )
        return mla.up(mla.merge(partial, lse, query_THd.dtype), self.uv)


def rows_of(batch: Batch, tokens: int, query: int) -> Tensor:
    """The row of each token: int32 [T]."""
    device, parts = batch.ids_T.device, []
    for group in batch.groups:
        rows = torch.arange(group.row_start, group.row_start + group.rows, dtype=torch.int32, device=device)
        parts.append(rows.repeat_interleave(group.query))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
