"""Batches with padding behind their tokens, and without their first rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, RowExtent, TreeMask
from thalweg.batch.slots import Slots


def without_first_group(batch: Batch) -> Batch:
    """The batch without its first group, which is rows of one token."""
    rows = batch.groups[0].rows
    moved = tuple(replace(g, row_start=g.row_start - rows, token_start=g.token_start - rows) for g in batch.groups[1:])
    ids, positions, write, table, real = (
        x[rows:] for x in (batch.ids_T, batch.positions_T, batch.write_T, batch.table_RP, batch.real_T)
    )
    slot_R = None if batch.slot_R is None else batch.slot_R[rows:]
    return Batch(ids, positions, write, table, real, batch.logits_indices_N, moved, batch.extents[rows:], slot_R=slot_R)


def empty_batch(slots: Slots) -> Batch:
    """A batch without tokens, to be padded."""
    none_T = slots.ints_SI.new_empty(0)
    return Batch(none_T, none_T, none_T, slots.table_SP[:0, :1], none_T.to(torch.bool), none_T, (), slot_R=none_T)


def pad_batch(batch: Batch, tokens: int) -> Batch:
    """The batch with padding behind it, up to so many tokens: rows of one token each on the null page."""
    here = len(batch.ids_T)
    missing = tokens - here
    if missing <= 0:
        return batch

    def padded(x: Tensor, value: int = 0) -> Tensor:
        return torch.cat((x, x.new_full((missing, *x.shape[1:]), value)))

    names = "ids_T", "positions_T", "write_T", "real_T", "table_RP"
    longer: dict[str, Any] = {name: padded(getattr(batch, name)) for name in names}
    if batch.slot_R is not None:
        longer["slot_R"] = padded(batch.slot_R)
    if batch.tree is not None:
        longer["tree"] = TreeMask(padded(batch.tree.columns_T), padded(batch.tree.tree_mask_T, -1), batch.tree.rows)
    rows = sum(group.rows for group in batch.groups)
    groups, extents = (*batch.groups, Group(rows, missing, here, 1, 1)), batch.extents + (RowExtent(1, 1),) * missing
    return replace(batch, **longer, groups=groups, extents=extents)
