"""Verifying a tree of drafts: the path through it that the target draws.

The rule is that of a chain: the target draws a token at every node, each with the coins of its position, and the path
goes on to the child that is the token drawn, until there is none. So the tokens are plain decoding's, whatever the
tree. Of children that are no samples one is accepted with the sum of their probabilities, more than which no rule can
have (Hu et al. 2024, "Towards optimal multi-draft speculative decoding"); a drafter that samples takes the best few of
its own race with the target's coins (`spec.tree`). Children of a node are different tokens; of equal ones the last is
taken.

Letters: E rows, Q nodes of each with the root, K = Q - 1, N = E · Q, D tokens of a path at most, I integers of a
slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.inputs import tree_nodes
from thalweg.batch.slots import Slots
from thalweg.kernels.verify_chain.ref import append, stops
from thalweg.kernels.verify_tree.ref import walk
from thalweg.sampling.chain import SampledPositions


def tree_positions(slots: Slots, slot_E: Tensor, ints_EI: Tensor, query: int) -> SampledPositions:
    """What each node of each row is sampled by: as the position of a chain that has as many drafts before it."""
    node_Q = torch.arange(query, device=slot_E.device)
    slot_N, node_N = slot_E.repeat_interleave(query), node_Q.repeat(len(slot_E))
    _, depth_N, _ = tree_nodes(slots, slot_N, node_N)
    ints_NI = ints_EI.repeat_interleave(query, 0)
    length_N, end_N = ints_NI[:, 0], ints_NI[:, 2]
    column_EK = (ints_EI[:, :1] + node_Q[:-1]).clamp(max=slots.context)
    drafts_EK = slots.tokens_SL[slot_E.unsqueeze(1), column_EK].to(torch.int64)
    length_N += depth_N
    ints_NI[:, 1] += node_N
    end_N *= length_N < end_N
    length_N.clamp_(max=slots.context)
    return SampledPositions(slot_N, ints_NI, drafts_EK)


def tree_paths(slots: Slots, along: SampledPositions, query: int) -> Tensor:
    """int64 [E, Q, D]: the drafts on the path to each node, that of the node last, -1 behind."""
    deepest, rows = slots.tree.max_depth, len(along.drafts_EK)
    node_N = torch.arange(query, device=along.slot_N.device).repeat(rows)
    row_N = torch.arange(rows, device=node_N.device).repeat_interleave(query)
    behind_ND = along.drafts_EK.new_full((rows * query, deepest + 1), -1)  # the last takes what the root has not
    for _ in range(deepest):
        parent_N, depth_N, _ = tree_nodes(slots, along.slot_N, node_N)
        draft_N = along.drafts_EK[row_N, (node_N - 1).clamp(min=0)]
        behind_ND.scatter_(1, torch.where(node_N > 0, depth_N - 1, deepest).unsqueeze(1), draft_N.unsqueeze(1))
        node_N = parent_N
    return behind_ND[:, :deepest].view(rows, query, deepest)


def accept_path(
    tokens_EQ: Tensor, drafts_EK: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Appends the tokens drawn along the path to their slots, and ends those that reached a stop id or their end. →
    tokens of the path int64 [E, D], how many of them, and whether the slot has ended, as `chain.follow`; the nodes at
    which they were drawn, int64 [E, D], the root where there are no more.
    """
    length_E, end_E, made_E = ints_EI[:, 0], ints_EI[:, 2], ints_EI[:, 7]
    query = tokens_EQ.shape[1]
    node_K = torch.arange(1, query, device=slot_E.device)
    parent_EK = slots.nodes_SN3[slot_E, 1:query, 0]
    stop_EQ = stops(tokens_EQ, slots.stop_SK.index_select(0, slot_E))
    # nodes at or past the end were not computed
    real_EK = node_K <= torch.minimum(made_E, end_E - length_E).unsqueeze(1)
    right_EK = real_EK & (tokens_EQ.gather(1, parent_EK) == drafts_EK) & ~stop_EQ.gather(1, parent_EK)
    right_EQ, parent_EQ = (torch.nn.functional.pad(x, (1, 0)) for x in (right_EK, parent_EK))
    nodes_ED = walk(right_EQ, parent_EQ, 1 + min(slots.tree.max_depth, query - 1))
    tokens_ED, stop_ED = tokens_EQ.gather(1, nodes_ED), stop_EQ.gather(1, nodes_ED)
    right_E, held = (nodes_ED > 0).sum(1), (slots.tokens_SL, slots.ints_SI)
    count_E, done_E = append(tokens_ED, stop_ED, right_E, slot_E, ints_EI, *held)
    return tokens_ED, count_E, done_E, nodes_ED
