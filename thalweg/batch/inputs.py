"""`prepare`: a plan (host, upper bounds) and `Slots` (device, truth) make a `Batch`. Bounds become truth here: tokens
at or past a slot's end, which is 0 for one that has ended, turn into padding, which touches the null page only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, RowExtent, TreeMask
from thalweg.batch.slots import Slots, upload
from thalweg.core.plan import PAGE, Row, StepPlan

PAGE_BITS = PAGE.bit_length() - 1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """batch: for the model. Of the emitting rows: slot_E int64, their slots; ints_EI int64, the slots' integers as this
    step finds them. all_emitted: whether every token's logits are sampled, in order.
    """

    batch: Batch
    slot_E: Tensor
    ints_EI: Tensor
    all_sampled: bool

    def padded(self, tokens: int) -> StepInputs:
        """The same step with padding behind it, up to so many tokens."""
        return replace(self, batch=pad_batch(self.batch, tokens), all_sampled=False)


def build_inputs(plan: StepPlan, slots: Slots) -> StepInputs:
    """Gathers the step's tokens; its binds and appends have been made. A prefill chunk that does not emit moves its
    slot's `at` here.
    """
    rows, device = plan.rows, slots.ints_SI.device
    slot_R = upload([row.slot for row in rows], torch.int64, device)
    ints_RI = slots.ints_SI.index_select(0, slot_R)
    row_T: Tensor | None = None
    if len(rows) == sum(row.n for row in rows):  # single tokens need no expansion
        slot_T, ints_TI, column_T = slot_R, ints_RI, ints_RI[:, 1]
    else:
        row_T, column_T = _expand(rows, ints_RI)
        slot_T, ints_TI = slot_R.index_select(0, row_T), ints_RI.index_select(0, row_T)
    is_tree = plan.sampled_per_row > 1 and slots.tree.is_tree_step(plan.sampled_per_row)
    if is_tree:
        assert row_T is not None, "a tree has more tokens than its root"
        drafted_R = upload([int(row.num_drafts > 0) for row in rows], torch.int64, device)
        node_T = (column_T - ints_TI[:, 1]) * drafted_R.index_select(0, row_T)
        column_T = column_T.masked_fill(node_T > ints_TI[:, 7], slots.context)  # a draft that was not made
    ids_T, column_T, write_T, real_T = gather(slot_T, column_T, ints_TI, slots.tokens_SL, slots.table_SP)
    position_T, tree = column_T, None
    if is_tree:
        last = max(i for i, row in enumerate(rows) if row.num_drafts)
        position_T, tree = _tree_mask(slots, slot_T, node_T, column_T, real_T, last + 1)
    emits, query = [i for i, row in enumerate(rows) if row.emit], plan.sampled_per_row
    all_sampled = all(row.emit and row.n == query == 1 + row.num_drafts for row in rows)
    batch = Batch(
        ids_T=ids_T,
        positions_T=position_T,
        write_T=write_T,
        table_RP=slots.table_SP[:, : -(-plan.max_kv_len // PAGE)].index_select(0, slot_R),
        real_T=real_T,
        emit_N=torch.arange(len(rows) * query, device=device) if all_sampled else sampled_tokens(plan, device),
        groups=groups_of(rows),
        extents=tuple(RowExtent(row.n, row.start + row.n) for row in rows),
        tree=tree,
        verifies=rows[0].num_drafts > 0,
    )
    if len(emits) == len(rows):
        return StepInputs(batch, slot_R, ints_RI, all_sampled)
    moved_R = upload([0 if row.emit else row.n for row in rows], torch.int64, device)
    slots.at.index_add_(0, slot_R, moved_R)
    emit_E = upload(emits, torch.int64, device)
    return StepInputs(batch, slot_R.index_select(0, emit_E), ints_RI.index_select(0, emit_E), all_sampled)


def verification(slots: Slots, slot_R: Tensor, query: int, max_kv_len: int) -> StepInputs:
    """What `prepare` makes of rows that each verify a tree, of `query` tokens with its root, and nothing else. It asks
    the host for nothing, so that it can be recorded. reach: upper bound of every row's context.
    """
    rows, device = len(slot_R), slot_R.device
    slot_T, ints_RI = slot_R.repeat_interleave(query), slots.ints_SI.index_select(0, slot_R)
    ints_TI, node_T = ints_RI.repeat_interleave(query, 0), torch.arange(query, device=device).repeat(rows)
    column_T = (ints_TI[:, 1] + node_T).masked_fill(node_T > ints_TI[:, 7], slots.context)
    ids_T, column_T, write_T, real_T = gather(slot_T, column_T, ints_TI, slots.tokens_SL, slots.table_SP)
    position_T, tree = _tree_mask(slots, slot_T, node_T, column_T, real_T, rows)
    batch = Batch(
        ids_T=ids_T,
        positions_T=position_T,
        write_T=write_T,
        table_RP=slots.table_SP[:, : -(-max_kv_len // PAGE)].index_select(0, slot_R),
        real_T=real_T,
        emit_N=torch.arange(rows * query, device=device),
        groups=(Group(0, rows, 0, query, max_kv_len),),
        extents=(RowExtent(query, max_kv_len),) * rows,
        tree=tree,
    )
    return StepInputs(batch, slot_R, ints_RI, True)


def sampled_tokens(plan: StepPlan, device: torch.device) -> Tensor:
    """Which of the step's tokens have their logits sampled, int64 [E * plan.query]: of each emitting row the last one
    and those before its drafts, and of one with fewer drafts than `plan.query` has room for the last one again.
    """
    ends = accumulate(row.n for row in plan.rows)
    emitting = [
        (end - 1 - row.num_drafts, row.num_drafts) for end, row in zip(ends, plan.rows, strict=True) if row.emit
    ]
    if plan.sampled_per_row == 1:
        return upload([first for first, _ in emitting], torch.int64, device)
    first_E1, drafts_E1 = upload(list(zip(*emitting, strict=True)), torch.int64, device).unsqueeze(2)
    ahead_Q = torch.arange(plan.sampled_per_row, device=device)
    return torch.add(first_E1, ahead_Q.minimum(drafts_E1)).flatten()


def gather(
    slot_T: Tensor, position_T: Tensor, ints_TI: Tensor, tokens_SL: Tensor, table_SP: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token, position, write index and reality of each token; what is padding is 0 in all of them. Of a tree positions
    are columns here.
    """
    real_T = position_T < ints_TI[:, 2]
    position_T = position_T * real_T
    page_T = table_SP.view(-1).index_select(0, slot_T * table_SP.size(1) + (position_T >> PAGE_BITS))
    write_T = torch.add(position_T & (PAGE - 1), page_T, alpha=PAGE) * real_T
    ids_T = tokens_SL.view(-1).index_select(0, slot_T * tokens_SL.size(1) + position_T) * real_T
    return ids_T, position_T, write_T, real_T


def tree_nodes(slots: Slots, slot_T: Tensor, node_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parent, depth and mask, int64 [T], of these nodes of the slots' trees."""
    parent_T, depth_T, tree_mask_T = (
        slots.nodes_SN3.flatten(0, 1).index_select(0, slot_T * slots.nodes_SN3.size(1) + node_T).unbind(1)
    )
    return parent_T, depth_T, tree_mask_T


def _tree_mask(
    slots: Slots, slot_T: Tensor, node_T: Tensor, column_T: Tensor, real_T: Tensor, rows: int
) -> tuple[Tensor, TreeMask]:
    """Positions, and what is seen, where nodes are the tokens' in their slots' trees: 0 for all that are no drafts."""
    _, depth_T, tree_mask_T = tree_nodes(slots, slot_T, node_T)
    return column_T - (node_T - depth_T) * real_T, TreeMask(column_T, tree_mask_T, rows)


def _expand(rows: Sequence[Row], ints_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Row and position of each token."""
    n_R, device = [row.n for row in rows], ints_RI.device
    tokens = sum(n_R)
    n_on_device, first_R = upload([n_R, [0, *accumulate(n_R[:-1])]], torch.int64, device)
    # told how many there are, the expansion does not ask the device
    row_T = torch.arange(len(rows), device=device).repeat_interleave(n_on_device, output_size=tokens)
    base_T = (ints_RI[:, 1] - first_R).index_select(0, row_T)
    return row_T, base_T + torch.arange(tokens, device=device)


def groups_of(rows: Sequence[Row]) -> tuple[Group, ...]:
    """Rectangles of consecutive rows with equal n."""
    groups: list[Group] = []
    token = first = 0
    for i, row in enumerate(rows):
        if i + 1 == len(rows) or rows[i + 1].n != row.n:
            count = i + 1 - first
            max_kv_len = max(r.start + r.n for r in rows[first : i + 1])
            groups.append(Group(first, count, token, row.n, max_kv_len))
            token += count * row.n
            first = i + 1
    return tuple(groups)


def padding_inputs(slots: Slots) -> StepInputs:
    """A step without rows, to be padded."""
    batch = empty_batch(slots)
    return StepInputs(batch, batch.ids_T, slots.ints_SI[:0], False)


def empty_batch(slots: Slots) -> Batch:
    """A batch without tokens, to be padded."""
    none_T = slots.ints_SI.new_empty(0)
    return Batch(none_T, none_T, none_T, slots.table_SP[:0, :1], none_T.to(torch.bool), none_T, ())


def pad_batch(batch: Batch, tokens: int) -> Batch:
    """The batch with padding behind it, up to so many tokens: rows of one token each on the null page."""
    here = len(batch.ids_T)
    missing = tokens - here
    if missing <= 0:
        return batch
    ids_T, positions_T, write_T, real_T, table_RP = (
        torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
        for x in (batch.ids_T, batch.positions_T, batch.write_T, batch.real_T, batch.table_RP)
    )
    tree = batch.tree
    if tree is not None:
        column_T, mask_T = tree.columns_T, tree.tree_mask_T
        tree = TreeMask(
            torch.cat((column_T, positions_T[here:])), torch.cat((mask_T, mask_T.new_full((missing,), -1))), tree.rows
        )
    rows = sum(group.rows for group in batch.groups)
    return replace(
        batch,
        ids_T=ids_T,
        positions_T=positions_T,
        write_T=write_T,
        table_RP=table_RP,
        real_T=real_T,
        groups=(*batch.groups, Group(rows, missing, here, 1, 1)),
        extents=batch.extents + (RowExtent(1, 1),) * missing,
        tree=tree,
    )
