"""Latent attention on pages to a choice whose latents are in host memory, on `kernels.swap_in` and `kernels.dsa`."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.core.plan import PAGE
from thalweg.kernels.attend.args import ContextChunk, LatentPlane, QueryRows
from thalweg.kernels.swap_in import triton as swap
from thalweg.layers.paged import PagedStep, Rest
from thalweg.layers.paged_mla import LatentMla
from thalweg.layers.paged_sparse import SparseMla, gather_records


class HotSparseMla(SparseMla):
    """Decode rows read the hot sets of their slots. Each of the other rows, prompts above all, reads a copy of its
    whole context on the device.
    """

    def _values(self, query_THD: Tensor, step: PagedStep, chosen_TK: Tensor | None, rows: QueryRows) -> Tensor:
        decode = min(self._hot_tokens(step), len(query_THD))
        parts = [self._of_hot_sets(query_THD, step, chosen_TK, rows, slice(0, decode))] if decode else []
        token = 0
        for group in step.batch.groups:
            some = slice(token, min(token + group.rows * group.query, len(query_THD)))
            if decode <= token < len(query_THD) and group.query == 1 and step.batch.slot_R is not None:
                # a prompt's last token, or padding, of which there may be thousands
                parts.append(self._of_hot_sets(query_THD, step, chosen_TK, rows, some))
                token = some.stop
                continue
            for row in range(group.row_start, group.row_start + group.rows):
                if decode <= token < len(query_THD):
                    own = slice(token, token + group.query)
                    context = step.batch.extents[row].max_kv_len
                    parts.append(
                        self._of_context(query_THD[own], step, _some(chosen_TK, own), rows.some(own), row, context)
                    )
                token += group.query
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

    def _of_context(
        self, query_THD: Tensor, step: PagedStep, chosen_TK: Tensor | None, rows: QueryRows, row: int, context: int
    ) -> Tensor:
        """Tokens of one row, that have up to `context` tokens before them."""
        pages_P = rows.table_RL[row, : -(-context // PAGE)]
        latents_PSD = swap.copy_pages(step.planes.paged("latent", self.layer), pages_P)
        table_RP = torch.arange(len(pages_P), dtype=torch.int32, device=pages_P.device).expand(row + 1, -1)
        own = QueryRows(rows.rows_T, table_RP, rows.positions_T, rows.paths_TD)
        return self._attend_to(query_THD, latents_PSD, chosen_TK, own)

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
        table_RL = rest.rows.table_RL
        staged = swap.copy_pages(step.planes.paged("latent", self.layer), table_RL.flatten())
        pages = torch.arange(len(staged), dtype=torch.int32, device=staged.device).view_as(table_RL)
        return gather_records(staged.flatten(0, 1), pages, chunk, self.rank, self.uk.dtype)


def _some(chosen_TK: Tensor | None, tokens: slice) -> Tensor | None:
    return None if chosen_TK is None else chosen_TK[tokens]
