"""Draft trees: a draft head proposes several children of each node.

A dynamic tree (EAGLE-2; Li et al. 2024, arXiv 2406.16858, §4) grows where the head is most certain: of each level the
few nodes with the best cumulative score are expanded, and of all that were made the best become the tree, by the same
score. A static one has the same form in every step. A score is the log-probability of a path under the head; for a row
that samples, plus the Gumbel noise that the target will add at that position (`sampling.random`), so that the children
of a node are the tokens that the target most likely draws.

The head's KV of expanded nodes is stored after the known tokens of the slot, in the order of expansion. It is written
again when tokens are accepted.

Letters: E rows, M nodes of a level that are expanded, B children of each, T = E · M, C candidates, K nodes of the tree,
W of a state, V vocabulary, D of the head.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, RowExtent, TreeMask
from thalweg.batch.draft_selection import DraftSelection
from thalweg.batch.inputs import gather
from thalweg.batch.slots import Slots, upload
from thalweg.core.plan import SamplingNeeds
from thalweg.core.tree import TreeShape
from thalweg.kernels.build_inputs.ref import LENGTH, NUM_COMPUTED, SEED
from thalweg.kernels.build_tree.ref import (
    BuiltTree,
    LevelInputs,
    TreeCandidates,
    TreeLevel,
    first_candidate,
    store_tree,
    tree_masks_of,
)
from thalweg.memory.planes import Planes
from thalweg.models.draft_head import DraftHead
from thalweg.sampling.distribution import SamplingDistribution
from thalweg.sampling.draft_sampling import DraftSampling
from thalweg.spec.autoregressive import HIDDEN, AutoregressiveDrafter, spread
from thalweg.spec.drafter import DraftOutput, DraftRequest

AT_ONCE = 256  # nodes whose logits are in memory at once


class Node(NamedTuple):
    """A node of a static tree. parent: number of its parent; rank: which child of the parent, from 0; depth: 1 for a
    child of the root.
    """

    parent: int
    rank: int
    depth: int


class StaticTreeLevel(NamedTuple):
    """The expansion of the nodes of one depth of a static tree. nodes: their numbers. node_parents: indices of their
    parents among the nodes of the level before. children: numbers of the new nodes. parents: indices of their parents
    among `nodes`. rank: which child of its parent each is.
    """

    nodes: tuple[int, ...]
    node_parents: tuple[int, ...]
    children: tuple[int, ...]
    parents: tuple[int, ...]
    rank: tuple[int, ...]


class Rows(NamedTuple):
    """Rows to build trees for. ints_EI: integers of their slots; state_EW: hidden state before the last known token.
    max_kv_len: upper bound of their contexts with all nodes.
    """

    slot_E: Tensor
    ints_EI: Tensor
    state_EW: Tensor
    max_kv_len: int
    needs: SamplingNeeds


class Known(NamedTuple):
    """Nodes of a static tree that are expanded together. ahead_EM: columns between the root's and theirs; mask_EM: see
    `batch.TreeMask`; depth: of all.
    """

    ids_EM: Tensor
    state_EMW: Tensor
    ahead_EM: Tensor
    mask_EM: Tensor
    depth: int


class TreeDrafter(AutoregressiveDrafter):
    """The `Drafter` of one head that drafts trees of up to this shape. One draft is a chain."""

    def __init__(
        self, head: DraftHead, draft_sampling: DraftSampling, shape: TreeShape, has_own_weights: bool = False
    ) -> None:
        super().__init__(head, draft_sampling, has_own_weights)
        self.shape = shape
        self.order = () if shape.dynamic else static(shape)

    def propose(self, request: DraftRequest, num_drafts: int, slots: Slots, planes: Planes) -> DraftOutput | None:
        if not self.shape.is_tree_step(1 + num_drafts):
            return super().propose(request, num_drafts, slots, planes)
        if not self.shape.dynamic:
            return self._static(request, num_drafts, slots, planes)
        slot_E, nodes = request.slot_E, min(num_drafts, first_candidate(self._levels(num_drafts), self.shape.branching))
        token_EK, parent_EK = (slot_E.new_empty(len(slot_E), nodes) for _ in range(2))
        out = BuiltTree(token_EK, parent_EK, torch.empty_like(slot_E, dtype=torch.bool))
        self.grow(request, num_drafts, slots, planes, out)
        return DraftOutput(token_EK, slots.num_drafts.index_select(0, slot_E), out.is_valid_E, parent_EK)

    def _levels(self, num_drafts: int) -> int:
        return min(self.shape.max_depth, num_drafts)

    def _static(self, request: DraftRequest, num_drafts: int, slots: Slots, planes: Planes) -> DraftOutput:
        slot_E, order, device, many = (
            request.slot_E,
            self.order[:num_drafts],
            request.slot_E.device,
            len(request.slot_E),
        )
        ints_EI, state_EW = slots.ints_SI.index_select(0, slot_E), slots.extra[HIDDEN].index_select(0, slot_E)
        max_kv_len = self._max_kv_len(request, slots)
        rows = Rows(slot_E, ints_EI, state_EW, max_kv_len, request.needs)
        selection = self.first_selection(many, max_kv_len, device)
        forms = [node.parent for node in order], [node.depth for node in order]
        parent_1K, depth_1K = upload(forms, torch.int64, device).chunk(2)
        mask_1N = tree_masks_of(parent_1K, depth_1K, self.shape.max_depth)
        root_E1 = slots.tokens_SL[slot_E, ints_EI[:, NUM_COMPUTED]].to(torch.int64).unsqueeze(1)
        token_EN, state_EMW = root_E1.repeat(1, 1 + len(order)), state_EW.unsqueeze(1)
        # whether logits were numbers: else not even a node's first child is possible
        numbers_E = torch.ones_like(slot_E, dtype=torch.bool)
        for depth, level in enumerate(static_tree_levels(order)):
            node_M, node_parents_M = upload((level.nodes, level.node_parents), torch.int64, device)
            places = node_M.expand(many, -1), mask_1N[0, node_M].expand(many, -1)
            own = selection and selection.later(len(node_M)) if depth else selection
            known = Known(token_EN[:, node_M], state_EMW[:, node_parents_M], *places, depth)
            batch = self._batch(known, rows, slots, own)
            state_TW = self.steps.forward(batch.ids_T, state_EMW[:, node_parents_M].flatten(0, 1), batch, planes)
            state_EMW = state_TW.view(many, len(node_M), -1)
            score_TB, token_TB = self._best(state_TW, rows, depth, slots)
            numbers_E &= score_TB[:, 0].isfinite().view(many, -1).all(1)
            token_EMB = token_TB.view(many, len(node_M), -1)
            children, parents, rank = upload((level.children, level.parents, level.rank), torch.int64, device)
            token_EN[:, children] = token_EMB[:, parents, rank]
        parent_EK, depth_EK, mask_EK = (x.expand(many, -1) for x in (parent_1K, depth_1K, mask_1N[:, 1:]))
        token_EK = token_EN[:, 1:]
        store_tree(token_EK, parent_EK, depth_EK, mask_EK, slot_E, ints_EI, slots.tensors(is_tree=True))
        is_valid_E = numbers_E & state_EMW.isfinite().flatten(1).all(1) | ~state_EW.isfinite().all(1)
        return DraftOutput(token_EK, slots.num_drafts.index_select(0, slot_E), is_valid_E, parent_EK)

    def grow(self, request: DraftRequest, num_drafts: int, slots: Slots, planes: Planes, out: BuiltTree) -> None:
        """Builds a dynamic tree after the known tokens of each slot, without waiting for the device."""
        slot_E, many, device, branches = (
            request.slot_E,
            len(request.slot_E),
            request.slot_E.device,
            self.shape.branching,
        )
        max_kv_len = self._max_kv_len(request, slots)
        nothing_E1 = torch.zeros(many, 1, dtype=torch.int64, device=device)
        # the bits of 0 are those of 0.0: one launch makes both
        level = TreeLevel(
            nothing_E1, nothing_E1, nothing_E1, nothing_E1.view(torch.float32).view(-1)[:many].view(many, 1)
        )
        pages, page = slots.num_pages(max_kv_len), slots.page_size
        root = self.kernels.build_inputs(slot_E, nothing_E1[:, 0], slots.tensors(is_tree=False), pages, page)
        table_EP, ints_EI = root.table_RP, root.ints_TI
        given_EW = state_TW = slots.extra[HIDDEN].index_select(0, slot_E)
        rows = Rows(slot_E, ints_EI, given_EW, max_kv_len, request.needs)
        selection = self.first_selection(many, max_kv_len, device)
        group, extent = Group(0, many, 0, 1, max_kv_len), RowExtent(1, max_kv_len)
        batch = Batch(*root[:3], table_EP, root.real_T, slot_E, (group,), (extent,) * many, draft_selection=selection)
        deepest = self._levels(num_drafts)
        token_EC = torch.empty(many, first_candidate(deepest, branches), dtype=torch.int64, device=device)
        made = TreeCandidates(torch.empty_like(token_EC, dtype=torch.float32), token_EC, torch.empty_like(token_EC))
        for depth in range(deepest):
            state_TW = self.steps.forward(batch.ids_T, state_TW, batch, planes)
            top_children = self._best(state_TW, rows, depth, slots)
            level, placed = self.kernels.expand_level(
                *top_children, level, depth, slot_E, ints_EI, slots.table_SP, page, made
            )
            if depth + 1 < deepest:
                batch, state_TW = _step(placed, rows, table_EP, selection), state_TW.index_select(0, placed.from_T)
        settled = made, branches, state_TW, given_EW, slot_E, ints_EI, slots.tensors(is_tree=True)
        self.kernels.store_best_tree(*settled, out)

    def _max_kv_len(self, request: DraftRequest, slots: Slots) -> int:
        """Upper bound of the contexts with all nodes of a tree."""
        return min(request.max_kv_len + 1 + self.shape.reserved_columns(slots.tree.num_drafts), slots.context)

    def _best(self, state_TW: Tensor, rows: Rows, depth: int, slots: Slots) -> tuple[Tensor, Tensor]:
        """Log-probabilities and tokens [T, B] of the likeliest children of nodes of one depth, equally many of each
        row.
        """
        nodes = len(state_TW) // len(rows.slot_E)
        at_once = max(AT_ONCE // nodes, 1)
        by_row = state_TW.view(-1, nodes, state_TW.shape[1]), rows.slot_E, rows.ints_EI
        parts = [
            self._likeliest(state_EMW.flatten(0, 1), slot_E, ints_EI, depth, rows.needs, slots)
            for state_EMW, slot_E, ints_EI in zip(*(torch.split(x, at_once) for x in by_row), strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        score_TB, token_TB = (torch.cat(x) for x in zip(*parts, strict=True))
        return score_TB, token_TB

    def _likeliest(
        self, state_TW: Tensor, slot_E: Tensor, ints_EI: Tensor, depth: int, needs: SamplingNeeds, slots: Slots
    ) -> tuple[Tensor, Tensor]:
        logits_TD = self.head.logits(state_TW)
        if not needs.random:
            return self.kernels.top_children(logits_TD, self.shape.branching, self.head.ids_D)
        logits_TV = spread(logits_TD, self.head)
        perturbed_TV = _with_gumbel_noise(
            self.draft_sampling.distribution, logits_TV, slots, slot_E, ints_EI, depth, needs.truncated
        )
        return self.kernels.top_children(perturbed_TV, self.shape.branching, None)

    def _batch(self, level: Known, rows: Rows, slots: Slots, selection: DraftSelection | None) -> Batch:
        """The nodes of a level as a step."""
        many, nodes = level.ids_EM.shape
        slot_T, ints_TI = rows.slot_E.repeat_interleave(nodes), rows.ints_EI.repeat_interleave(nodes, 0)
        column_T, tree_mask_T = (
            (rows.ints_EI[:, NUM_COMPUTED, None] + level.ahead_EM).flatten(),
            level.mask_EM.flatten(),
        )
        _, column_T, write_T, real_T = gather(slots, slot_T, column_T, ints_TI)
        max_kv_len = rows.max_kv_len
        return Batch(
            ids_T=level.ids_EM.flatten() * real_T,
            positions_T=(ints_TI[:, NUM_COMPUTED] + level.depth) * real_T,
            write_T=write_T,
            table_RP=slots.table_SP[:, : slots.num_pages(max_kv_len)].index_select(0, rows.slot_E),
            real_T=real_T,
            logits_indices_N=slot_T,
            groups=(Group(0, many, 0, nodes, max_kv_len),),
            extents=(RowExtent(nodes, max_kv_len),) * many,
            tree=TreeMask(column_T, tree_mask_T, many) if level.depth else None,
            draft_selection=selection,
        )


def _step(placed: LevelInputs, rows: Rows, table_EP: Tensor, selection: DraftSelection | None) -> Batch:
    """Nodes of a level as a step. selection: of the root."""
    slot_E, max_kv_len = rows.slot_E, rows.max_kv_len
    many, nodes = len(slot_E), len(placed.ids_T) // len(slot_E)
    groups, extents = (Group(0, many, 0, nodes, max_kv_len),), (RowExtent(nodes, max_kv_len),) * many
    tree = TreeMask(placed.columns_T, placed.tree_mask_T, many)
    inputs = placed.ids_T, placed.positions_T, placed.write_T, table_EP, placed.real_T, slot_E
    own = selection and selection.later(nodes)
    return Batch(*inputs, groups, extents, tree=tree, draft_selection=own)


def _with_gumbel_noise(
    distribution: SamplingDistribution,
    logits_TV: Tensor,
    slots: Slots,
    slot_E: Tensor,
    ints_EI: Tensor,
    depth: int,
    truncated: bool,
) -> Tensor:
    """Scores of each node's children: for rows that sample, scaled logits plus the target's Gumbel noise at that
    position; for others the logits.
    """
    nodes = len(logits_TV) // len(slot_E)
    slot_T, ints_TI = slot_E.repeat_interleave(nodes), ints_EI.repeat_interleave(nodes, 0)
    scaled_TV = distribution.apply_temperature(logits_TV, slots, slot_T, ints_TI, truncated)
    perturbed_TV = distribution.add_gumbel_noise(scaled_TV, ints_EI[:, SEED], ints_EI[:, LENGTH] + depth)
    return torch.where(slots.temperature.index_select(0, slot_T).unsqueeze(1) == 0, logits_TV, perturbed_TV)


def static(shape: TreeShape) -> tuple[Node, ...]:
    """The nodes of a full tree whose paths have the lowest sums of ranks, the first being 1."""
    found: list[Node] = []
    waiting: list[tuple[int, tuple[int, ...], int]] = [(1 + rank, (rank,), 0) for rank in range(shape.branching)]
    while waiting and len(found) < shape.num_drafts:
        cost, path, parent = heappop(waiting)
        found.append(Node(parent, path[-1], len(path)))
        if len(path) < shape.max_depth:
            for rank in range(shape.branching):
                heappush(waiting, (cost + 1 + rank, (*path, rank), len(found)))
    return tuple(found)


def static_tree_levels(order: Sequence[Node]) -> list[StaticTreeLevel]:
    """The levels of a static tree of these nodes."""
    depths, inner = (0, *(node.depth for node in order)), {node.parent for node in order}
    found: list[StaticTreeLevel] = []
    nodes: tuple[int, ...] = (0,)
    node_parents: tuple[int, ...] = (0,)
    for depth in range(max(depths)):
        children = tuple(i for i, own in enumerate(depths) if own == depth + 1)
        parents = tuple(nodes.index(order[i - 1].parent) for i in children)
        found.append(
            StaticTreeLevel(nodes, node_parents, children, parents, tuple(order[i - 1].rank for i in children))
        )
        going = [(i, place) for i, place in zip(children, parents, strict=True) if i in inner]
        nodes, node_parents = tuple(i for i, _ in going), tuple(place for _, place in going)
    return found
