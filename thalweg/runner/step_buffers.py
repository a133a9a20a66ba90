"""The token tensors that captured prefill and mixed steps read."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, ContextRanks, TokenShare
from thalweg.parallel.axis import SINGLE


class StepBuffers:
    """What the graphs of all buckets read and write: ids, positions, places and reality of the tokens, what attention
    between pieces returns, and the choice of context that pipeline stages give each other. All buckets use its first
    rows, so the largest is recorded first.
    """

    def __init__(self, most: int, device: torch.device, ranks: ContextRanks = SINGLE, topk: int = 0) -> None:
        """ranks: that the tokens of a step are divided over; the buffers hold this one's. topk: positions of a choice;
        0: stages share none.
        """
        self.ids_T, self.positions_T, self.write_T = torch.zeros(3, most, dtype=torch.int64, device=device)
        self.real_T = torch.zeros(most, dtype=torch.bool, device=device)
        self.out_TX: Tensor | None = None
        self.border_TK = torch.zeros(most, topk, dtype=torch.int32, device=device) if topk else None
        self.ranks, self.write_all = ranks, torch.zeros(ranks.size * most, dtype=torch.int64, device=device)

    def share(self, tokens: int) -> TokenShare | None:
        """Of a bucket of so many tokens; None where one rank computes all."""
        return None if self.ranks.size == 1 else TokenShare(self.ranks, self.write_all[: self.ranks.size * tokens])

    def border(self, tokens: slice) -> Tensor | None:
        """As `Batch.border_TK` of these tokens."""
        return None if self.border_TK is None else self.border_TK[tokens]

    def fill(self, batch: Batch, tokens: int) -> None:
        """Takes the tokens of a step, with padding up to so many."""
        count = len(batch.ids_T)
        for held, given in (
            (self.ids_T, batch.ids_T),
            (self.positions_T, batch.positions_T),
            (self.write_T, batch.write_T),
            (self.real_T, batch.real_T),
        ):
            held[:count] = given
            held[count:tokens] = 0
        if (share := self.share(tokens)) is not None:
            assert batch.share is not None, "the step was divided before"
            write_CT = share.write_all.view(-1, tokens)
            write_CT[:, :count] = batch.share.write_all.view(-1, count)
            write_CT[:, count:] = 0

    def make_out(self, like_TX: Tensor) -> None:
        """Makes room for what attention returns, such as `like`."""
        self.out_TX = like_TX.new_zeros(len(self.ids_T), *like_TX.shape[1:])

    def out(self, tokens: int) -> Tensor:
        """Where attention puts the results of so many tokens."""
        assert self.out_TX is not None, "the first attention that was captured made it"
        return self.out_TX[:tokens]
