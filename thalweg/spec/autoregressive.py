"""Drafts by a head, chained: each draft is fed back with what the head itself returned at it.

The head's state at a position of the sequence comes from the target's hidden states: from the step itself, at the
border of two steps from the slot, and behind a prefix that was found in the cache from the page that ends there, which
keeps the one of its last position. What was drafted is entered with the head's own states, and written again with those
of the target when it is accepted.

Letters: T tokens of the step, X numbers of the target's hidden state, W of a state, R rows, E emitting rows, K drafts,
D vocabulary of the head, P pages.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol, Sequence

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, RowExtent
from thalweg.batch.inputs import gather
from thalweg.batch.slots import Field, Slots, upload
from thalweg.core.plan import PAGE, Bind, SamplingNeeds
from thalweg.kernels.draft_state.ref import DraftChain, DraftedTokens, DraftRows, TokenPlaces, valid_tokens
from thalweg.memory.planes import Planes, PlaneSpec, vector_plane
from thalweg.models.draft_head import DraftHead
from thalweg.models.traced import TracedHead, can_trace
from thalweg.sampling.draft_sampling import DraftSampling
from thalweg.spec.draft_kernels import DraftKernels, draft_kernels_on
from thalweg.spec.drafter import DraftExtendInput, DraftOutput, DraftRequest, HasWeights

HIDDEN = "hidden"  # of the slots: of the position before the next one; of the planes: of a page's last position


class Steps(Protocol):
    """What runs a head: itself, or one that was recorded."""

    def forward(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor: ...

    def write_kv(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None: ...


class AutoregressiveDrafter:
    """The `Drafter` of one head, which stands for any depth. apart: whether the head's weights are in a folder of their
    own.
    """

    def __init__(self, head: DraftHead, draft_sampling: DraftSampling, has_own_weights: bool = False) -> None:
        self.head, self.draft_sampling, self.has_own_weights = head, draft_sampling, has_own_weights
        self.vocab = head.main[0].facts.vocab
        self.steps: Steps = head
        self.kernels = draft_kernels_on(head.main[0].factory.device)

    def modules(self) -> tuple[HasWeights, ...]:
        return () if self.has_own_weights else (self.head,)

    def own(self) -> tuple[HasWeights, ...]:
        return (self.head,) if self.has_own_weights else ()

    def planes(self) -> tuple[PlaneSpec, ...]:
        page = -(-self.head.width // PAGE)  # a page's one vector, spread over its tokens
        return *self.head.planes(), vector_plane(HIDDEN, self.head.index, page, self.head.dtype)

    def fields(self) -> tuple[Field, ...]:
        return (Field(HIDDEN, (self.head.width,), self.head.dtype), *self.draft_sampling.fields())

    def record(self, planes: Planes) -> None:
        if can_trace(self.head.main[0], planes.device):
            self.steps = TracedHead(self.head, planes)

    def bind(self, binds: Sequence[Bind], slots: Slots, planes: Planes) -> None:
        ends_PW = self._ends(planes)
        for b in binds:
            if b.computed and b.computed % PAGE == 0:
                page = slots.table_SP[b.slot, b.computed // PAGE - 1]
                slots.extra[HIDDEN][b.slot] = ends_PW.index_select(0, page.view(1))[0]

    def extend(self, seen: DraftExtendInput, slots: Slots, planes: Planes) -> None:
        rows = seen.plan.rows
        n = [row.n for row in rows]
        numbers = [row.slot for row in rows], n, list(accumulate([0, *n]))[:-1]
        slot_R, n_R, first_R = upload(numbers, torch.int64, seen.hidden_TH.device)
        self.learn(DraftRows(slot_R, n_R, first_R), seen.batch, seen.hidden_TH, slots, planes)

    def learn_few(
        self, kernels: DraftKernels, rows: DraftRows, batch: Batch, hidden_TX: Tensor, slots: Slots, planes: Planes
    ) -> None:
        """`learn`, in few launches: of steps whose rows have few tokens."""
        places = TokenPlaces(batch.positions_T, batch.write_T, batch.real_T)
        state_TW, kept_SW = self.head.draft_state(hidden_TX), slots.extra[HIDDEN]
        before_TW = kernels.shift_hidden_states(
            state_TW, rows, places, kept_SW, self._ends(planes), slots.ints_SI, PAGE
        )
        self.steps.write_kv(batch.ids_T, before_TW, batch, planes)

    def learn(self, rows: DraftRows, batch: Batch, hidden_TX: Tensor, slots: Slots, planes: Planes) -> None:
        """What `extend` does, on the device alone."""
        kept_SW, state_TW, last = slots.extra[HIDDEN], self.head.draft_state(hidden_TX), len(batch.ids_T) - 1
        before_NW = torch.cat(
            [state_TW[:1], state_TW]
        )  # N = T + 1: the last takes what is written for rows that there are not
        before_NW.index_copy_(0, rows.first_R, kept_SW.index_select(0, rows.slot_R))
        self.steps.write_kv(batch.ids_T, before_NW[:-1], batch, planes)
        last_T = (batch.positions_T % PAGE == PAGE - 1) & batch.real_T
        self._ends(planes).index_copy_(0, batch.write_T // PAGE * last_T, state_TW)  # of all others into the null page
        # what the step has brought its slots forward by: a chunk, or the tokens accepted
        first_R = rows.first_R.clamp(max=last)
        moved_R = slots.at.index_select(0, rows.slot_R) - batch.positions_T.index_select(0, first_R)
        last_R = first_R + torch.minimum(moved_R, rows.n_R).clamp_(min=1) - 1
        kept_SW.index_copy_(0, rows.slot_R, state_TW.index_select(0, last_R))

    def propose(self, asked: DraftRequest, width: int, slots: Slots, planes: Planes) -> DraftOutput | None:
        slot_E = asked.slot_E
        if not width:
            slots.made.index_fill_(0, slot_E, 0)
            return None
        if self.kernels is not None:
            return self._launched(self.kernels, asked, width, slots, planes)
        slots.made.index_fill_(0, slot_E, width)
        ints_EI = slots.ints_SI.index_select(0, slot_E)
        given_EW = state_EW = slots.extra[HIDDEN].index_select(0, slot_E)
        column_KE = ints_EI[:, 0] + torch.arange(width, device=slot_E.device).unsqueeze(1)
        place_KE = column_KE.clamp(max=slots.context).add_(slot_E * slots.tokens_SL.shape[1])
        drafts, sound_E = list[Tensor](), torch.ones_like(slot_E, dtype=torch.bool)
        for ahead in range(width):
            batch = singles(slots, slot_E, ints_EI, asked.max_kv_len, ahead)
            state_EW = self.steps.forward(batch.ids_T, state_EW, batch, planes)
            logits_ED = self.head.logits(state_EW)
            if asked.needs.random:
                there_EI = torch.cat((column_KE[ahead].unsqueeze(1), ints_EI[:, 1:]), 1)
                logits_EV = spread(logits_ED, self.head)
                drawn_E = self.draft_sampling.draw(logits_EV, slots, slot_E, there_EI, ahead, asked.needs.truncated)
                drawn = DraftedTokens(drawn_E, logits_EV, None, self.vocab)
            else:
                drawn = DraftedTokens(logits_ED.argmax(-1), logits_ED, self.head.ids_D, self.vocab)
            token_E, is_one_E = valid_tokens(drawn)
            drafts.append(token_E)
            sound_E &= is_one_E
            slots.tokens_SL.view(-1).index_copy_(0, place_KE[ahead], drafts[-1].to(torch.int32))
        sound_E = sound_E & state_EW.isfinite().all(1) | ~given_EW.isfinite().all(1)
        return DraftOutput(torch.stack(drafts, 1), ints_EI[:, 7], sound_E)

    def _launched(
        self, kernels: DraftKernels, asked: DraftRequest, width: int, slots: Slots, planes: Planes
    ) -> DraftOutput:
        slot_E, device = asked.slot_E.contiguous(), asked.slot_E.device
        drafts_EK = torch.empty(len(slot_E), width, dtype=torch.int64, device=device)
        sound_E = torch.empty(len(slot_E), dtype=torch.bool, device=device)
        state_EW = slots.extra[HIDDEN].index_select(0, slot_E)
        chain = DraftChain(slot_E, torch.zeros_like(slot_E), state_EW, drafts_EK, sound_E)
        for _ in range(width):
            self.draft(kernels, chain, asked.needs, asked.max_kv_len + width, slots, planes)
        return DraftOutput(drafts_EK, chain.ahead_E, sound_E)

    def draft(
        self,
        kernels: DraftKernels,
        chain: DraftChain,
        needs: SamplingNeeds,
        max_kv_len: int,
        slots: Slots,
        planes: Planes,
    ) -> None:
        """One more draft of each row. reach: an upper bound of the tokens that then are before the next one. Nothing in
        it depends on how many there are.
        """
        slot_E, rows, max_kv_len = chain.slot_E, len(chain.slot_E), min(max_kv_len, slots.context)
        step = kernels.build_inputs(slot_E, chain.ahead_E, slots.tensors(is_tree=False), -(-max_kv_len // PAGE), PAGE)
        there_EI = step.ints_TI
        groups, extents = (Group(0, rows, 0, 1, max_kv_len),), (RowExtent(1, max_kv_len),) * rows
        batch = Batch(*step[:3], step.table_RP, step.real_T, slot_E, groups, extents)
        state_EW = self.steps.forward(step.ids_T, chain.state_EW, batch, planes)
        logits_ED = self.head.logits(state_EW)
        if needs.random:
            logits_EV = spread(logits_ED, self.head)
            drawn_E = self.draft_sampling.draw(logits_EV, slots, slot_E, there_EI, chain.ahead_E, needs.truncated)
            drawn = DraftedTokens(drawn_E, logits_EV, None, self.vocab)
        else:
            drawn_E = kernels.sampler.draw(logits_ED, slots, slot_E, there_EI, SamplingNeeds())
            drawn = DraftedTokens(drawn_E, logits_ED, self.head.ids_D, self.vocab)
        kernels.store_draft(drawn, state_EW, there_EI, chain, slots.tokens_SL, slots.ints_SI)

    def _ends(self, planes: Planes) -> Tensor:
        """[P, W]: the state of each page's last position."""
        return planes.paged(HIDDEN, self.head.index).flatten(1)[:, : self.head.width]


def singles(slots: Slots, slot_E: Tensor, ints_EI: Tensor, max_kv_len: int, ahead: int) -> Batch:
    """The last known token of each slot, or the draft that stands so far behind it, as a step of single tokens."""
    rows, max_kv_len = len(slot_E), min(max_kv_len + 1 + ahead, slots.context)
    ids, positions, write, real = gather(slot_E, ints_EI[:, 1] + ahead, ints_EI, slots.tokens_SL, slots.table_SP)
    table = slots.table_SP[:, : -(-max_kv_len // PAGE)].index_select(0, slot_E)
    groups, extents = (Group(0, rows, 0, 1, max_kv_len),), (RowExtent(1, max_kv_len),) * rows
    return Batch(ids, positions, write, table, real, slot_E, groups, extents)


def spread(logits_ND: Tensor, head: DraftHead) -> Tensor:
    """float32 [N, V]: of the target's whole vocabulary, -inf for what the head never drafts."""
    if head.ids_D is None:
        return logits_ND
    everywhere_NV = logits_ND.new_full((len(logits_ND), head.main[0].facts.vocab), -torch.inf)
    return everywhere_NV.index_copy_(1, head.ids_D, logits_ND)
