"""Drafts by a head, chained: each draft is fed back with what the head itself returned at it.

The state before a token is the target's hidden state at the previous position. It comes from this step; for the first
token of a row from the slot; after a prefix hit from the last page of the prefix. Drafted tokens use the head's own
states. Accepted tokens are written again with the target's.

Letters: T tokens of the step, X numbers of the target's hidden state, W of a state, R rows, E sampled rows, K drafts,
D vocabulary of the head, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, RowExtent
from thalweg.batch.draft_selection import DraftSelection
from thalweg.batch.slots import Field, Slots, upload
from thalweg.core.plan import PAGE, Bind, SamplingNeeds
from thalweg.kernels.draft_state.ref import DraftChain, DraftedTokens, DraftRows, TokenPlaces, shift_hidden_states
from thalweg.memory.planes import Planes, PlaneSpec, vector_plane
from thalweg.models.draft_head import DraftHead
from thalweg.models.traced import can_trace
from thalweg.models.traced_head import TracedHead
from thalweg.sampling.draft_sampling import DraftSampling
from thalweg.spec.draft_kernels import ShiftHiddenStates, draft_kernels_on
from thalweg.spec.drafter import DraftExtendInput, DraftOutput, DraftRequest, HasWeights

HIDDEN = "hidden"  # of the slots: of the position before the next one; of the planes: of a page's last position


class AutoregressiveDrafter:
    """Drafts with one head, token by token. has_own_weights: whether the head's weights are in a folder of their
    own.
    """

    def __init__(self, head: DraftHead, draft_sampling: DraftSampling, has_own_weights: bool = False) -> None:
        self.head, self.draft_sampling, self.has_own_weights = head, draft_sampling, has_own_weights
        self.vocab = head.main[0].facts.vocab
        self.steps: DraftHead | TracedHead = head
        self.kernels = draft_kernels_on(head.main[0].factory.device)

    def modules(self) -> tuple[HasWeights, ...]:
        return () if self.has_own_weights else (self.head,)

    def own_weight_modules(self) -> tuple[HasWeights, ...]:
        return (self.head,) if self.has_own_weights else ()

    def planes(self) -> tuple[PlaneSpec, ...]:
        page = -(-self.head.width // PAGE)  # a page's one vector, spread over its tokens
        hidden, parts = vector_plane(HIDDEN, self.head.index, page, self.head.dtype), self.head.parts
        own = (replace(spec, page_bytes=parts * spec.page_bytes, parts=parts) for spec in self.head.planes())
        return *own, hidden

    def fields(self) -> tuple[Field, ...]:
        return (Field(HIDDEN, (self.head.width,), self.head.dtype), *self.draft_sampling.fields())

    def capture(self, planes: Planes) -> None:
        if can_trace(self.head.main[0], planes.device):
            self.steps = TracedHead(self.head, planes)

    def bind(self, binds: Sequence[Bind], slots: Slots, planes: Planes) -> None:
        ends_PW = self._ends(planes)
        for b in binds:
            if b.computed and b.computed % slots.page_size == 0:
                page = slots.table_SP[b.slot, b.computed // slots.page_size - 1]
                slots.extra[HIDDEN][b.slot] = ends_PW.index_select(0, page.view(1))[0]

    def extend(self, draft_input: DraftExtendInput, slots: Slots, planes: Planes) -> None:
        rows = draft_input.plan.rows
        n = [row.n for row in rows]
        numbers = [row.slot for row in rows], n, list(accumulate([0, *n]))[:-1]
        extended = DraftRows(*upload(numbers, torch.int64, draft_input.hidden_TH.device).unbind(0))
        # in plain torch: the kernel takes the tokens of a row one after the other, which is slow for prompts
        shift = partial(shift_hidden_states, has_others=False)
        self.extend_rows(shift, extended, draft_input.batch, draft_input.hidden_TH, slots, planes)

    def extend_rows(
        self,
        shift_hidden_states: ShiftHiddenStates,
        rows: DraftRows,
        batch: Batch,
        hidden_TX: Tensor,
        slots: Slots,
        planes: Planes,
    ) -> None:
        """What `extend` does, on the device alone. shift_hidden_states: see `kernels.draft_state.ref`."""
        places = TokenPlaces(batch.positions_T, batch.write_T, batch.real_T)
        state_TW, kept_SW = self.head.draft_state(hidden_TX), slots.extra[HIDDEN]
        ends_PW, page = self._ends(planes), slots.page_size
        before_TW = shift_hidden_states(state_TW, rows, places, kept_SW, ends_PW, slots.ints_SI, page)
        self.steps.write_kv(batch.ids_T, before_TW, batch, planes)

    def propose(self, request: DraftRequest, num_drafts: int, slots: Slots, planes: Planes) -> DraftOutput | None:
        slot_E, device = request.slot_E.contiguous(), request.slot_E.device
        if not num_drafts:
            slots.num_drafts.index_fill_(0, slot_E, 0)
            return None
        drafts_EK = torch.empty(len(slot_E), num_drafts, dtype=torch.int64, device=device)
        is_valid_E = torch.empty(len(slot_E), dtype=torch.bool, device=device)
        state_EW = slots.extra[HIDDEN].index_select(0, slot_E)
        chain = DraftChain(slot_E, torch.zeros_like(slot_E), state_EW, drafts_EK, is_valid_E)
        max_kv_len = min(request.max_kv_len + num_drafts, slots.context)
        selection = self.first_selection(len(slot_E), max_kv_len, device)
        for _ in range(num_drafts):
            self.draft(chain, request.needs, max_kv_len, slots, planes, selection)
            selection = selection and selection.later()
        return DraftOutput(drafts_EK, chain.ahead_E, is_valid_E)

    def first_selection(self, rows: int, max_kv_len: int, device: torch.device) -> DraftSelection | None:
        """Of the first step for so many rows, with room for what it selects. None: each step selects for itself, or
        attends to all. max_kv_len: upper bound of the contexts in all steps.
        """
        topk = self.head.shared_topk
        if not topk or max_kv_len <= topk:
            return None
        positions_EK = torch.zeros(rows, topk, dtype=torch.int32, device=device)
        return DraftSelection(positions_EK, torch.zeros(rows, dtype=torch.int64, device=device), is_first=True)

    def draft(
        self,
        chain: DraftChain,
        needs: SamplingNeeds,
        max_kv_len: int,
        slots: Slots,
        planes: Planes,
        selection: DraftSelection | None = None,
    ) -> None:
        """One more draft of each row. max_kv_len: upper bound of the tokens before the next one. Nothing in it depends
        on how many drafts there are, but `selection` on whether there are any.
        """
        slot_E, rows = chain.slot_E, len(chain.slot_E)
        pages, page = slots.num_pages(max_kv_len), slots.page_size
        step = self.kernels.build_inputs(slot_E, chain.ahead_E, slots.tensors(is_tree=False), pages, page)
        there_EI = step.ints_TI
        groups, extents = (Group(0, rows, 0, 1, max_kv_len),), (RowExtent(1, max_kv_len),) * rows
        batch = Batch(*step[:3], step.table_RP, step.real_T, slot_E, groups, extents, draft_selection=selection)
        state_EW = self.steps.forward(step.ids_T, chain.state_EW, batch, planes)
        logits_ED, ids_D = self.head.logits(state_EW), self.head.ids_D
        if needs.random:
            logits_ED, ids_D = spread(logits_ED, self.head), None
            entry_E = self.draft_sampling.sample_drafts(
                logits_ED, slots, slot_E, there_EI, chain.ahead_E, needs.truncated
            )
        else:
            entry_E = self.kernels.sampler.sample_tokens(logits_ED, slots, slot_E, there_EI, SamplingNeeds())
        drafted = DraftedTokens(entry_E, logits_ED, ids_D, self.vocab)
        self.kernels.store_draft(drafted, state_EW, there_EI, chain, slots.tokens_SL, slots.ints_SI)

    def _ends(self, planes: Planes) -> Tensor:
        """[P, W]: the state of each page's last position."""
        return planes.paged(HIDDEN, self.head.index).flatten(1)[:, : self.head.width]


def spread(logits_ND: Tensor, head: DraftHead) -> Tensor:
    """float32 [N, V]: of the target's whole vocabulary, -inf for what the head never drafts."""
    if head.ids_D is None:
        return logits_ND
    everywhere_NV = logits_ND.new_full((len(logits_ND), head.main[0].facts.vocab), -torch.inf)
    return everywhere_NV.index_copy_(1, head.ids_D, logits_ND)
