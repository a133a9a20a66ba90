"""Latent attention on pages to a choice whose latents are in host memory, on `kernels.swap_in` and `kernels.dsa`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.batch.slots import upload
from thalweg.core.plan import PAGE
from thalweg.kernels.attend.args import ContextChunk, LatentPlane, QueryRows
from thalweg.kernels.swap_in import triton as swap
from thalweg.layers.paged import CHUNK, PagedStep, Rest
from thalweg.layers.paged_mla import LatentMla
from thalweg.layers.paged_sparse import SparseMla, gather_records


class Launch(NamedTuple):
    """Consecutive rows that attend together."""

    row: int  # the first
    tokens: slice
    pages: tuple[int, ...]  # of the contexts of rows that read a copy; () of rows of one token, which read hot sets


class HotSparseMla(SparseMla):
    """Decode rows read the hot sets of their slots. Each of the other rows, prompts above all, reads a copy of its
    whole context on the device.
    """

    def _values(self, query_THD: Tensor, step: PagedStep, chosen_TK: Tensor | None, rows: QueryRows) -> Tensor:
        decode = min(self._hot_tokens(step), len(query_THD))
        parts = [self._of_hot_sets(query_THD, step, chosen_TK, rows, slice(0, decode))] if decode else []
        for launch in _launches(step.batch, decode, len(query_THD)):
            if launch.pages:
                parts.append(self._of_copies(query_THD, step, chosen_TK, rows, launch))
            else:
                parts.append(self._of_hot_sets(query_THD, step, chosen_TK, rows, launch.tokens))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _hot_tokens(self, step: PagedStep) -> int:
        """The step's first tokens, that read hot sets: those of its decode rows, unless a row chooses more than a hot
        set holds. Without slots all is padding.
        """
        longest = max((group.query for group in step.batch.groups if group.token_start < step.decode), default=0)
        fits = longest * self.topk <= step.planes.hot(self.layer).entries
        return step.decode if fits and step.batch.slot_R is not None else 0

    def _of_hot_sets(
        self, query_THD: Tensor, step: PagedStep, chosen_TK: Tensor | None, rows: QueryRows, tokens: slice
    ) -> Tensor:
        """Of these tokens. query, chosen and rows: of more."""
        hot, batch = step.planes.hot(self.layer), step.batch
        query_THD, chosen_TK = query_THD[tokens], _some(chosen_TK, tokens)
        assert batch.slot_R is not None, "rows with hot sets have slots"
        own, host_XD = rows.some(tokens), step.planes.tokens("latent", self.layer)
        slots_T = batch.slot_R.index_select(0, own.rows_T)
        rows_TK = swap.swap_in(hot, host_XD, slots_T, batch.real_T[tokens], own, chosen_TK, self.topk)
        latents_PSD = hot.latents_ED.view(-1, PAGE, hot.latents_ED.shape[1])
        table_RP = hot.table_1P.expand(len(rows.table_RL), -1)
        return self._attend_to(query_THD, latents_PSD, rows_TK, QueryRows(own.rows_T, table_RP, own.positions_T))

    def _of_copies(
        self, query_THD: Tensor, step: PagedStep, chosen_TK: Tensor | None, rows: QueryRows, launch: Launch
    ) -> Tensor:
        """Of these tokens, as one launch of rows whose latents are on the device."""
        own, last = rows.some(launch.tokens), launch.row + len(launch.pages)
        latents_PSD, table_RP = self._copies(step, rows.table_RL[launch.row : last], launch.pages)
        own = QueryRows(own.rows_T - launch.row, table_RP, own.positions_T, own.paths_TD)
        return self._attend_to(query_THD[launch.tokens], latents_PSD, _some(chosen_TK, launch.tokens), own)

    def _copies(self, step: PagedStep, table_RL: Tensor, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """So many pages of each of these rows, on the device: → ([P, 64, D], their page table, int32 [R, L])."""
        device = table_RL.device
        pages_P = torch.cat([row_L[:count] for row_L, count in zip(table_RL, pages, strict=True)])
        starts_R = upload([0, *accumulate(pages)][:-1], torch.int32, device)
        table_RP = starts_R.unsqueeze(1) + torch.arange(max(pages), dtype=torch.int32, device=device)
        return swap.copy_pages(step.planes.paged("latent", self.layer), pages_P), table_RP

    def _attend_to(self, query_THD: Tensor, latents_PSD: Tensor, chosen_TK: Tensor | None, rows: QueryRows) -> Tensor:
        return self.sparse_decoder.attend(query_THD, LatentPlane(latents_PSD), chosen_TK, rows, self.uv, {})

    def _decode(self, query_THD: Tensor, step: PagedStep) -> Tensor:
        """Of contexts that are chosen whole."""
        assert step.query_rows is not None, "a model with an indexer has rows of tokens"
        return self._values(query_THD, step, None, step.query_rows.some(slice(0, len(query_THD))))

    def _gather(self, step: PagedStep, rest: Rest, chunk: ContextChunk) -> Tensor:
        """Cached latents of ragged rows, whose contexts are chosen whole: copied, if they are records."""
        if not self.has_records:
            return LatentMla._gather(self, step, rest, chunk)
        staged, table_RP = self._copies(step, rest.rows.table_RL, [_pages(cached) for cached in rest.cached])
        return gather_records(staged.flatten(0, 1), table_RP, chunk, self.rank, self.uk.dtype)


def _launches(batch: Batch, first: int, last: int) -> list[Launch]:
    """The rows of the step's tokens `first` to `last`. Rows that read copies share a launch, up to CHUNK tokens of
    context: a row by itself is split into more parts, which takes longer and is rounded otherwise than where latents
    are on the device.
    """
    launches: list[Launch] = []
    for group in batch.groups:
        if not first <= group.token_start < last:
            continue
        if group.query == 1 and batch.slot_R is not None:
            # a prompt's last token, or padding, of which there may be thousands
            launches.append(Launch(group.row_start, group.token_slice, ()))
            continue
        for i in range(group.rows):
            row, token = group.row_start + i, group.token_start + i * group.query
            own = Launch(row, slice(token, token + group.query), (_pages(batch.extents[row].max_kv_len),))
            before = launches[-1] if launches else None
            if before is not None and before.pages and sum(before.pages + own.pages) * PAGE <= CHUNK:
                own = Launch(before.row, slice(before.tokens.start, own.tokens.stop), before.pages + own.pages)
                launches.pop()
            launches.append(own)
    return launches


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def _some(chosen_TK: Tensor | None, tokens: slice) -> Tensor | None:
    return None if chosen_TK is None else chosen_TK[tokens]
