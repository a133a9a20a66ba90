"""Decode context parallelism: ranks that would all hold the same KV hold a part of each context.

D neighbouring tensor-parallel ranks share a page: of its `PAGE` * D tokens, in order, each rank stores `PAGE` in its
page of that number. Every rank attends to its own part for the heads of all D, and the parts are merged by their
log-sum-exp. A place is a position, or a row of `Batch.write_T`; a stored one is that of this rank's tokens alone.

Letters: N query tokens, H heads of a rank, J = D · H, R rows, P pages, S stored tokens of a row, M tokens, X numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.core.plan import PAGE
from thalweg.kernels.attend.ref import attend_with_lse, merge_states
from thalweg.memory.planes import put, take
from thalweg.parallel.axis import SINGLE, Axis


@dataclass(frozen=True, slots=True)
class ContextShard:
    """One rank's part of every context. With an axis of size 1 that is all of it."""

    axis: Axis = SINGLE

    @property
    def is_whole(self) -> bool:
        return self.axis.size == 1

    @property
    def page_size(self) -> int:
        """Tokens of a page on all ranks together."""
        return PAGE * self.axis.size

    def owner(self, place: Tensor) -> Tensor:
        """The rank that stores the token of each place."""
        return place // PAGE % self.axis.size

    def stored(self, place: Tensor) -> Tensor:
        """Where its owner has the token of each place."""
        return place // self.page_size * PAGE + place % PAGE

    def positions(self, stored: Tensor) -> Tensor:
        """The position of each stored one of this rank."""
        return stored // PAGE * self.page_size + self.axis.rank * PAGE + stored % PAGE

    def rows(self, write_T: Tensor) -> Tensor:
        """Rows of this rank's planes for `Batch.write_T`; what others store goes into the null page."""
        return torch.where(self.owner(write_T) == self.axis.rank, self.stored(write_T), write_T % PAGE)

    def written(self, batch: Batch) -> Batch:
        """The step with rows of this rank's planes in place of what it writes."""
        share = batch.share and batch.share._replace(write_all=self.rows(batch.share.write_all))
        return replace(batch, write_T=self.rows(batch.write_T), share=share)

    def gather_context(self, stored_RSX: Tensor) -> Tensor:
        """[R, P * PAGE, X] of whole pages on each rank → [R, P * page_size, X], in the order of positions."""
        if self.is_whole:
            return stored_RSX
        bytes_RSX = stored_RSX.view(torch.uint8)  # Gloo does not know e4m3
        rows, _, width = bytes_RSX.shape
        gathered = self.axis.all_gather(bytes_RSX).view(self.axis.size, rows, -1, PAGE, width)
        return gathered.permute(1, 2, 0, 3, 4).reshape(rows, -1, width).view(stored_RSX.dtype)

    def gather_heads(self, query_NHX: Tensor) -> Tensor:
        """The queries of all ranks: → [N, J, X]."""
        return self.axis.all_gather(query_NHX).transpose(0, 1).flatten(1, 2)

    def merge(self, state_NJX: Tensor) -> Tensor:
        """Attention of this rank's heads to the whole context, of `pack_state` of all heads on each part: →
        [N, H, value dim]. One exchange.
        """
        tokens, _, width = state_NJX.shape
        by_rank = state_NJX.view(tokens, self.axis.size, -1, width).transpose(0, 1)
        state_DNHX = self.axis.all_to_all(by_rank)
        return merge_states(*zip(*map(unpack_state, state_DNHX), strict=True))[0]

    def take(self, entries: Sequence[Tensor], rows_M: Tensor) -> list[Tensor]:
        """`memory.planes.take` of rows of `Batch.write_T`, on all ranks. One exchange."""
        if self.is_whole:
            return take(entries, rows_M)
        own, owner = take(entries, self.rows(rows_M)), self.owner(rows_M).unsqueeze(0).unsqueeze(-1)
        taken_1MX = torch.take_along_dim(self.axis.all_gather(torch.cat(own, -1)), owner, 0)
        return list(torch.split(taken_1MX[0], [part.shape[-1] for part in own], -1))

    def put(self, entries: Sequence[Tensor], rows_M: Tensor, parts: Sequence[Tensor]) -> None:
        """`memory.planes.put` into rows of `Batch.write_T`, each on its owner."""
        put(entries, rows_M if self.is_whole else self.rows(rows_M), parts)


def pack_state(out: Tensor, lse: Tensor) -> Tensor:
    """Attention to a part of a context as one tensor: out [..., v] of any type, lse float32 [...] behind it."""
    return torch.cat((out, lse.unsqueeze(-1).view(out.dtype)), -1)


def unpack_state(state: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_state`."""
    width = torch.float32.itemsize // state.itemsize
    return state[..., :-width], state[..., -width:].contiguous().view(torch.float32).squeeze(-1)


def attend_packed(q_BQd: Tensor, key_BKd: Tensor, value_BKv: Tensor, bias: Tensor, scale: float) -> Tensor:
    """`kernels.attend.ref.attend`, as a packed state: → [B, Q, X]. A query may see nothing."""
    return pack_state(*attend_with_lse(q_BQd, key_BKd, value_BKv, bias, scale))
