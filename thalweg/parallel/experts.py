"""Which rank computes which expert, and how tokens get there and back.

A physical slot holds the weights of one expert on one rank. The table maps (home rank of the token, logical expert) to
a slot, so that copies of an expert share its tokens. A shared expert has a copy on every rank, which computes the
tokens of that home rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.parallel.axis import share_of
from thalweg.parallel.layout import Layout


class ExpertPlacement:
    """The table of one layer, on the device. Logical experts experts ... experts + shared - 1 are the shared ones."""

    def __init__(self, experts: int, shared: int, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        here = share_of(experts, layout.ep, "experts")
        self.here = here  # routed experts whose weights this rank holds
        self.slots = len(here) + shared  # on this rank
        self.first_slot = layout.ep.rank * self.slots
        ranks = torch.arange(layout.ep.size, device=device).unsqueeze(1)
        routed = torch.arange(experts, device=device).unsqueeze(0).expand(layout.ep.size, -1)
        own_shared = ranks * self.slots + len(here) + torch.arange(shared, device=device)
        self.slot_RE = torch.cat([routed // len(here) * self.slots + routed % len(here), own_shared], 1)

    def local_ids(self, ids_TK: Tensor, tokens_a_rank: int) -> Tensor:
        """The slots on this rank of the chosen logical experts, `slots` where the expert is elsewhere or the id is
        none.

        ids_TK: of the tokens of all data-parallel ranks, `tokens_a_rank` of each in rank order; ids beyond the logical
        experts are none.
        """
        layout, logical = self.layout, self.slot_RE.shape[1]
        token_T = torch.arange(len(ids_TK), device=ids_TK.device)
        # tensor-parallel ranks have the same tokens: each is the home of every tp-th
        home_T = token_T // tokens_a_rank * layout.tp.size + token_T % tokens_a_rank % layout.tp.size
        home_T = home_T // layout.moe_tp.size
        is_expert_TK = ids_TK < logical
        slot_TK = self.slot_RE[home_T.unsqueeze(1), (ids_TK * is_expert_TK).long()] - self.first_slot
        is_here_TK = is_expert_TK & (slot_TK >= 0) & (slot_TK < self.slots)
        return torch.where(is_here_TK, slot_TK, self.slots).to(ids_TK.dtype)

    def dispatch(self, *of_tokens: Tensor) -> tuple[Tensor, ...]:
        """Tensors [T, ...] of this rank's tokens → those of all data-parallel ranks, [dp * T, ...]."""
        return tuple(self.layout.dp.all_gather(x).flatten(0, 1) for x in of_tokens)

    def combine(self, partial_TH: Tensor) -> Tensor:
        """[dp * T, H], this rank's part of the sum for all tokens → float32 [T, H] for its own tokens, still to be
        summed over tensor-parallel ranks.
        """
        dp = self.layout.dp
        return dp.reduce_scatter(partial_TH.view(dp.size, -1, *partial_TH.shape[1:]))
