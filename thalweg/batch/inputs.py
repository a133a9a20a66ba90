"""`build_inputs`: a plan (host, upper bounds) and `Slots` (device, truth) make a `Batch`. Bounds become truth here:
tokens at or past a slot's end, which is 0 for a slot that has ended, become padding, which touches the null page only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, RowExtent, TreeMask
from thalweg.batch.padding import empty_batch, pad_batch
from thalweg.batch.slots import Slots, upload, upload_parts
from thalweg.core.plan import Row, StepPlan
from thalweg.kernels.build_inputs import ref


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step."""

    batch: Batch  # for the model
    slot_E: Tensor  # int64: the slots of the sampled rows
    ints_EI: Tensor  # int64: their slots' integers, as this step finds them
    all_sampled: bool  # every token's logits are sampled, in order

    def padded(self, tokens: int) -> StepInputs:
        """The same step with padding behind it, up to so many tokens."""
        return replace(self, batch=pad_batch(self.batch, tokens), all_sampled=False)


def build_inputs(plan: StepPlan, slots: Slots) -> StepInputs:
    """Gathers the step's tokens; its binds and appends have been made. A prefill chunk that does not sample advances
    its slot's `num_computed` here.
    """
    rows, device, query = plan.rows, slots.ints_SI.device, plan.sampled_per_row
    first = [0, *accumulate(row.n for row in rows)]
    sampled_rows = [i for i, row in enumerate(rows) if row.samples]
    all_sampled = all(row.samples and row.n == query == 1 + row.num_drafts for row in rows)
    sampled = [] if all_sampled else sampled_indices(plan)
    moved = [0 if row.samples else row.n for row in rows]
    both, moved_R, sampled_row_E, sampled_N = upload_parts(
        ([row.slot for row in rows] + [0] + first, moved, sampled_rows, sampled), device
    )
    rows_2R = both.view(2, -1)
    slot_R, pages = rows_2R[0, :-1], slots.num_pages(plan.max_kv_len)
    tree = None
    if query > 1 and slots.tree.is_tree_step(query):
        made, tree = _tree_inputs(rows, rows_2R, slots, pages)
    else:
        made = slots.input_kernels.build_ragged(
            rows_2R, first[-1], max(row.n for row in rows), slots.tensors(is_tree=False), pages, slots.page_size
        )
    batch = Batch(
        ids_T=made.ids_T,
        positions_T=made.positions_T,
        write_T=made.write_T,
        table_RP=made.table_RP,
        real_T=made.real_T,
        logits_indices_N=torch.arange(first[-1], device=device) if all_sampled else sampled_N,
        groups=groups_of(rows),
        extents=tuple(RowExtent(row.n, row.start + row.n) for row in rows),
        tree=tree,
        verifies=rows[0].num_drafts > 0,
        slot_R=slot_R,
    )
    if len(sampled_rows) == len(rows):
        return StepInputs(batch, slot_R, made.ints_RI, all_sampled)
    slots.num_computed.index_add_(0, slot_R, moved_R)
    slot_E, ints_EI = (each.index_select(0, sampled_row_E) for each in (slot_R, made.ints_RI))
    return StepInputs(batch, slot_E, ints_EI, all_sampled)


def _tree_inputs(rows: Sequence[Row], rows_2R: Tensor, slots: Slots, pages: int) -> tuple[ref.RaggedInputs, TreeMask]:
    """The inputs of rows whose drafts are trees."""
    slot_R, tokens = rows_2R[0, :-1], sum(row.n for row in rows)
    ints_RI = slots.ints_SI.index_select(0, slot_R)
    row_T, column_T = ref.expand(rows_2R[1], tokens, ints_RI[:, ref.NUM_COMPUTED])
    slot_T, ints_TI = slot_R.index_select(0, row_T), ints_RI.index_select(0, row_T)
    drafted_R = upload([int(row.num_drafts > 0) for row in rows], torch.int64, rows_2R.device)
    node_T = (column_T - ints_TI[:, ref.NUM_COMPUTED]) * drafted_R.index_select(0, row_T)
    column_T = column_T.masked_fill(node_T > ints_TI[:, ref.NUM_DRAFTS], slots.context)  # a draft that was not made
    ids_T, column_T, write_T, real_T = gather(slots, slot_T, column_T, ints_TI)
    _, depth_T, tree_mask_T = tree_nodes(slots, slot_T, node_T)
    # kernels read it as contiguous
    tree = TreeMask(column_T, tree_mask_T.contiguous(), 1 + max(i for i, row in enumerate(rows) if row.num_drafts))
    table_RP = slots.table_SP[:, :pages].index_select(0, slot_R)
    position_T = column_T - (node_T - depth_T) * real_T
    return ref.RaggedInputs(ids_T, position_T, write_T, real_T, table_RP, ints_RI), tree


def sampled_indices(plan: StepPlan) -> list[int]:
    """Indices of the tokens whose logits are sampled, E * sampled_per_row of them: each sampled row's last known token
    and its drafts. A row with fewer drafts repeats its last token.
    """
    ends, ahead = accumulate(row.n for row in plan.rows), range(plan.sampled_per_row)
    sampled = ((end - 1 - row.num_drafts, row) for end, row in zip(ends, plan.rows, strict=True) if row.samples)
    return [first + min(i, row.num_drafts) for first, row in sampled for i in ahead]


def sampled_tokens(plan: StepPlan, device: torch.device) -> Tensor:
    """`sampled_indices` on the device, int64."""
    return upload(sampled_indices(plan), torch.int64, device)


def gather(slots: Slots, slot_T: Tensor, column_T: Tensor, ints_TI: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.build_inputs.ref.gather`; column_T: positions, but for trees."""
    return ref.gather(slots.tokens_SL, slots.table_SP, slots.page_size, slot_T, column_T, ints_TI[:, ref.END])


def tree_nodes(slots: Slots, slot_T: Tensor, node_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parent, depth and mask, int64 [T], of these nodes of the slots' trees."""
    parent_T, depth_T, tree_mask_T = (
        slots.nodes_SN3.flatten(0, 1).index_select(0, slot_T * slots.nodes_SN3.size(1) + node_T).unbind(1)
    )
    return parent_T, depth_T, tree_mask_T


def groups_of(rows: Sequence[Row]) -> tuple[Group, ...]:
    """Rectangles of consecutive rows with equal n."""
    groups: list[Group] = []
    token = first = 0
    for n, neighbours in groupby(rows, lambda row: row.n):
        starts = [row.start for row in neighbours]
        groups.append(Group(first, len(starts), token, n, max(starts) + n))
        first, token = first + len(starts), token + len(starts) * n
    return tuple(groups)


def padding_inputs(slots: Slots) -> StepInputs:
    """A step without rows, to be padded."""
    batch = empty_batch(slots)
    return StepInputs(batch, batch.ids_T, slots.ints_SI[:0], False)
