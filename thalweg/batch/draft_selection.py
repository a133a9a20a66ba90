"""The context that the steps of a draft share, see `attention.draft_selection`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class DraftSelection(NamedTuple):
    """The context that the first step of a draft selects (DSA), for the draft steps after it. T tokens of a step.

    positions_TK: int32, rising, -1 after the last. root_T int64: the position of the first step's token. is_first:
    the step selects and stores both; else it adds the drafts since the root to them.
    """

    positions_TK: Tensor
    root_T: Tensor
    is_first: bool

    def store(self, positions_TK: Tensor, root_T: Tensor) -> None:
        """positions_TK: at most K of each token, in this form."""
        self.positions_TK[:, : positions_TK.shape[1]].copy_(positions_TK)
        self.positions_TK[:, positions_TK.shape[1] :].fill_(-1)
        self.root_T.copy_(root_T)

    def later(self, nodes: int = 1) -> DraftSelection:
        """Of a step after the first one, with so many tokens of each row."""
        if nodes == 1:
            return self._replace(is_first=False)
        return self.map(lambda x: x.repeat_interleave(nodes, 0))._replace(is_first=False)

    def map(self, change: Callable[[Tensor], Tensor]) -> DraftSelection:
        """Of other tokens."""
        return self._replace(positions_TK=change(self.positions_TK), root_T=change(self.root_T))
