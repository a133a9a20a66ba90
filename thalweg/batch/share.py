"""Context parallelism: the tokens of a forward are divided over ranks. Each rank computes its own tokens, which attend
to the whole context, since all ranks store the keys and values of all tokens.

A share is a batch like any other. A run of consecutive tokens of a row becomes a row of its own, with the same pages
and the context that is before it, so no layer and no kernel knows of shares.

Letters: T tokens of the whole batch, C ranks, S tokens of a share, the same on each rank: T / C, rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, ContextRanks, Group, RowExtent, TokenShare, TreeMask
from thalweg.batch.slots import upload
from thalweg.config.context_parallel import ZIGZAG

BLOCK = 128  # tokens of a prompt that stay together: attention kernels take up to so many queries of a row at a time
MIN_BLOCKS = 2  # of a short prompt on each rank, an early and a late one: later tokens attend to more


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of a row on one rank."""

    row: int
    first: int  # of the row's tokens
    length: int


def divide(queries: Sequence[int], leading: int, ranks: int, strategy: str) -> list[list[Segment]]:
    """The segments of each rank, at most T / C tokens, rounded up, in the order of the rows.

    queries: tokens of each row. leading: the first rows of which only upper bounds of the contexts are known: they stay
    whole where all ranks get equally many, and else every token of them is a segment. strategy: of the other rows, see
    `config.context_parallel`.
    """
    shares = [list[Segment]() for _ in range(ranks)]
    if _stay_whole(queries[:leading], ranks):
        pieces = [Segment(row, 0, queries[row]) for row in range(leading)]
    else:
        pieces = [Segment(row, i, 1) for row in range(leading) for i in range(queries[row])]
    for number, piece in enumerate(pieces):
        shares[number % ranks].append(piece)
    each, turn = -(-sum(queries) // ranks), len(pieces) % ranks
    room = [each - sum(piece.length for piece in share) for share in shares]
    for row in range(leading, len(queries)):
        first = 0
        for rank, length in _blocks(queries[row], ranks, strategy, turn):
            while length:
                while not room[rank]:  # of a full rank the next one takes the rest
                    rank = (rank + 1) % ranks
                n = min(length, room[rank])
                _append(shares[rank], Segment(row, first, n))
                room[rank], first, length = room[rank] - n, first + n, length - n
        turn = (rank + 1) % ranks
    return shares


def _blocks(length: int, ranks: int, strategy: str, turn: int) -> Iterator[tuple[int, int]]:
    """The rank and the tokens of consecutive blocks of a row. turn: the rank that gets the next token too many."""
    if strategy == ZIGZAG:
        each, more = divmod(length, ranks)
        quotas = [each + ((rank - turn) % ranks < more) for rank in range(ranks)]
        yield from ((rank, -(-quota // 2)) for rank, quota in enumerate(quotas))
        yield from ((rank, quotas[rank] // 2) for rank in reversed(range(ranks)))
        return
    size = min(BLOCK, -(-length // (MIN_BLOCKS * ranks)))
    for number, first in enumerate(range(0, length, size)):
        yield (turn + number) % ranks, min(size, length - first)


def _append(share: list[Segment], segment: Segment) -> None:
    """Joins neighbours: each row of a share costs its attention another look at the context."""
    last = share[-1] if share else None
    if last is not None and (last.row, last.first + last.length) == (segment.row, segment.first):
        share[-1] = Segment(last.row, last.first, last.length + segment.length)
    else:
        share.append(segment)


@dataclass(frozen=True, slots=True)
class Divided:
    """A batch of which this rank computes a share."""

    batch: Batch  # the share, or the whole batch where one rank computes all
    ranks: ContextRanks | None = None  # None: one rank computes all
    own_S: Tensor | None = None  # int64: the tokens of this rank; T is padding
    place_T: Tensor | None = None  # int64: where each token is among those of all ranks, in rank order

    def take(self, x_TX: Tensor) -> Tensor:
        """[S, ...]: this rank's tokens of a tensor of all tokens [T, ...]; padding is 0."""
        return x_TX if self.own_S is None else _taken(x_TX, self.own_S, 0)

    def store_selection(self, batch: Batch) -> None:
        """Stores what the ranks have selected in the first step of a draft into the selection of the whole batch."""
        whole, own = batch.draft_selection, self.batch.draft_selection
        if self.ranks is not None and whole is not None and own is not None and whole.is_first:
            whole.store(self.whole(own.positions_TK), self.whole(own.root_T))

    def whole(self, x_SX: Tensor) -> Tensor:
        """[T, ...] of the tokens of all ranks [S, ...]: the same bits on each. All ranks call it together."""
        if self.ranks is None or self.place_T is None:
            return x_SX
        return self.ranks.all_gather(x_SX.contiguous()).flatten(0, 1).index_select(0, self.place_T)


def divided(batch: Batch, ranks: ContextRanks, strategy: str) -> Divided:
    """Divides a batch, unless it is a share or there is one rank. Nothing is sent; the device is not waited for."""
    if ranks.size == 1 or batch.share is not None:
        return Divided(batch)
    assert batch.prompts is None, "steps with prompts are not captured as a whole with several context-parallel ranks"
    extents = batch.extents or tuple(RowExtent(g.query, g.max_kv_len) for g in batch.groups for _ in range(g.rows))
    queries, leading = [extent.query for extent in extents], _leading(batch)
    segments = divide(queries, leading, ranks.size, strategy)
    if len(batch.groups) == 1 and leading == len(queries):
        # a captured step is such: its numbers are made on the device
        run = queries[0] if _stay_whole(queries, ranks.size) else 1
        order_CS, place_T = _even_order(len(batch.ids_T), ranks.size, run, batch.ids_T.device)
        row_R = order_CS[ranks.rank, ::run] // queries[0]
    else:
        order_CS, place_T = _order(segments, queries, batch.ids_T.device)
        rows = [segment.row for segment in segments[ranks.rank]]
        rows += [len(queries)] * (order_CS.shape[1] - sum(segment.length for segment in segments[ranks.rank]))
        row_R = upload(rows, torch.int64, order_CS.device)
    share = TokenShare(ranks, _taken(batch.write_T, order_CS.flatten(), 0))
    own_S, table_RP = order_CS[ranks.rank], _taken(batch.table_RP, row_R, 0)
    selection = batch.draft_selection
    tokens = replace(
        batch,
        ids_T=_taken(batch.ids_T, own_S, 0),
        positions_T=_taken(batch.positions_T, own_S, 0),
        write_T=_taken(batch.write_T, own_S, 0),
        real_T=_taken(batch.real_T, own_S, False),
        table_RP=table_RP,
        slot_R=None,
        shares_slots=True,
        share=share,
        draft_selection=selection and selection.map(partial(_taken, index_S=own_S, fill=0)),
    )
    return Divided(_in_rows(tokens, segments[ranks.rank], extents, leading, own_S), ranks, own_S, place_T)


def _leading(batch: Batch) -> int:
    """The first rows whose extents are upper bounds."""
    if batch.tree is not None:
        return batch.tree.rows
    first = batch.groups[0]
    return first.rows if batch.verifies or first.query == 1 else 0


def _stay_whole(queries: Sequence[int], ranks: int) -> bool:
    return len(queries) % ranks == 0 and len(set(queries)) == 1


def _even_order(tokens: int, ranks: int, run: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`_order` of rows of one length, in runs of so many tokens that are dealt out in turn."""
    each = -(-tokens // ranks)
    index_N = torch.arange(each * ranks, device=device)
    order_CS = index_N.view(-1, ranks, run).transpose(0, 1).reshape(ranks, each).clamp(max=tokens)
    return order_CS, index_N.view(ranks, -1, run).transpose(0, 1).flatten()[:tokens]


def _order(
    segments: Sequence[Sequence[Segment]], queries: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """The tokens of each rank [C, S], T for padding, and the place of each token in that [T]. int64."""
    starts = list(accumulate(queries, initial=0))
    tokens = starts[-1]
    each = -(-tokens // len(segments))
    order, place = list[int](), [0] * tokens
    for share in segments:
        own = [token for s in share for token in range(starts[s.row] + s.first, starts[s.row] + s.first + s.length)]
        for i, token in enumerate(own, len(order)):
            place[token] = i
        order += own + [tokens] * (each - len(own))
    both = upload(order + place, torch.int64, device)
    return both[: len(order)].view(len(segments), each), both[len(order) :]


def _in_rows(
    batch: Batch, segments: Sequence[Segment], extents: Sequence[RowExtent], leading: int, own_S: Tensor
) -> Batch:
    """The tokens of a share as rows: its segments, and behind them padding, a token each. batch: still has the tree of
    the whole one.
    """
    own = [RowExtent(s.length, _max_kv_len(s, extents[s.row], s.row < leading)) for s in segments]
    own += [RowExtent(1, 1)] * (len(own_S) - sum(segment.length for segment in segments))
    here, tree = [segment for segment in segments if segment.row < leading], batch.tree
    if tree is not None:
        mask_S = _taken(tree.tree_mask_T, own_S, -1)
        tree = TreeMask(_taken(tree.columns_T, own_S, 0), mask_S, len(here)) if here else None
    verifies = batch.verifies and any(segment.length > 1 for segment in here)
    return replace(batch, groups=_groups(own), extents=tuple(own), tree=tree, verifies=verifies)


def _max_kv_len(segment: Segment, row: RowExtent, is_bound: bool) -> int:
    """is_bound: the row's own is an upper bound, which may be cut at the end of a context."""
    return row.max_kv_len if is_bound else row.max_kv_len - row.query + segment.first + segment.length


def _groups(extents: Sequence[RowExtent]) -> tuple[Group, ...]:
    groups, row, token = list[Group](), 0, 0
    for query, same in groupby(extents, lambda extent: extent.query):
        longest = [extent.max_kv_len for extent in same]
        groups.append(Group(row, len(longest), token, query, max(longest)))
        row, token = row + len(longest), token + len(longest) * query
    return tuple(groups)


def _taken(x_TX: Tensor, index_S: Tensor, fill: int) -> Tensor:
    """The rows of these numbers; the one behind the last holds `fill`."""
    filled = x_TX.new_full((1, *x_TX.shape[1:]), fill)
    return torch.cat((x_TX, filled)).index_select(0, index_S)
