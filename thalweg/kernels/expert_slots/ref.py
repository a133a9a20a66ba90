"""In which slots the chosen experts of tokens are. A slot holds the weights of one expert on one rank; an expert with
copies is in several.

Letters: T tokens, N tokens that a rank computes, K experts of a token, E experts, C slots of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIXERS = 0x9E3779B1, 0x85EBCA6B  # odd, with bits all over: neighbouring ids give unlike products


def choose(ids_TK: Tensor, slot_EC: Tensor, count_E: Tensor, load_E: Tensor | None = None) -> Tensor:
    """int32 [T, K]: a slot of each chosen expert; -1 of none, an id of E or more. All of a token's experts decide
    which, in whatever order.

    slot_EC, count_E: int64, the slots of each expert and how many they are. load_E: int64, counts the tokens that chose
    each of its experts but the last number, which counts all else.
    """
    ids_TK = ids_TK.long()
    if load_E is not None:
        chosen = ids_TK.flatten().clamp(max=len(load_E) - 1)
        load_E.index_add_(0, chosen, torch.ones_like(chosen))
    is_expert_TK = ids_TK < len(count_E)
    ids_TK = ids_TK * is_expert_TK
    if slot_EC.shape[1] == 1:
        slot_TK = slot_EC[ids_TK, 0]
    else:
        token_T1 = ((ids_TK + 1) * MIXERS[0] & 0xFFFFFFFF).sum(1, keepdim=True)
        slot_TK = slot_EC[ids_TK, (token_T1 * MIXERS[1] >> 16 & 0xFFFF) % count_E[ids_TK]]
    return slot_TK.masked_fill(~is_expert_TK, -1).int()


def local_slots(slot_NK: Tensor, first: int, slots: int) -> Tensor:
    """int32 [N, K]: slots as this rank numbers its own, which are `slots` from the first on; `slots` for all others."""
    own_NK = slot_NK - first
    is_here_NK = (own_NK >= 0) & (own_NK < slots)
    return torch.where(is_here_NK, own_NK, slots).int()
