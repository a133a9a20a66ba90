"""Hot sets: the latents that a request has attended to last, in device memory. All its latents are in host memory.

A hot set has H entries. For each query token the chosen latents that it lacks replace those that were used longest ago
(LRU), never one that this step has chosen. So H is at least what the tokens of one row choose.

Only positions before the row's first token are found again: their latents never change while the request has its slot.
This step's own tokens are loaded for this step alone, since a rejected draft is overwritten, and an accepted path of a
tree moves.

Letters: S slots, H entries of a slot, L context, D bytes or numbers of a latent, R rows, Q query tokens of a row, K
chosen positions of a query token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class HotSet(NamedTuple):
    """The hot sets of one layer."""

    latents_ED: Tensor  # [S * H, D], in the plane's type; and more, to whole pages
    table_1P: Tensor  # int32: a page table by which `latents_ED` is a context
    entry_SL: Tensor  # int16: the entry that a position was loaded into last; any valid number where it never was
    position_SH: Tensor  # int32: 1 + the position that an entry holds; 0 where it holds none that is found again
    last_use_SH: Tensor  # int32: the step of the slot in which an entry was chosen last
    clock_S: Tensor  # int32: steps of the slot

    @property
    def entries(self) -> int:
        """H."""
        return self.last_use_SH.shape[1]


def swap_in(
    hot: HotSet,
    host_XD: Tensor,
    slots_R: Tensor,
    positions_RQ: Tensor,
    real_RQ: Tensor,
    chosen_RQK: Tensor,
    places_RQK: Tensor,
) -> Tensor:
    """Loads what the hot sets lack: → rows of `hot.latents_ED` that hold the chosen latents, int64 [R, Q, K]; any row
    of the slot for a filler and for padding.

    host_XD: the plane in host memory. slots_R: int64; rows with real tokens have different slots. positions_RQ: columns
    of all query tokens of the rows, rising; the other arguments may be of some of them. chosen_RQK: int64, different
    positions for each token, -1 for a filler. places_RQK: their rows of `host_XD`. Q * K is at most H.
    """
    slots_R1, start_R1 = slots_R.unsqueeze(1), first_of_step(positions_RQ)
    now_R1 = hot.clock_S[slots_R1] + 1
    hot.clock_S[slots_R1] = now_R1
    tokens = zip(real_RQ.unbind(1), chosen_RQK.unbind(1), places_RQK.unbind(1), strict=True)
    rows = [_swap_in_one(hot, host_XD, slots_R1, start_R1, now_R1, *token) for token in tokens]
    return torch.stack(rows, 1)


def first_of_step(positions_RQ: Tensor) -> Tensor:
    """The first position of each row that later steps may change: [R, 1]."""
    return positions_RQ[:, :1]


def _swap_in_one(
    hot: HotSet,
    host_XD: Tensor,
    slots_R1: Tensor,
    start_R1: Tensor,
    now_R1: Tensor,
    real_R: Tensor,
    chosen_RK: Tensor,
    places_RK: Tensor,
) -> Tensor:
    """One query token of each row: → [R, K]."""
    is_wanted, position_RK = (chosen_RK >= 0) & real_R.unsqueeze(1), chosen_RK.clamp(min=0)
    is_stable, entry_RK = position_RK < start_R1, hot.entry_SL[slots_R1, position_RK].long()
    is_hit = is_wanted & is_stable & (hot.position_SH[slots_R1, entry_RK] == position_RK + 1)
    is_missing, slots_RK, now_RK = is_wanted & ~is_hit, slots_R1.expand_as(chosen_RK), now_R1.expand_as(chosen_RK)
    hot.last_use_SH[slots_RK[is_hit], entry_RK[is_hit]] = now_RK[is_hit]
    number_RK = (is_missing.cumsum(1) - 1).clamp(min=0)
    victims_RK = least_recently_used(hot.last_use_SH.index_select(0, slots_R1.squeeze(1)), is_missing)
    entry_RK = torch.where(is_missing, victims_RK.gather(1, number_RK), entry_RK)
    rows_RK = slots_RK * hot.entries + entry_RK
    loaded = slots_RK[is_missing], entry_RK[is_missing]
    hot.latents_ED.view(torch.uint8)[rows_RK[is_missing]] = host_XD.view(torch.uint8)[places_RK[is_missing]]
    hot.last_use_SH[loaded] = now_RK[is_missing]
    hot.position_SH[loaded] = ((position_RK + 1) * is_stable)[is_missing].to(torch.int32)
    is_found_again = is_missing & is_stable
    hot.entry_SL[slots_RK[is_found_again], position_RK[is_found_again]] = entry_RK[is_found_again].to(torch.int16)
    return rows_RK


def least_recently_used(last_use_RH: Tensor, is_missing_RK: Tensor) -> Tensor:
    """As many entries of each row as are missing, of those that were chosen longest ago; of equal ones the first. They
    rise: int64 [R, K], H after the last.
    """
    entries, count = last_use_RH.shape[1], is_missing_RK.shape[1]
    oldest_RK = last_use_RH.sort(stable=True, dim=1).indices[:, :count]
    is_needed = torch.arange(count, device=oldest_RK.device) < is_missing_RK.sum(1, keepdim=True)
    return oldest_RK.masked_fill(~is_needed, entries).sort(1).values
