"""Drafts by the checkpoint's own NextN layer, chained: each step feeds back the layer's output after its norm (DeepSeek-V3 report §2.2).

Its entry at position p is made of token p and the target's hidden state of p - 1, so that it depends on tokens up to p alone, like all else
in a page. That hidden state comes from the step itself, at the border of two steps from the slot, and behind a prefix that was found in the
cache from the page that ends there, which keeps the one of its last position. What was drafted is entered with the layer's own hidden states,
and written again with the target's when it is accepted.

Letters: T tokens of the step, R rows, E emitting rows, K drafts, H hidden, P pages."""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol, Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Extent, Group
from thalweg.batch.prepare import gather
from thalweg.batch.slots import Field, Slots
from thalweg.batch.upload import upload
from thalweg.core.plan import PAGE, Bind
from thalweg.memory.planes import Planes, PlaneSpec, vectors
from thalweg.models.nextn import NextN
from thalweg.models.traced import TracedNextN, recordable
from thalweg.sampling.sample import draw
from thalweg.spec.drafter import Asked, Proposed, Seen, Weighted

HIDDEN = "hidden"  # of the slots: of the position before the next one; of the planes: of a page's last position


class Steps(Protocol):
    """What runs the layer: itself, or one that was recorded."""

    def forward(self, ids_T: Tensor, hidden_TH: Tensor, batch: Batch, planes: Planes) -> Tensor: ...

    def observe(self, ids_T: Tensor, hidden_TH: Tensor, batch: Batch, planes: Planes) -> None: ...


class NextNDrafter:
    """The `Drafter` of one NextN layer, which stands for any depth."""

    def __init__(self, layer: NextN) -> None:
        self.layer, self.facts = layer, layer.facts
        self.steps: Steps = layer
        self.dtype = layer.main[0].parts.dtype

    def modules(self) -> tuple[Weighted, ...]:
        return (self.layer,)

    def planes(self) -> tuple[PlaneSpec, ...]:
        page = self.facts.hidden // PAGE  # a page's one vector, spread over its tokens
        return *self.layer.planes(), vectors(HIDDEN, self.layer.index, page, self.dtype)

    def fields(self) -> tuple[Field, ...]:
        return (Field(HIDDEN, (self.facts.hidden,), self.dtype),)

    def record(self, planes: Planes) -> None:
        if recordable(self.layer.main[0], planes.device):
            self.steps = TracedNextN(self.layer, planes)

    def bind(self, binds: Sequence[Bind], slots: Slots, planes: Planes) -> None:
        ends_PH = self._ends(planes)
        for b in binds:
            if b.computed and b.computed % PAGE == 0:
                page = slots.table_SP[b.slot, b.computed // PAGE - 1]
                slots.extra[HIDDEN][b.slot] = ends_PH.index_select(0, page.view(1))[0]

    def observe(self, seen: Seen, slots: Slots, planes: Planes) -> None:
        batch, hidden_TH, kept_SH, rows = seen.batch, seen.hidden_TH, slots.extra[HIDDEN], seen.plan.rows
        n = [row.n for row in rows]
        numbers = [row.slot for row in rows], n, [0, *accumulate(n[:-1])]
        slot_R, n_R, first_R = upload(numbers, torch.int64, hidden_TH.device)
        before_TH = hidden_TH.roll(1, 0).index_copy_(0, first_R, kept_SH.index_select(0, slot_R))
        self.steps.observe(batch.ids_T, before_TH, batch, planes)
        last_T = (batch.positions_T % PAGE == PAGE - 1) & batch.real_T
        self._ends(planes).index_copy_(0, batch.write_T // PAGE * last_T, hidden_TH)  # of all others into the null page
        # what the step has brought its slots forward by: a chunk, or the tokens accepted
        moved_R = slots.at.index_select(0, slot_R) - batch.positions_T.index_select(0, first_R)
        last_R = first_R + torch.minimum(moved_R, n_R).clamp_(min=1) - 1
        kept_SH.index_copy_(0, slot_R, hidden_TH.index_select(0, last_R))

    def propose(self, asked: Asked, width: int, slots: Slots, planes: Planes) -> Proposed | None:
        slot_E = asked.slot_E
        slots.made.index_fill_(0, slot_E, width)
        if not width:
            return None
        ints_EI, floats_EF = slots.ints_SI.index_select(0, slot_E), slots.floats_SF.index_select(0, slot_E)
        given_EH = hidden_EH = slots.extra[HIDDEN].index_select(0, slot_E)
        drafts: list[Tensor] = []
        for ahead in range(width):
            batch = self._batch(slots, slot_E, ints_EI, asked.reach, ahead)
            hidden_EH = self.steps.forward(batch.ids_T, hidden_EH, batch, planes)
            logits_EV = self.layer.logits(hidden_EH)
            at_E = ints_EI[:, 0] + ahead
            if asked.needs.random:
                drafts.append(draw(logits_EV, floats_EF, ints_EI[:, 6], ints_EI[:, 3], at_E, asked.needs.truncated))
            else:
                drafts.append(logits_EV.argmax(-1))
            place_E = slot_E * slots.tokens_SL.shape[1] + at_E.clamp(max=slots.context)
            slots.tokens_SL.view(-1).index_copy_(0, place_E, drafts[-1].to(torch.int32))
        sound = (hidden_EH.isfinite().all(1) | ~given_EH.isfinite().all(1)).all()
        return Proposed(torch.stack(drafts, 1), ints_EI[:, 7], sound)

    def _batch(self, slots: Slots, slot_E: Tensor, ints_EI: Tensor, reach: int, ahead: int) -> Batch:
        """The last known token of each slot, or the draft that stands so far behind it, as a step of single tokens."""
        rows, reach = len(slot_E), min(reach + 1 + ahead, slots.context)
        ids, positions, write, real = gather(slot_E, ints_EI[:, 1] + ahead, ints_EI, slots.tokens_SL, slots.table_SP)
        table = slots.table_SP[:, : -(-reach // PAGE)].index_select(0, slot_E)
        groups, extents = (Group(0, rows, 0, 1, reach),), (Extent(1, reach),) * rows
        return Batch(ids, positions, write, table, real, slot_E, groups, extents)

    def _ends(self, planes: Planes) -> Tensor:
        """[P, H]: the hidden state of each page's last position."""
        return planes.paged(HIDDEN, self.layer.index).flatten(1)
