"""Reference of what lies between a head's computations: which states a step leaves, and what a draft leaves behind.

Letters: R rows, T tokens, E sampled rows, W numbers of a state, S slots, P pages, I integers of a slot, K drafts of a
row at most, L columns of the tokens plane, D entries of a head's vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.build_inputs.ref import END, LENGTH, NUM_COMPUTED, NUM_DRAFTS


class DraftRows(NamedTuple):
    """Rows of a step, int64 [R]: their slots, tokens, and first tokens; that of a row that there is not is the number
    of all tokens.
    """

    slot_R: Tensor
    n_R: Tensor
    first_R: Tensor


class TokenPlaces(NamedTuple):
    """Positions and KV slots of a step's tokens, int64 [T]; real_T bool [T]: False for padding."""

    position_T: Tensor
    write_T: Tensor
    real_T: Tensor


class DraftedTokens(NamedTuple):
    """The sampled entry of each row of a head's logits float32 [E, D]: entry_E int64, below 0 if invalid. ids_D int64:
    the token id of each entry; None if they are equal. vocab: size of the target's vocabulary.
    """

    entry_E: Tensor
    logits_ED: Tensor
    ids_D: Tensor | None
    vocab: int


class DraftChain(NamedTuple):
    """Rows that are drafted for, one draft behind the other. slot_E int64. ahead_E int64: drafts that each has.
    state_EW: behind the last of them. Of all drafts: drafts_EK int64; is_valid_E bool, see `spec.drafter.DraftOutput`.
    """

    slot_E: Tensor
    ahead_E: Tensor
    state_EW: Tensor
    drafts_EK: Tensor
    is_valid_E: Tensor


def shift_hidden_states(
    state_TW: Tensor,
    rows: DraftRows,
    places: TokenPlaces,
    kept_SW: Tensor,
    ends_PW: Tensor,
    ints_SI: Tensor,
    page: int,
    has_others: bool = True,
) -> Tensor:
    """Returns [T, W]: for each token the state of the previous position; for a row's first token the state kept in its
    slot; 0 for tokens of no row, which there are only with `has_others`.

    Then each slot keeps the state of the last token by which the step has moved it on, and pages that of their last
    position. ints_SI: see `batch.slots`; its second column is the next position. page: its tokens. Page 0 is never read
    and takes all other writes.
    """
    last = len(state_TW) - 1
    before_NW = torch.cat((state_TW[:1], state_TW))  # N = T + 1: the last is written for rows that there are not
    before_NW.index_copy_(0, rows.first_R, kept_SW.index_select(0, rows.slot_R))
    ends_T = (places.position_T % page == page - 1) & places.real_T
    before_TW = before_NW[:-1]
    if has_others:
        behind_RT = torch.arange(1 + last, device=state_TW.device) - rows.first_R.unsqueeze(1)
        inside_T = ((behind_RT >= 0) & (behind_RT < rows.n_R.unsqueeze(1))).any(0)
        ends_T, before_TW = ends_T & inside_T, before_TW * inside_T.unsqueeze(1)
    ends_PW.index_copy_(0, places.write_T // page * ends_T, state_TW)
    first_R = rows.first_R.clamp(max=last)
    moved_R = ints_SI[:, NUM_COMPUTED].index_select(0, rows.slot_R) - places.position_T.index_select(0, first_R)
    last_R = first_R + torch.minimum(moved_R, rows.n_R).clamp_(min=1) - 1
    kept_SW.index_copy_(0, rows.slot_R, state_TW.index_select(0, last_R))
    return before_TW


def valid_tokens(drafted: DraftedTokens) -> tuple[Tensor, Tensor]:
    """→ the drafted tokens, int64 [E]; whether each is valid, bool [E]. An invalid token is 0: its entry is out of
    range, its logit is not finite, or its id is outside the target's vocabulary.
    """
    entry_E = drafted.entry_E.clamp(0, drafted.logits_ED.shape[1] - 1)
    token_E = entry_E if drafted.ids_D is None else drafted.ids_D[entry_E]
    logit_E = drafted.logits_ED.gather(1, entry_E.unsqueeze(1)).squeeze(1)
    is_token_E = (entry_E == drafted.entry_E) & logit_E.isfinite() & (token_E >= 0) & (token_E < drafted.vocab)
    return token_E * is_token_E, is_token_E


def store_draft(
    drafted: DraftedTokens, state_EW: Tensor, ints_EI: Tensor, chain: DraftChain, tokens_SL: Tensor, ints_SI: Tensor
) -> None:
    """Stores one more draft of each row and the hidden state at it. ints_EI: the slots' integers at the draft's
    position (`build_inputs.ref`). Writes the tokens plane, the slots' number of drafts, and the fields of `chain`.
    """
    slot_E, ahead_E = chain.slot_E, chain.ahead_E
    columns, most = tokens_SL.shape[1], chain.drafts_EK.shape[1]
    token_E, is_token_E = valid_tokens(drafted)
    place_E = slot_E * columns + torch.where(ints_EI[:, END] > 0, ints_EI[:, LENGTH], columns - 1)
    tokens_SL.view(-1).index_copy_(0, place_E, token_E.to(torch.int32))
    chain.drafts_EK.scatter_(1, ahead_E.clamp(max=most - 1).unsqueeze(1), token_E.unsqueeze(1))
    is_valid_E = is_token_E & state_EW.isfinite().all(1) | ~chain.state_EW.isfinite().all(1)
    chain.is_valid_E.copy_(is_valid_E & (chain.is_valid_E | (ahead_E == 0)))
    chain.state_EW.copy_(state_EW)
    ahead_E += 1
    ints_SI[:, NUM_DRAFTS].index_copy_(0, slot_E, ahead_E)
