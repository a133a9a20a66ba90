"""Verifying a chain of drafts: which of them are what the target draws.

The target draws a token at every position of the path, each with the coins of its position; drafts are accepted as far
as they are the tokens drawn, and the first token that is not, or the one behind the last draft, comes with them. So the
tokens are those of plain decoding, whoever drafted, and nothing can be biased. For a draft that is no sample this is
the point-mass rule: it is accepted with its probability p(d), and what is drawn instead is distributed as p without d.
A drafter that samples races with the same coins (`random.exponential`), so that both choose the same token with a
probability of at least (1 - D) / (1 + D), D being their distributions' total variation distance (Daliri, Musco, Suresh
2024, "Coupling without communication and drafter-invariant speculative decoding", theorem 1).

Letters: E rows, Q positions of each, K = Q - 1 drafts, N = E · Q, V vocabulary, I integers of a slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.kernels.verify_chain import ref


class SampledPositions(NamedTuple):
    """What each position of each row is sampled by. slot_N int64; ints_NI int64: its slot's integers as if the drafts
    before it were known, and ended where they reach the end; `at` is its own draft's column. drafts_EK int64.
    """

    slot_N: Tensor
    ints_NI: Tensor
    drafts_EK: Tensor


def chain_positions(slots: Slots, slot_E: Tensor, ints_EI: Tensor, query: int) -> SampledPositions:
    """The positions behind the known tokens of each row."""
    ahead_Q = torch.arange(query, device=slot_E.device)
    ints_EQI = ints_EI.unsqueeze(1).repeat(1, query, 1)
    length_EQ, end_EQ = ints_EQI[..., 0], ints_EQI[..., 2]
    length_EQ += ahead_Q
    ints_EQI[..., 1] += ahead_Q
    end_EQ *= length_EQ < end_EQ
    length_EQ.clamp_(max=slots.context)  # beyond the end nothing is accepted, but indices must be valid
    drafts_EK = slots.tokens_SL[slot_E.unsqueeze(1), length_EQ[:, :-1]].to(torch.int64)
    return SampledPositions(slot_E.repeat_interleave(query), ints_EQI.flatten(0, 1), drafts_EK)


def accept_chain(tokens_EQ: Tensor, along: SampledPositions, slots: Slots) -> tuple[Tensor, Tensor]:
    """Appends the tokens drawn, as far as drafts agree, to their slots, and ends those that reached a stop id or their
    end. → how many of each row (0 where the slot had ended before), int64 [E]; whether it has ended, bool [E].
    """
    count_E, done_E = (tokens_EQ.new_empty(len(tokens_EQ), dtype=kind) for kind in (torch.int64, torch.bool))
    ids_N = torch.cat((tokens_EQ[:, :1], along.drafts_EK), 1).flatten()  # in the place of the known token any
    fields, out = (slots.stop_SK, slots.tokens_SL, slots.ints_SI), (torch.empty_like(tokens_EQ), count_E, done_E)
    ref.verify_chain(tokens_EQ.flatten(), ids_N, along.slot_N, along.ints_NI, *fields, out)
    return count_E, done_E
