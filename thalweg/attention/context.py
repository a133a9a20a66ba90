"""What the attention layers of one step share: for each group its pages, masks and tiles, made once and read by every
layer.

Letters: R rows of a group, q query tokens a row, N = R · q of them, S context tokens (whole pages), T tokens of the
step. A bias is additive: 0 (or as good as 0, see TIE) where a context token may be seen, -inf where not; every query
token sees at least one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Iterator, NamedTuple

import torch
from torch import Tensor

from thalweg.batch.batch import Batch, Group, Tree
from thalweg.core.plan import PAGE
from thalweg.core.tree import MAX_TREE_NODES
from thalweg.memory.planes import Planes

# a position: far below any score's rounding. relu makes index scores of exactly 0 frequent; of those the latest are
# chosen,
TIE = 1e-20
# so that a choice depends neither on how many candidates a prompt was cut to nor on the order of a top-k
# bounds what a tile's scores, or its gathered latents, may take: 64 MiB in float32; on a GPU, where every tile costs
# launches, 512 MiB
TILE_ELEMENTS, TILE_ELEMENTS_ON_GPU = 1 << 24, 1 << 27


class Tile(NamedTuple):
    """Query tokens [start, stop) of every row of a group, and how many pages of context they can reach."""

    start: int
    stop: int
    pages: int


class Work(NamedTuple):
    """Elements the widest layer makes at once: for each pair of query and context token, and for each query token
    besides.
    """

    pair: int
    token: int = 0

    def pairs(self, reach: int) -> int:
        """Of one query token and a context of whole pages."""
        return self.pair * -(-reach // PAGE) * PAGE


class Span:
    """One group and its context, cut into tiles that bound the memory of scores."""

    def __init__(self, batch: Batch, group: Group, counting_S: Tensor, work: Work) -> None:
        self.group, self.rows, self.query, self.reach = group, group.rows, group.query, group.reach
        self.pages = -(-group.reach // PAGE)
        self._counting_S = counting_S
        self.covers = group.rows * group.query == len(batch.ids_T)
        self.columns_N = self.part(batch.columns_T)
        self.hides_N = None if batch.tree is None else self.part(batch.tree.hides_T)
        self.table_RP = batch.table_RP[group.row_slice, : self.pages]
        self._table_N = self.table_RP.reshape(-1)
        self.tiles = tuple(self._tiles(work))
        self._biases = {self.tiles[0]: self._make_bias(self.tiles[0])} if len(self.tiles) == 1 else {}

    def _tiles(self, work: Work) -> Iterator[Tile]:
        step = max(_most(self.table_RP) // (self.rows * max(work.pairs(self.reach), work.token)), 1)
        for start in range(0, self.query, step):
            stop = min(start + step, self.query)
            # columns are consecutive: a query token reaches no further than the group's reach less the tokens behind it
            yield Tile(start, stop, min(-(-(self.reach - self.query + stop) // PAGE), self.pages))

    def part(self, x: Tensor) -> Tensor:
        """This group's tokens [N, ...] of a tensor of all tokens [T, ...]."""
        return x if self.covers else x[self.group.token_slice]

    def tokens_of(self, x_N: Tensor, tile: Tile) -> Tensor:
        """A tile's tokens [rows * (stop - start), ...] of this group's."""
        if len(self.tiles) == 1:
            return x_N
        return x_N.view(self.rows, self.query, *x_N.shape[1:])[:, tile.start : tile.stop].flatten(0, 1)

    def join(self, tiles: list[Tensor]) -> Tensor:
        """The inverse of `tokens_of`: [N, ...] of all tiles' tokens."""
        if len(tiles) == 1:
            return tiles[0]
        return torch.cat([tile.view(self.rows, -1, *tile.shape[1:]) for tile in tiles], 1).flatten(0, 1)

    def bias(self, tile: Tile) -> Tensor:
        """float32 [tokens of the tile, S]: as good as 0 up to each query token's own column, but for those that it does
        not see; else -inf.
        """
        return self._biases[tile] if tile in self._biases else self._make_bias(tile)

    def _make_bias(self, tile: Tile) -> Tensor:
        counting_S = self._counting_S[: self._width(tile)]
        columns_N1 = self.tokens_of(self.columns_N, tile).unsqueeze(-1)
        unseen = counting_S > columns_N1
        if self.hides_N is not None:
            unseen |= hidden(columns_N1 - counting_S, self.tokens_of(self.hides_N, tile).unsqueeze(-1))
        return torch.where(unseen, -torch.inf, counting_S * TIE)

    def _width(self, tile: Tile) -> int:
        """Context tokens of a tile: of a whole row from the table, not from `pages`, since a traced step has tables of
        any width.
        """
        return (self.table_RP.shape[1] if tile.pages == self.pages else tile.pages) * PAGE

    def only(self, tile: Tile, index_NK: Tensor, bias_NK: Tensor) -> Tensor:
        """float32 [tokens of the tile, S]: the bias of the chosen positions, -inf elsewhere."""
        nothing = torch.full((len(index_NK), self._width(tile)), -torch.inf, device=index_NK.device)
        return nothing.scatter_(1, index_NK, bias_NK)

    def gather(self, paged: Tensor, pages: int) -> Tensor:
        """[R, S, dim]: the first `pages` pages of every row's context, copied together."""
        table = self._table_N if pages == self.pages else self.table_RP[:, :pages].reshape(-1)
        return paged.index_select(0, table).view(self.rows, -1, paged.shape[-1])

    def slots(self, index_NK: Tensor) -> Tensor:
        """Flat plane rows of context positions; the same number of query tokens of each row."""
        if len(index_NK) == self.rows:
            return self._slots_RS.gather(1, index_NK)
        return self._slots_RS.gather(1, index_NK.view(self.rows, -1)).view_as(index_NK)

    @cached_property
    def _slots_RS(self) -> Tensor:
        return torch.add(self._counting_S[:PAGE], self.table_RP.unsqueeze(-1), alpha=PAGE).view(self.rows, -1)


def hidden(before: Tensor, hides: Tensor) -> Tensor:
    """Whether a token does not see the column so far before its own. hides: see `batch.Tree`, whose highest bit is
    never set, so that it stands for all columns that are further away.
    """
    return (hides >> before.clamp(0, 63)) & 1 == 1


def paths_of(tree: Tree, tokens: int) -> Tensor:
    """The columns in which the last positions of the step's first `tokens` tokens stand, int32 [tokens, D], their own
    first; of those before, column and position are one. D: bits of what a token hides. Asks the host for nothing.
    """
    column_T1, hides_T1 = (x[:tokens].unsqueeze(1) for x in tree[:2])
    before_D = torch.arange(MAX_TREE_NODES + 1, device=column_T1.device)
    hidden_TD = (hides_T1 >> before_D) & 1
    seen_TD = before_D + 1 - hidden_TD.cumsum(1)  # how many columns each token sees up to this one, going back
    # where no column of the mask is left all before are seen
    path_TD = column_T1 - hidden_TD.sum(1, keepdim=True) - torch.nn.functional.pad(before_D, (0, 1))
    path_TD.scatter_(1, torch.where(hidden_TD == 1, len(before_D), seen_TD - 1), column_T1 - before_D)
    return path_TD[:, :-1].to(torch.int32)


@dataclass(frozen=True, slots=True)
class Step:
    """What the layers of a forward are given. cis_T1c: the rotation of each token, complex64. reach: the longest
    context, in tokens.
    """

    batch: Batch
    planes: Planes
    cis_T1c: Tensor
    spans: tuple[Span, ...]
    reach: int


def counting(context: int, device: torch.device) -> Tensor:
    """0, 1, 2, … for all positions that whole pages of a context of this length have."""
    return torch.arange(-(-context // PAGE) * PAGE, device=device)


def step_of(batch: Batch, planes: Planes, cis: Tensor, counting_S: Tensor, work: Work) -> Step:
    """cis: the whole rotary table [context, dim / 2]."""
    cis_T1c = cis.index_select(0, batch.positions_T).unsqueeze(1)
    parts = (part for group in batch.groups for part in _cut(batch, group, work))
    spans = tuple(Span(batch, part, counting_S, work) for part in parts)
    return Step(batch, planes, cis_T1c, spans, max(span.reach for span in spans))


def _most(x: Tensor) -> int:
    return TILE_ELEMENTS_ON_GPU if x.is_cuda else TILE_ELEMENTS


def _cut(batch: Batch, group: Group, work: Work) -> Iterator[Group]:
    """Consecutive rows of a group: as many together as have one query token each within the bound, since no tile is
    smaller. Each part reaches as far as its own rows. A step that is being recorded has no extents and stays whole: it
    is good for contexts of any length.
    """
    most = _most(batch.table_RP)
    if not batch.extents or group.rows * work.pairs(group.reach) <= most:
        yield group
        return
    first, stop, reach = group.row_start, group.row_start + group.rows, 0
    for row in range(first, stop):
        own = batch.extents[row].reach
        if row > first and (row + 1 - first) * work.pairs(max(reach, own)) > most:
            yield _rows(group, first, row, reach)
            first, reach = row, 0
        reach = max(reach, own)
    yield _rows(group, first, stop, reach)


def _rows(group: Group, first: int, stop: int, reach: int) -> Group:
    token = group.token_start + (first - group.row_start) * group.query
    return Group(first, stop - first, token, group.query, reach)


def join_groups(parts: list[Tensor]) -> Tensor:
    """All tokens of the step, from those of each group."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
