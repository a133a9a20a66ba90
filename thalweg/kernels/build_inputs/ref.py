"""Reference of a decode step's inputs."""

from __future__ import annotations

import torch
from torch import Tensor

DecodeInputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def build_decode_inputs(
    slot_R: Tensor, ahead_R: Tensor, ints_SI: Tensor, tokens_SL: Tensor, table_SP: Tensor, pages: int, page: int
) -> DecodeInputs:
    """→ ids, positions, write index int64 [R], real bool [R], the first `pages` columns of the tables, and the slots'
    integers [R, I] as if what stands up to the row were known: longer by `ahead`, at most the context, and ended where
    that is the end or behind it. slot_R int64. ahead_R int64: how far behind the slot's next position the row's lies.
    page: its tokens. Rows at or past their end are padding: 0 in all of them. ints_SI: see `batch.slots`, whose first
    columns are length, position and end.
    """
    ints_RI = ints_SI.index_select(0, slot_R)
    length_R, at_R, end_R = ints_RI[:, 0], ints_RI[:, 1] + ahead_R, ints_RI[:, 2]
    real_R = at_R < end_R
    position_R = at_R * real_R
    entry_R = table_SP[slot_R, position_R // page].to(torch.int64)
    write_R = (entry_R * page + position_R % page) * real_R
    ids_R = tokens_SL[slot_R, position_R].to(torch.int64) * real_R
    length_R += ahead_R
    end_R *= length_R < end_R
    length_R.clamp_(max=tokens_SL.shape[1] - 1)
    return ids_R, position_R, write_R, real_R, table_SP[:, :pages].index_select(0, slot_R), ints_RI
