"""Reference of the inputs of a step, out of its slots: tokens of chains, or nodes of trees.

Letters: R rows, T tokens, I integers of a slot, P pages of a context, S slots, L columns of the tokens plane, N nodes
of a tree with its root.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# columns of a slot's integers and floats: see `batch.slots`
INTS = ("length", "num_computed", "end", "seed", "prompt_len", "min_len", "top_k", "num_drafts")
LENGTH, NUM_COMPUTED, END, SEED, PROMPT_LEN, MIN_LEN, TOP_K, NUM_DRAFTS = range(len(INTS))
FLOATS = ("temperature", "top_p", "min_p", "repetition", "frequency", "presence")
TEMPERATURE = 0


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
    slot_T = slot_R if ahead_R is not None else slot_R.repeat_interleave(query)
    ints_TI, table_RP = slots.ints_SI.index_select(0, slot_T), slots.table_SP[:, :pages].index_select(0, slot_R)
    length_T, num_computed_T, end_T, *_ = ints_TI.unbind(1)
    tree: tuple[Tensor, ...] = ()
    if ahead_R is not None:
        num_computed_T += ahead_R
        length_T += ahead_R
        ids_T, position_T, write_T, real_T = gather(
            slots.tokens_SL, slots.table_SP, page, slot_T, num_computed_T, end_T
        )
    else:
        assert slots.nodes_SN3 is not None, "trees have nodes"
        node_T = torch.arange(query, device=slot_R.device).repeat(len(slot_R))
        _, depth_T, mask_T = slots.nodes_SN3[slot_T, node_T].unbind(1)
        num_computed_T += node_T
        length_T += depth_T
        drafted_end_T = end_T * (node_T <= ints_TI[:, NUM_DRAFTS])
        ids_T, column_T, write_T, real_T = gather(
            slots.tokens_SL, slots.table_SP, page, slot_T, num_computed_T, drafted_end_T
        )
        position_T, tree = column_T - (node_T - depth_T) * real_T, (column_T, mask_T.contiguous())
    end_T *= length_T < end_T
    length_T.clamp_(max=slots.tokens_SL.shape[1] - 1)
    return InputTensors(ids_T, position_T, write_T, real_T, table_RP, ints_TI, slot_T, *tree)


class RaggedInputs(NamedTuple):
    """Inputs of rows with any number of tokens, in their order. Padding is 0 in all of a token's."""

    ids_T: Tensor  # in the type of the tokens plane
    positions_T: Tensor  # int64
    write_T: Tensor  # int64: where KV goes
    real_T: Tensor  # bool: False for padding
    table_RP: Tensor  # the first columns of the rows' page tables
    ints_RI: Tensor  # the slots' integers


def build_ragged(rows_2R: Tensor, tokens: int, longest: int, slots: SlotTensors, pages: int, page: int) -> RaggedInputs:
    """Of each row the tokens from the next position of its slot on.

    rows_2R: int64 [2, R + 1]: slots, and the first token of each row, in the last column 0 and `tokens`. longest: the
    most tokens of a row. pages, page: see `build_inputs`. Tokens at or past the end of their slot are padding.
    """
    slot_R = rows_2R[0, :-1]
    ints_RI, table_RP = slots.ints_SI.index_select(0, slot_R), slots.table_SP[:, :pages].index_select(0, slot_R)
    slot_T, column_T, end_T = slot_R, ints_RI[:, NUM_COMPUTED], ints_RI[:, END]
    if longest > 1:  # single tokens need no expansion
        row_T, column_T = expand(rows_2R[1], tokens, column_T)
        slot_T, end_T = slot_R.index_select(0, row_T), end_T.index_select(0, row_T)
    return RaggedInputs(*gather(slots.tokens_SL, slots.table_SP, page, slot_T, column_T, end_T), table_RP, ints_RI)


def expand(first_R1: Tensor, tokens: int, computed_R: Tensor) -> tuple[Tensor, Tensor]:
    """Row and position of each token. first_R1: the first token of each row, then `tokens`."""
    rows, device = len(computed_R), first_R1.device
    # told how many there are, the expansion does not ask the device
    row_T = torch.arange(rows, device=device).repeat_interleave(first_R1.diff(), output_size=tokens)
    base_T = (computed_R - first_R1[:-1]).index_select(0, row_T)
    return row_T, base_T + torch.arange(tokens, device=device)


def gather(
    tokens_SL: Tensor, table_SP: Tensor, page: int, slot_T: Tensor, column_T: Tensor, end_T: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token, column, write index of each token, and False where it is padding, which is 0 in all of them: at or past
    the end of its slot.
    """
    real_T = column_T < end_T
    column_T = column_T * real_T
    page_T = table_SP.view(-1).index_select(0, slot_T * table_SP.shape[1] + column_T // page)
    write_T = torch.add(column_T % page, page_T, alpha=page) * real_T
    ids_T = tokens_SL.view(-1).index_select(0, slot_T * tokens_SL.shape[1] + column_T) * real_T
    return ids_T, column_T, write_T, real_T
