"""Reference of verifying drafts: finds the accepted path of each row. A chain is a tree with one branch.

Letters: R rows, Q nodes of each with the root, N = R · Q, D tokens of a path at most, M = R · D, K stop ids, I integers
of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.build_inputs.ref import NUM_DRAFTS, InputTensors, SlotTensors


class Verification(NamedTuple):
    """The tokens along each accepted path."""

    tokens_RD: Tensor  # int64
    nodes_RD: Tensor | None  # int64: the nodes at which they were sampled, the root after the last; None for chains
    count_R: Tensor  # int64: tokens of the row, 0 if the slot had ended before
    done_R: Tensor  # bool: the slot has ended


class AcceptedPaths(NamedTuple):
    """The paths as a step of their own, [M]. Padding behind their ends is 0 in all but `token_M`."""

    token_M: Tensor  # int64: which token of the step each is
    ids_M: Tensor
    positions_M: Tensor
    real_M: Tensor  # bool
    from_M: Tensor  # int64: where its KV is
    to_M: Tensor  # int64: where the KV of a chain would be


def walk(is_accepted_RQ: Tensor, parent_RQ: Tensor, deepest: int) -> Tensor:
    """int64 [R, D]: the nodes of each row's path, the root first, and the root again behind the last. is_accepted_RQ
    bool: a node is the token that the target sampled at its parent. Of equal children the path takes the last.
    """
    node_R1, nodes = torch.zeros_like(parent_RQ[:, :1]), list[Tensor]()
    number_Q = torch.arange(parent_RQ.shape[1], device=parent_RQ.device)
    for depth in range(deepest):
        nodes.append(node_R1)
        goes_RQ = is_accepted_RQ & (number_Q > 0) & (parent_RQ == node_R1) & ((node_R1 > 0) | (depth == 0))
        node_R1 = (goes_RQ * number_Q).amax(1, keepdim=True)
    return torch.cat(nodes, 1)


def verify(
    target_ids_N: Tensor,
    step: InputTensors,
    slots: SlotTensors,
    page: int,
    out: Verification,
    paths: AcceptedPaths | None,
) -> None:
    """Appends the target's tokens along the accepted path of each row to its slot, and ends slots that reach a stop id
    or their end.

    target_ids_N int64: the token that the target sampled at each node; below 0 no token could be sampled, which ends
    the slot. Writes the tokens, the first three columns of the slots' integers, `out` and `paths`.
    """
    rows, deepest = out.tokens_RD.shape
    query = len(target_ids_N) // rows
    slot_R, ints_RI = step.slot_T[::query][:rows], step.ints_TI[::query][:rows]
    target_ids_RQ, ids_RQ, real_RQ = (
        x[: rows * query].view(rows, query) for x in (target_ids_N, step.ids_T, step.real_T)
    )
    node_Q, stop_RQ = (
        torch.arange(query, device=slot_R.device),
        _stops(target_ids_RQ, slots.stop_SK.index_select(0, slot_R)),
    )
    if slots.nodes_SN3 is None:
        parent_RQ = (node_Q - 1).clamp(min=0).expand(rows, -1)
    else:
        parent_RQ = slots.nodes_SN3[slot_R, :query, 0]
    is_drafted_RQ = real_RQ & (node_Q <= ints_RI[:, NUM_DRAFTS, None])
    is_accepted_RQ = (target_ids_RQ.gather(1, parent_RQ) == ids_RQ) & ~stop_RQ.gather(1, parent_RQ) & is_drafted_RQ
    nodes_RD = walk(is_accepted_RQ, parent_RQ, deepest)
    tokens_RD, stop_RD = target_ids_RQ.gather(1, nodes_RD), stop_RQ.gather(1, nodes_RD)
    count_R, done_R = _append(tokens_RD, stop_RD, 1 + (nodes_RD > 0).sum(1), slot_R, ints_RI, slots)
    for buffer, value in zip(out, (tokens_RD, nodes_RD, count_R, done_R), strict=True):
        if buffer is not None:
            buffer.copy_(value)
    if paths is None:
        return
    ahead_D = torch.arange(deepest, device=slot_R.device)
    real_RD = ahead_D < count_R.unsqueeze(1)
    token_RD = nodes_RD + query * torch.arange(rows, device=slot_R.device).unsqueeze(1)
    token_M, real_M = token_RD.flatten(), real_RD.flatten()
    to_RD = (step.positions_T[::query].unsqueeze(1) + ahead_D) * real_RD
    to_RD = (slots.table_SP[slot_R.unsqueeze(1), to_RD // page].to(torch.int64) * page + to_RD % page) * real_RD
    ids_M, positions_M, from_M = (x[token_M] * real_M for x in (step.ids_T, step.positions_T, step.write_T))
    for buffer, value in zip(paths, (token_M, ids_M, positions_M, real_M, from_M, to_RD.flatten()), strict=True):
        buffer.copy_(value)


def _stops(tokens_RQ: Tensor, stop_RK: Tensor) -> Tensor:
    """bool [R, Q]: tokens that end their slot; one below 0 does."""
    return (tokens_RQ.unsqueeze(2) == stop_RK.unsqueeze(1)).any(2) | (tokens_RQ < 0)


def _append(
    tokens_RD: Tensor, stop_RD: Tensor, num_tokens_R: Tensor, slot_R: Tensor, ints_RI: Tensor, slots: SlotTensors
) -> tuple[Tensor, Tensor]:
    """Appends up to `num_tokens_R` tokens, none at or past the end; token 0 replaces an invalid one. → number of
    appended tokens, int64 [R]; whether the slot has ended, bool [R].
    """
    length_R, _, end_R, *_ = ints_RI.unbind(1)
    count_R = torch.minimum(num_tokens_R, end_R - length_R).clamp_(min=0) * (end_R > 0)
    new_R = length_R + count_R
    stopped_R = stop_RD.gather(1, (count_R - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    is_running_R = (new_R < end_R) & ~stopped_R
    ahead_D, columns = torch.arange(tokens_RD.shape[1], device=tokens_RD.device), slots.tokens_SL.shape[1]
    column_RD = torch.where(ahead_D < count_R.unsqueeze(1), length_R.unsqueeze(1) + ahead_D, columns - 1)
    place_RD = slot_R.unsqueeze(1) * columns + column_RD
    slots.tokens_SL.view(-1).index_copy_(0, place_RD.flatten(), tokens_RD.flatten().clamp(min=0).to(torch.int32))
    state_R3 = torch.stack((new_R, new_R - 1, end_R * is_running_R), 1)
    slots.ints_SI[:, :3].index_copy_(0, slot_R, state_R3)  # length, num_computed, end
    return count_R, ~is_running_R
