"""Latent attention of the deterministic mode: one formula for every token, whatever the step."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.attention.exchange import exchange_stored
from thalweg.attention.tree_paths import paths_of_tree
from thalweg.batch.batch import Batch
from thalweg.kernels.attend.args import DecodeRows
from thalweg.kernels.attend.triton import DETERMINISTIC_SPLITS, merge
from thalweg.kernels.mla import triton as mla
from thalweg.layers.paged import PagedStep, rows_of
from thalweg.layers.paged_mla import PagedMla

PARTS = 1 << 27  # elements of partial sums at a time: 256 MiB


class InvariantMla(PagedMla):
    """Tokens of prompts too attend to latents, each by itself, its context cut at positions that follow from its own:
    bits depend on neither the batch, nor chunks, nor cache hits. What that costs a prompt is the work of latents, 3.4
    times that of keys and values.
    """

    def attention(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        tokens, rows = len(query_THd), step.prepared
        at_once = max(PARTS // (self.heads * DETERMINISTIC_SPLITS * self.rank), 1)
        nodes = 0 if rows.paths_TD is None else len(rows.paths_TD)
        firsts = [*range(0, nodes, at_once), *range(nodes, tokens, at_once), tokens]
        slices = [slice(*ends) for ends in pairwise(firsts)]
        if step.batch.share is not None:  # of a share all are stored before any attends
            for some in slices:
                self.absorb(query_THd[some], latent_TD[some], step, some, True)
            exchange_stored(step.batch, step.planes, ("latent",), self.layer)
        # in order: a token's context is stored before it attends
        parts = [self._some(step, query_THd, latent_TD, some) for some in slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _some(self, step: PagedStep, query_THd: Tensor, latent_TD: Tensor, some: slice) -> Tensor:
        row_T, paths_TD = step.prepared
        paths_TD = None if paths_TD is None or some.start >= len(paths_TD) else paths_TD[some]
        positions_T = step.batch.positions_T[some]
        rows = DecodeRows(step.batch.table_RP, positions_T, rows_T=row_T[some], paths_TD=paths_TD)
        query_THD = self.absorb(query_THd[some], latent_TD[some], step, some, True)
        latents, splits = step.latents(self.layer), DETERMINISTIC_SPLITS
        states = mla.decode(query_THD, latents, rows, scale=self.scale, rank=self.rank, splits=splits, fixed=True)
        return mla.up(merge(*states, query_THd.dtype), self.uv)


class OwnRows(NamedTuple):
    """row_T int32: of each token of the step. paths_TD: of the decode rows' tokens, where drafts part ways; see
    `paths_of_tree`.
    """

    row_T: Tensor
    paths_TD: Tensor | None


def own_rows(batch: Batch, tokens: int, rows: DecodeRows) -> OwnRows:
    """A `layers.paged.Prepare`."""
    return OwnRows(rows_of(batch), None if batch.tree is None else paths_of_tree(batch.tree, tokens))
