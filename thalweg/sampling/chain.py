"""Verifying a chain of drafts: which of them are what the target draws.

The target draws a token at every position of the path, each with the coins of its position; drafts are accepted as far as they are the tokens
drawn, and the first token that is not, or the one behind the last draft, comes with them. So the tokens are those of plain decoding, whoever
drafted, and nothing can be biased. For a draft that is no sample this is the point-mass rule: it is accepted with its probability p(d), and what
is drawn instead is distributed as p without d. A drafter that samples races with the same coins (`random.exponential`), so that both choose the
same token with a probability of at least (1 - D) / (1 + D), D being their distributions' total variation distance (Daliri, Musco, Suresh
2024, "Coupling without communication and drafter-invariant speculative decoding", theorem 1).

Letters: E rows, Q positions of each, K = Q - 1 drafts, N = E · Q, V vocabulary, I integers of a slot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.batch.slots import Slots


class Path(NamedTuple):
    """What each position of each row is sampled by. slot_N int64; ints_NI int64: its slot's integers as if the drafts before it were known, and
    ended where they reach the end; `at` is its own draft's column. drafts_EK int64."""

    slot_N: Tensor
    ints_NI: Tensor
    drafts_EK: Tensor


def path(slots: Slots, slot_E: Tensor, ints_EI: Tensor, query: int) -> Path:
    """The positions behind the known tokens of each row."""
    ahead_Q = torch.arange(query, device=slot_E.device)
    ints_EQI = ints_EI.unsqueeze(1).repeat(1, query, 1)
    length_EQ, end_EQ = ints_EQI[..., 0], ints_EQI[..., 2]
    length_EQ += ahead_Q
    ints_EQI[..., 1] += ahead_Q
    end_EQ *= length_EQ < end_EQ
    length_EQ.clamp_(max=slots.context)  # beyond the end nothing is accepted, but indices must be valid
    drafts_EK = slots.tokens_SL[slot_E.unsqueeze(1), length_EQ[:, :-1]].to(torch.int64)
    return Path(slot_E.repeat_interleave(query), ints_EQI.flatten(0, 1), drafts_EK)


def follow(
    tokens_EQ: Tensor, drafts_EK: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor
) -> tuple[Tensor, Tensor]:
    """Appends the tokens drawn, as far as drafts agree, to their slots, and ends those that reached a stop id or their end. → how many of each row
    (0 where the slot had ended before), int64 [E]; whether it has ended, bool [E]."""
    made_E1, ahead_K = ints_EI[:, 7:8], torch.arange(drafts_EK.shape[1], device=slot_E.device)
    stop_EQ = stops(tokens_EQ, slots, slot_E)
    on_EK = (tokens_EQ[:, :-1] == drafts_EK) & (ahead_K < made_E1) & ~stop_EQ[:, :-1]
    return appended(tokens_EQ, stop_EQ, on_EK.cumprod(1).sum(1), slots, slot_E, ints_EI)


def stops(tokens_EQ: Tensor, slots: Slots, slot_E: Tensor) -> Tensor:
    """bool [E, Q]: which tokens end their slot."""
    return (tokens_EQ.unsqueeze(2) == slots.stop_SK[slot_E].unsqueeze(1)).any(2)


def appended(
    tokens_EQ: Tensor, stop_EQ: Tensor, right_E: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor
) -> tuple[Tensor, Tensor]:
    """Appends as many tokens as there are right drafts, and one more. → as `follow`."""
    length_E, end_E = ints_EI[:, 0], ints_EI[:, 2]
    ahead_Q = torch.arange(tokens_EQ.shape[1], device=slot_E.device)
    live_E = end_E > 0
    count_E = torch.minimum(1 + right_E, end_E - length_E).clamp_(min=0) * live_E
    new_E = length_E + count_E
    stopped_E = stop_EQ.gather(1, (count_E - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    going_E = (new_E < end_E) & ~stopped_E
    column_EQ = torch.where(ahead_Q < count_E.unsqueeze(1), length_E.unsqueeze(1) + ahead_Q, slots.context)
    place_EQ = slot_E.unsqueeze(1) * slots.tokens_SL.shape[1] + column_EQ
    slots.tokens_SL.view(-1).index_copy_(0, place_EQ.flatten(), tokens_EQ.flatten().to(torch.int32))
    slots.state_S3.index_copy_(0, slot_E, torch.stack((new_E, new_E - 1, end_E * going_E), 1))
    return count_E, ~going_E
