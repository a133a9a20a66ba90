"""Verifies drafts: accepts those that equal the tokens that the target samples. A chain is a tree with one branch.

The target samples a token at the root and at each draft, with the noise of its position. The accepted path continues
to the draft that equals the sampled token. If no draft does, the path ends with the sampled token. So the tokens are
those of plain decoding, whatever was drafted.

A draft that is not sampled is accepted with its probability p(d), and several children of a node with the sum of their
probabilities, more than which no rule can have (Hu et al. 2024, "Towards optimal multi-draft speculative decoding"). A
drafter that samples uses the same noise (`random.exponential`), so that both choose the same token with a probability
of at least (1 - D) / (1 + D), D being the total variation distance of their distributions (Daliri, Musco, Suresh 2024,
"Coupling without communication and drafter-invariant speculative decoding", theorem 1). Of equal children of a node the
last is taken.

Letters: E rows, Q sampled positions of each, K = Q - 1 drafts, N = E · Q, D tokens of a path at most, I integers of a
slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.batch.inputs import tree_nodes
from thalweg.batch.slots import Slots
from thalweg.kernels.build_inputs.ref import END, LENGTH, InputTensors
from thalweg.kernels.verify import ref


class SampledPositions(NamedTuple):
    """The positions at which each row is sampled."""

    slot_N: Tensor  # int64
    ints_NI: Tensor  # int64: the slots' integers as if the drafts before were known; ended at the end of the slot
    drafts_EK: Tensor  # int64


def sampled_positions(slots: Slots, slot_E: Tensor, ints_EI: Tensor, query: int) -> SampledPositions:
    """Positions of the last known token of each row and of its drafts: a chain, or the nodes of a tree."""
    if query == 1:
        return SampledPositions(slot_E, ints_EI, slot_E.new_empty(len(slot_E), 0))
    node_Q = torch.arange(query, device=slot_E.device)
    slot_N, node_N = slot_E.repeat_interleave(query), node_Q.repeat(len(slot_E))
    depth_N = tree_nodes(slots, slot_N, node_N)[1] if slots.tree.is_tree_step(query) else node_N
    ints_NI = ints_EI.repeat_interleave(query, 0)
    length_N, num_computed_N, end_N, *_ = ints_NI.unbind(1)
    column_EK = (ints_EI[:, LENGTH, None] + node_Q[:-1]).clamp(max=slots.context)
    drafts_EK = slots.tokens_SL[slot_E.unsqueeze(1), column_EK].to(torch.int64)
    length_N += depth_N
    num_computed_N += node_N
    end_N *= length_N < end_N
    length_N.clamp_(max=slots.context)  # beyond the end nothing is accepted, but indices must be valid
    return SampledPositions(slot_N, ints_NI, drafts_EK)


def tree_paths(slots: Slots, positions: SampledPositions, query: int) -> Tensor:
    """int64 [E, Q, D]: the drafts on the path to each node, that of the node last, then -1."""
    deepest, rows = slots.tree.max_depth, len(positions.drafts_EK)
    node_N = torch.arange(query, device=positions.slot_N.device).repeat(rows)
    row_N = torch.arange(rows, device=node_N.device).repeat_interleave(query)
    # the last column takes what is written for the root, which is no draft
    path_tokens_ND = positions.drafts_EK.new_full((rows * query, deepest + 1), -1)
    for _ in range(deepest):
        parent_N, depth_N, _ = tree_nodes(slots, positions.slot_N, node_N)
        draft_N = positions.drafts_EK[row_N, (node_N - 1).clamp(min=0)]
        path_tokens_ND.scatter_(1, torch.where(node_N > 0, depth_N - 1, deepest).unsqueeze(1), draft_N.unsqueeze(1))
        node_N = parent_N
    return path_tokens_ND[:, :deepest].view(rows, query, deepest)


def accept_drafts(
    target_ids_EQ: Tensor, positions: SampledPositions, slots: Slots, slot_E: Tensor, ints_EI: Tensor
) -> ref.Verification:
    """Appends the target's tokens along the accepted path of each row to its slot, and ends slots that reached a stop
    id or their end. `nodes_RD` is None for chains.
    """
    rows, query = target_ids_EQ.shape
    is_tree = slots.tree.is_tree_step(query)
    deepest = 1 + min(slots.tree.max_depth, query - 1) if is_tree else query
    tokens_ED = target_ids_EQ.new_empty(rows, deepest)
    nodes_ED = torch.empty_like(tokens_ED) if is_tree else None
    out = ref.Verification(
        tokens_ED, nodes_ED, *(target_ids_EQ.new_empty(rows, dtype=kind) for kind in (torch.int64, torch.bool))
    )
    ids_N = torch.cat((target_ids_EQ[:, :1], positions.drafts_EK), 1).flatten()  # the root may be any token
    node_Q = torch.arange(query, device=slot_E.device)
    # nodes past the end were not computed
    real_N = (node_Q <= (ints_EI[:, END] - ints_EI[:, LENGTH]).unsqueeze(1)).flatten()
    step = InputTensors(
        ids_N, ids_N, ids_N, real_N, slots.table_SP, slot_T=positions.slot_N,
        ints_TI=ints_EI.repeat_interleave(query, 0),
    )  # fmt: skip
    ref.verify(target_ids_EQ.flatten(), step, slots.tensors(is_tree), slots.page_size, out, None)
    return out
