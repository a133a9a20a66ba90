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
from thalweg.batch.slots import Slots, upload
from thalweg.core.plan import PAGE, Row, StepPlan
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
    rows, device = plan.rows, slots.ints_SI.device
    slot_R = upload([row.slot for row in rows], torch.int64, device)
    ints_RI = slots.ints_SI.index_select(0, slot_R)
    row_T: Tensor | None = None
    if len(rows) == sum(row.n for row in rows):  # single tokens need no expansion
        slot_T, ints_TI, column_T = slot_R, ints_RI, ints_RI[:, ref.NUM_COMPUTED]
    else:
        row_T, column_T = _expand(rows, ints_RI)
        slot_T, ints_TI = slot_R.index_select(0, row_T), ints_RI.index_select(0, row_T)
    is_tree = plan.sampled_per_row > 1 and slots.tree.is_tree_step(plan.sampled_per_row)
    if is_tree:
        assert row_T is not None, "a tree has more tokens than its root"
        drafted_R = upload([int(row.num_drafts > 0) for row in rows], torch.int64, device)
        node_T = (column_T - ints_TI[:, ref.NUM_COMPUTED]) * drafted_R.index_select(0, row_T)
        column_T = column_T.masked_fill(node_T > ints_TI[:, ref.NUM_DRAFTS], slots.context)  # a draft that was not made
    ids_T, column_T, write_T, real_T = gather(slots, slot_T, column_T, ints_TI)
    position_T, tree = column_T, None
    if is_tree:
        _, depth_T, tree_mask_T = tree_nodes(slots, slot_T, node_T)
        position_T = column_T - (node_T - depth_T) * real_T
        # kernels read it as contiguous
        tree = TreeMask(column_T, tree_mask_T.contiguous(), 1 + max(i for i, row in enumerate(rows) if row.num_drafts))
    sampled_rows, query = [i for i, row in enumerate(rows) if row.samples], plan.sampled_per_row
    all_sampled = all(row.samples and row.n == query == 1 + row.num_drafts for row in rows)
    batch = Batch(
        ids_T=ids_T,
        positions_T=position_T,
        write_T=write_T,
        table_RP=slots.table_SP[:, : -(-plan.max_kv_len // PAGE)].index_select(0, slot_R),
        real_T=real_T,
        logits_indices_N=torch.arange(len(rows) * query, device=device)
        if all_sampled
        else sampled_tokens(plan, device),
        groups=groups_of(rows),
        extents=tuple(RowExtent(row.n, row.start + row.n) for row in rows),
        tree=tree,
        verifies=rows[0].num_drafts > 0,
    )
    if len(sampled_rows) == len(rows):
        return StepInputs(batch, slot_R, ints_RI, all_sampled)
    moved_R = upload([0 if row.samples else row.n for row in rows], torch.int64, device)
    slots.num_computed.index_add_(0, slot_R, moved_R)
    sampled_row_E = upload(sampled_rows, torch.int64, device)
    return StepInputs(batch, slot_R.index_select(0, sampled_row_E), ints_RI.index_select(0, sampled_row_E), all_sampled)


def sampled_tokens(plan: StepPlan, device: torch.device) -> Tensor:
    """Indices of the tokens whose logits are sampled, int64 [E * sampled_per_row]: each sampled row's last known token
    and its drafts. A row with fewer drafts repeats its last token.
    """
    ends = accumulate(row.n for row in plan.rows)
    sampled_rows = [
        (end - 1 - row.num_drafts, row.num_drafts) for end, row in zip(ends, plan.rows, strict=True) if row.samples
    ]
    if plan.sampled_per_row == 1:
        return upload([first for first, _ in sampled_rows], torch.int64, device)
    first_E1, drafts_E1 = upload(list(zip(*sampled_rows, strict=True)), torch.int64, device).unsqueeze(2)
    ahead_Q = torch.arange(plan.sampled_per_row, device=device)
    return torch.add(first_E1, ahead_Q.minimum(drafts_E1)).flatten()


def gather(slots: Slots, slot_T: Tensor, column_T: Tensor, ints_TI: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `kernels.build_inputs.ref.gather`; column_T: positions, but for trees."""
    return ref.gather(slots.tokens_SL, slots.table_SP, PAGE, slot_T, column_T, ints_TI[:, ref.END])


def tree_nodes(slots: Slots, slot_T: Tensor, node_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parent, depth and mask, int64 [T], of these nodes of the slots' trees."""
    parent_T, depth_T, tree_mask_T = (
        slots.nodes_SN3.flatten(0, 1).index_select(0, slot_T * slots.nodes_SN3.size(1) + node_T).unbind(1)
    )
    return parent_T, depth_T, tree_mask_T


def _expand(rows: Sequence[Row], ints_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Row and position of each token."""
    n_R, device = [row.n for row in rows], ints_RI.device
    tokens = sum(n_R)
    n_on_device, first_R = upload([n_R, [0, *accumulate(n_R[:-1])]], torch.int64, device)
    # told how many there are, the expansion does not ask the device
    row_T = torch.arange(len(rows), device=device).repeat_interleave(n_on_device, output_size=tokens)
    base_T = (ints_RI[:, ref.NUM_COMPUTED] - first_R).index_select(0, row_T)
    return row_T, base_T + torch.arange(tokens, device=device)


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
