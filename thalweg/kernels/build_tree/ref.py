"""Reference of growing dynamic trees: the likeliest children of a level's nodes, the next level, and the tree that is
left of all candidates.

Candidates of a row are numbered as they are made, from 1 on, so that parents have smaller numbers; 0 is the root. Of
the first level there are B, of each behind it B · B.

Letters: E rows, M nodes of a level that are expanded (1, then B), B children of each, T = E · M, C candidates, K nodes
of the tree, D entries of a head's vocabulary, W of a state, I integers of a slot, S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.build_inputs.ref import END, LENGTH, NUM_COMPUTED, NUM_DRAFTS, SlotTensors


class TreeCandidates(NamedTuple):
    """Scores float32, tokens and parents int64, [E, C]."""

    score_EC: Tensor
    token_EC: Tensor
    parent_EC: Tensor


class TreeLevel(NamedTuple):
    """Nodes that are expanded together, [E, M] each: their numbers, columns between the root's and theirs, and their
    masks (`batch.TreeMask`), int64, the root's any; their scores float32.
    """

    number_EM: Tensor
    ahead_EM: Tensor
    mask_EM: Tensor
    score_EM: Tensor


class LevelInputs(NamedTuple):
    """The same nodes as tokens of a step, [T] each: see `batch.Batch`; which node of the level before each is a child
    of, counted over all rows.
    """

    ids_T: Tensor
    positions_T: Tensor
    columns_T: Tensor
    tree_mask_T: Tensor
    write_T: Tensor
    real_T: Tensor
    from_T: Tensor


class BuiltTree(NamedTuple):
    """Tokens and parents of each row's tree, int64 [E, K]; bool, see `spec.drafter.DraftOutput`."""

    token_EK: Tensor
    parent_EK: Tensor
    is_valid_E: Tensor


def top_children(logits_TD: Tensor, branches: int, ids_D: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities float32 and tokens int64 [T, B] of the likeliest children. What is no number counts as
    impossible: a tree must be one whatever a drafter computes. ids_D: which tokens the logits are of, if not in
    order.
    """
    score_TD = logits_TD.log_softmax(-1)
    score_TD.masked_fill_(score_TD.isnan(), -torch.inf)
    score_TB, token_TB = score_TD.topk(branches, -1)
    return score_TB, token_TB if ids_D is None else ids_D[token_TB]


def first_candidate(level: int, branches: int) -> int:
    """The number of candidates before those of this level."""
    return branches * (1 + branches * (level - 1)) if level else 0


def expand_level(
    score_TB: Tensor, token_TB: Tensor, level: TreeLevel, depth: int, slot_E: Tensor, ints_EI: Tensor, table_SP: Tensor,
    page: int, made: TreeCandidates
) -> tuple[TreeLevel, LevelInputs]:  # fmt: skip
    """Notes the children of a level, of this depth, as candidates, and makes the next level of the best of them. Each
    is entered behind all that were expanded before. Nodes at or past their slot's end are padding. ints_EI: the slots'
    integers; page: its tokens.
    """
    many, nodes = level.number_EM.shape
    branches, first = score_TB.shape[1], first_candidate(depth, score_TB.shape[1])
    score_EC = (score_TB.view(many, nodes, branches) + level.score_EM.unsqueeze(2)).flatten(1)
    token_EC, here = token_TB.view(many, -1), slice(first, first + nodes * branches)
    made.score_EC[:, here], made.token_EC[:, here] = score_EC, token_EC
    made.parent_EC[:, here] = level.number_EM.repeat_interleave(branches, 1)
    score_EM, best_EM = score_EC.topk(branches, 1)
    parent_EM, ids_EM = best_EM // branches, token_EC.gather(1, best_EM)
    start = 1 + depth * branches
    ahead_EM = torch.arange(start, start + branches, device=best_EM.device).expand_as(best_EM)
    further_EM = ahead_EM - level.ahead_EM.gather(1, parent_EM)
    parent_mask_EM = level.mask_EM.gather(1, parent_EM) if depth else torch.full_like(parent_EM, -1)
    mask_EM = child_mask(parent_mask_EM, further_EM)
    column_EM = ints_EI[:, NUM_COMPUTED, None] + ahead_EM
    real_EM = column_EM < ints_EI[:, END, None]
    column_EM = column_EM * real_EM
    page_EM = table_SP[slot_E.unsqueeze(1), column_EM // page].to(torch.int64)
    write_EM = (page_EM * page + column_EM % page) * real_EM
    position_EM = (ints_EI[:, NUM_COMPUTED, None] + depth + 1) * real_EM
    from_EM = parent_EM + nodes * torch.arange(many, device=best_EM.device).unsqueeze(1)
    step = ids_EM * real_EM, position_EM, column_EM, mask_EM, write_EM, real_EM, from_EM
    return TreeLevel(best_EM + first + 1, ahead_EM, mask_EM, score_EM), LevelInputs(*(x.flatten() for x in step))


def store_best_tree(
    made: TreeCandidates,
    branches: int,
    state_TW: Tensor,
    given_EW: Tensor,
    slot_E: Tensor,
    ints_EI: Tensor,
    fields: SlotTensors,
    out: BuiltTree,
) -> None:
    """Puts the tree of each row into its slot and into `out`: the best K candidates, best first; a parent is never
    worse than its children, and comes first where they are equal. state_TW: of what was expanded last; given_EW: behind
    the token before the root. Where even a node's first child is impossible, its logits were no numbers.
    """
    (many, count), width = made.score_EC.shape, out.token_EK.shape[1]
    deepest = 1 + (count // branches - 1) // branches
    order_EC = made.score_EC.sort(dim=1, descending=True, stable=True).indices
    number_EC = torch.empty_like(order_EC).scatter_(
        1, order_EC, torch.arange(1, count + 1, device=order_EC.device).expand_as(order_EC)
    )
    order_EK = order_EC[:, :width]
    parent_EK = torch.nn.functional.pad(number_EC, (1, 0)).gather(1, made.parent_EC.gather(1, order_EK))
    depth_EK = torch.where(order_EK < branches, 1, 2 + (order_EK - branches) // branches**2)
    token_EK, mask_EK = made.token_EC.gather(1, order_EK), tree_masks_of(parent_EK, depth_EK, deepest)[:, 1:]
    store_tree(token_EK, parent_EK, depth_EK, mask_EK, slot_E, ints_EI, fields)
    score_EN = torch.nn.functional.pad(made.score_EC, (1, 0))  # the root's is 0
    first_EM, of_EM = made.score_EC[:, ::branches], score_EN.gather(1, made.parent_EC[:, ::branches])
    numbers_E = (first_EM.isfinite() | ~of_EM.isfinite()).all(1)
    is_valid_E = numbers_E & state_TW.isfinite().view(many, -1).all(1) | ~given_EW.isfinite().all(1)
    for held, one in zip(out, (token_EK, parent_EK, is_valid_E), strict=True):
        held.copy_(one)


def store_tree(
    token_EK: Tensor,
    parent_EK: Tensor,
    depth_EK: Tensor,
    mask_EK: Tensor,
    slot_E: Tensor,
    ints_EI: Tensor,
    fields: SlotTensors,
) -> None:
    """Stores trees in their slots: their tokens after the known ones, and their number of drafts."""
    nodes, columns = token_EK.shape[1], fields.tokens_SL.shape[1]
    fields.ints_SI[:, NUM_DRAFTS].index_fill_(0, slot_E, nodes)
    form_EK3 = torch.stack((parent_EK, depth_EK, mask_EK), 2)
    assert fields.nodes_SN3 is not None, "trees have nodes"
    fields.nodes_SN3[:, 1 : 1 + nodes].index_copy_(0, slot_E, form_EK3)
    column_EK = ints_EI[:, LENGTH, None] + torch.arange(nodes, device=slot_E.device)
    place_EK = slot_E.unsqueeze(1) * columns + column_EK.clamp(max=columns - 1)
    fields.tokens_SL.view(-1).index_copy_(0, place_EK.flatten(), token_EK.flatten().to(torch.int32))


def tree_masks_of(parent_EK: Tensor, depth_EK: Tensor, deepest: int) -> Tensor:
    """int64 [E, 1 + K]: the mask of each node, the root first, if nodes stand behind each other in their order."""
    mask_EN = torch.nn.functional.pad(torch.zeros_like(parent_EK), (1, 0), value=-1)
    further_EK = torch.arange(1, parent_EK.shape[1] + 1, device=parent_EK.device) - parent_EK
    for depth in range(1, deepest + 1):
        behind_EK = child_mask(mask_EN.gather(1, parent_EK), further_EK)
        mask_EN[:, 1:] = torch.where(depth_EK == depth, behind_EK, mask_EN[:, 1:])
    return mask_EN


def child_mask(parent_mask: Tensor, further: Tensor) -> Tensor:
    """The mask of a child that stands so many columns behind its parent: what the parent sees, and itself."""
    return (parent_mask << further) | 1
