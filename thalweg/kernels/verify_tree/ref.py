"""Reference of a step whose rows each verify a tree: its inputs out of the slots, and the path that the target draws.

Letters: R rows, Q nodes of each with the root, N = R · Q, D tokens of a path at most, M = R · D, I integers of a slot,
P pages of a context, S slots, L columns of the tokens plane, K stop ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.verify_chain.ref import append, stops


class SlotTensors(NamedTuple):
    """Of the slots, see `batch.slots`: stop ids int64, tokens int32, integers int64, page tables, and of each node of a
    tree its parent, its depth and its mask, int64.
    """

    stop_SK: Tensor
    tokens_SL: Tensor
    ints_SI: Tensor
    table_SP: Tensor
    nodes_SN3: Tensor


class TreeInputs(NamedTuple):
    """The nodes of a step, row by row: ids, positions, columns, masks and where KV goes, int64; bool, False where
    one is padding, which is 0 in all of them but the masks. table_RP: the first columns of the rows' page tables. slot_N;
    ints_NI: the slots' integers as if the path before the node were known, longer by its depth, at most the context,
    and ended where that is the end or behind it; `at` is its own column.
    """

    ids_N: Tensor
    positions_N: Tensor
    columns_N: Tensor
    tree_mask_N: Tensor
    write_N: Tensor
    real_N: Tensor
    table_RP: Tensor
    slot_N: Tensor
    ints_NI: Tensor


class TreeVerification(NamedTuple):
    """What was drawn along each path: tokens and the nodes at which they were drawn, int64 [R, D], the root's behind
    the last; how many are the row's (0 where the slot had ended before), int64 [R]; whether the slot has ended, bool
    [R].
    """

    tokens_RD: Tensor
    nodes_RD: Tensor
    count_R: Tensor
    done_R: Tensor


class AcceptedPaths(NamedTuple):
    """The paths as a step of their own, int64 [M], real_M bool; padding behind their ends, which is 0 in all but the
    first. token_M: which token of the step each is. from_M, to_M: where the KV of it stands, and where that of a chain
    would.
    """

    token_M: Tensor
    ids_M: Tensor
    positions_M: Tensor
    real_M: Tensor
    from_M: Tensor
    to_M: Tensor


def build_tree_inputs(slot_R: Tensor, fields: SlotTensors, query: int, pages: int, page: int) -> TreeInputs:
    """slot_R int64: whose trees. query: nodes with the root; those that were not made are padding. pages: columns of
    the tables. page: its tokens.
    """
    rows, context = len(slot_R), fields.tokens_SL.shape[1] - 1
    slot_N, node_N = slot_R.repeat_interleave(query), torch.arange(query, device=slot_R.device).repeat(rows)
    ints_NI = fields.ints_SI.index_select(0, slot_N)
    length_N, at_N, end_N, made_N = (ints_NI[:, i] for i in (0, 1, 2, 7))
    _, depth_N, tree_mask_N = fields.nodes_SN3[slot_N, node_N].unbind(1)
    real_N = (at_N + node_N < end_N) & (node_N <= made_N)
    column_N = (at_N + node_N) * real_N
    page_N = fields.table_SP[slot_N, column_N // page].to(torch.int64)
    write_N = (page_N * page + column_N % page) * real_N
    ids_N = fields.tokens_SL[slot_N, column_N].to(torch.int64) * real_N
    length_N += depth_N
    at_N += node_N
    end_N *= length_N < end_N
    length_N.clamp_(max=context)
    table_RP = fields.table_SP[:, :pages].index_select(0, slot_R)
    position_N = column_N - (node_N - depth_N) * real_N
    return TreeInputs(ids_N, position_N, column_N, tree_mask_N, write_N, real_N, table_RP, slot_N, ints_NI)


def walk(right_RQ: Tensor, parent_RQ: Tensor, deepest: int) -> Tensor:
    """int64 [R, D]: the nodes of each row's path, D = deepest, the root first, and the root again behind the last.
    right_RQ bool: whether a node is the token that was drawn at its parent; parent_RQ: that one's number, int64. Of
    equal children the path goes on to the last.
    """
    node_R1, nodes = torch.zeros_like(parent_RQ[:, :1]), list[Tensor]()
    number_Q = torch.arange(parent_RQ.shape[1], device=parent_RQ.device)
    for depth in range(deepest):
        nodes.append(node_R1)
        goes_RQ = right_RQ & (number_Q > 0) & (parent_RQ == node_R1) & ((node_R1 > 0) | (depth == 0))
        node_R1 = (goes_RQ * number_Q).amax(1, keepdim=True)
    return torch.cat(nodes, 1)


def verify_tree(
    drawn_N: Tensor, step: TreeInputs, fields: SlotTensors, page: int, out: TreeVerification, paths: AcceptedPaths
) -> None:
    """Appends the tokens drawn along the path of each row to its slot, and ends those that reached a stop id or their
    end.

    drawn_N int64: what was drawn at each node, below 0 where no token could be, which ends a slot, too. Writes the
    tokens and the first three columns of the slots' integers, `out` and `paths`.
    """
    rows, deepest = out.tokens_RD.shape
    slot_R, query = step.slot_N[:: len(drawn_N) // rows], len(drawn_N) // rows
    ints_RI, drawn_RQ, ids_RQ = step.ints_NI[::query], drawn_N.view(rows, query), step.ids_N.view(rows, query)
    parent_RQ = fields.nodes_SN3[slot_R, :query, 0]
    stop_RQ = stops(drawn_RQ, fields.stop_SK.index_select(0, slot_R))
    right_RQ = (drawn_RQ.gather(1, parent_RQ) == ids_RQ) & ~stop_RQ.gather(1, parent_RQ) & step.real_N.view(rows, query)
    nodes_RD = walk(right_RQ, parent_RQ, deepest)
    tokens_RD, stop_RD = drawn_RQ.gather(1, nodes_RD), stop_RQ.gather(1, nodes_RD)
    right_R = (nodes_RD > 0).sum(1)
    count_R, done_R = append(tokens_RD, stop_RD, right_R, slot_R, ints_RI, fields.tokens_SL, fields.ints_SI)
    for held, one in zip(out, (tokens_RD, nodes_RD, count_R, done_R), strict=True):
        held.copy_(one)
    ahead_D = torch.arange(deepest, device=slot_R.device)
    real_RD = ahead_D < count_R.unsqueeze(1)
    token_RD = nodes_RD + query * torch.arange(rows, device=slot_R.device).unsqueeze(1)
    token_M, real_M = token_RD.flatten(), real_RD.flatten()
    to_RD = (ints_RI[:, 1:2] + ahead_D) * real_RD
    to_RD = (fields.table_SP[slot_R.unsqueeze(1), to_RD // page].to(torch.int64) * page + to_RD % page) * real_RD
    ids_M, positions_M, from_M = (x[token_M] * real_M for x in (step.ids_N, step.positions_N, step.write_N))
    for held, one in zip(paths, (token_M, ids_M, positions_M, real_M, from_M, to_RD.flatten()), strict=True):
        held.copy_(one)
