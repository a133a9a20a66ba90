"""Reference of the inputs of a step, out of its slots: tokens of chains, or nodes of trees.

Letters: R rows, T tokens, I integers of a slot, P pages of a context, S slots, L columns of the tokens plane, N nodes
of a tree with its root.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlotTensors(NamedTuple):
    """Tensors of the slots, see `batch.slots`."""

    stop_SK: Tensor
    tokens_SL: Tensor
    ints_SI: Tensor
    table_SP: Tensor
    nodes_SN3: Tensor | None  # None: drafts are chains


class InputTensors(NamedTuple):
    """Inputs of a step. Padding is 0 in all but masks, slots and integers."""

    ids_T: Tensor  # int64
    positions_T: Tensor  # int64
    write_T: Tensor  # int64: where KV goes
    real_T: Tensor  # bool: False for padding
    table_RP: Tensor  # the first columns of the rows' page tables
    ints_TI: Tensor  # the slots' integers as if all tokens before were known; ended at the end of the slot
    slot_T: Tensor  # int64
    columns_T: Tensor | None = None  # int64, of trees: the column in the context, see `batch.TreeMask`
    tree_mask_T: Tensor | None = None  # int64, of trees


def build_inputs(
    slot_R: Tensor, ahead_R: Tensor | None, slots: SlotTensors, pages: int, page: int, query: int = 1
) -> InputTensors:
    """Without `ahead_R` each row is a tree of `query` nodes; nodes that were not drafted are padding.

    slot_R int64. ahead_R int64: how far each token is behind the next position of its slot; a row is one token then.
    pages: columns of the tables. page: tokens of a page. Tokens at or past the end of their slot are padding.
    """
    node_T = torch.arange(query, device=slot_R.device).repeat(len(slot_R)) if ahead_R is None else ahead_R
    slot_T = slot_R.repeat_interleave(query)
    ints_TI = slots.ints_SI.index_select(0, slot_T)
    length_T, at_T, end_T = ints_TI[:, 0], ints_TI[:, 1], ints_TI[:, 2]
    at_T += node_T
    real_T, depth_T, mask_T = at_T < end_T, node_T, None
    if ahead_R is None:
        assert slots.nodes_SN3 is not None, "trees have nodes"
        _, depth_T, mask_T = slots.nodes_SN3[slot_T, node_T].unbind(1)
        real_T &= node_T <= ints_TI[:, 7]
    column_T = at_T * real_T
    page_T = slots.table_SP[slot_T, column_T // page].to(torch.int64)
    write_T = (page_T * page + column_T % page) * real_T
    ids_T = slots.tokens_SL[slot_T, column_T].to(torch.int64) * real_T
    length_T += depth_T
    end_T *= length_T < end_T
    length_T.clamp_(max=slots.tokens_SL.shape[1] - 1)
    table_RP = slots.table_SP[:, :pages].index_select(0, slot_R)
    position_T = column_T - (node_T - depth_T) * real_T
    tree = (None, None) if mask_T is None else (column_T, mask_T)
    return InputTensors(ids_T, position_T, write_T, real_T, table_RP, ints_TI, slot_T, *tree)
