"""What becomes of the slots of rows whose drafts are a chain; rows stand in a step token by token.

Letters: E rows, Q positions of each, N = E · Q, I integers of a slot, K stop ids, S slots, L columns of the tokens
plane.
"""

from __future__ import annotations

import torch
from torch import Tensor

Out = tuple[Tensor, Tensor, Tensor]


def verify_chain(
    drawn_N: Tensor, ids_N: Tensor, slot_N: Tensor, ints_NI: Tensor, stop_SK: Tensor, tokens_SL: Tensor, ints_SI: Tensor, out: Out
) -> None:  # fmt: skip
    """Appends the tokens drawn, as far as drafts agree, to their slots, and ends those that reached a stop id or their
    end.

    drawn_N int64: what was drawn at each position, below 0 where no token could be, which ends a slot, too. ids_N
    int64: the step's tokens, which behind the first of a row are its drafts. slot_N int64 and ints_NI int64: see
    `prepare.ref.decode`; those of a row's first position are its slot's own, and padding has ended. stop_SK int64, -1
    where there is none. Writes tokens_SL and the first three columns of ints_SI; into `out`: the tokens int64 [E, Q],
    how many of them are the row's int64 [E] (0 where the slot had ended before), whether the slot has ended bool
    [E].
    """
    tokens_EQ, count_E, done_E = out
    rows, query = tokens_EQ.shape
    ints_EI, slot_E = ints_NI.view(rows, query, -1)[:, 0], slot_N.view(rows, query)[:, 0]
    made_E = ints_EI[:, 7]
    drawn_EQ, ahead_Q = drawn_N.view(rows, query), torch.arange(query, device=drawn_N.device)
    stop_EQ = stops(drawn_EQ, stop_SK.index_select(0, slot_E))
    computed_EQ = ints_NI[:, 2].view(rows, query) > 0  # what the step did not compute is padding
    drafted_EQ = (ahead_Q < made_E.unsqueeze(1)) & computed_EQ.roll(-1, 1) & (ahead_Q < query - 1)
    right_EQ = (drawn_EQ == ids_N.view(rows, query).roll(-1, 1)) & drafted_EQ & ~stop_EQ
    taken_E, ended_E = append(drawn_EQ, stop_EQ, right_EQ.cumprod(1).sum(1), slot_E, ints_EI, tokens_SL, ints_SI)
    tokens_EQ.copy_(drawn_EQ)
    count_E.copy_(taken_E)
    done_E.copy_(ended_E)


def stops(tokens_EQ: Tensor, stop_EK: Tensor) -> Tensor:
    """bool [E, Q]: which tokens end their slot; one below 0, which is none, does."""
    return (tokens_EQ.unsqueeze(2) == stop_EK.unsqueeze(1)).any(2) | (tokens_EQ < 0)


def append(
    tokens_EQ: Tensor, stop_EQ: Tensor, right_E: Tensor, slot_E: Tensor, ints_EI: Tensor, tokens_SL: Tensor, ints_SI: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Appends as many tokens as there are right drafts, and one more, but none at or past the end, token 0 for what is
    none. → how many, int64 [E]; whether the slot has ended, bool [E].
    """
    length_E, end_E = ints_EI[:, 0], ints_EI[:, 2]
    taken_E = torch.minimum(1 + right_E, end_E - length_E).clamp_(min=0) * (end_E > 0)
    new_E = length_E + taken_E
    stopped_E = stop_EQ.gather(1, (taken_E - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    going_E = (new_E < end_E) & ~stopped_E
    ahead_Q, columns = torch.arange(tokens_EQ.shape[1], device=tokens_EQ.device), tokens_SL.shape[1]
    column_EQ = torch.where(ahead_Q < taken_E.unsqueeze(1), length_E.unsqueeze(1) + ahead_Q, columns - 1)
    place_EQ = slot_E.unsqueeze(1) * columns + column_EQ
    tokens_SL.view(-1).index_copy_(0, place_EQ.flatten(), tokens_EQ.flatten().clamp(min=0).to(torch.int32))
    ints_SI[:, :3].index_copy_(0, slot_E, torch.stack((new_E, new_E - 1, end_E * going_E), 1))
    return taken_E, ~going_E
