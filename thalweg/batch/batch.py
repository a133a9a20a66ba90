"""What a model sees of a step: tokens, positions, where their KV goes and where the context lies. Frozen; no requests,
no modes.

Letters: T tokens of the step, R rows, P pages of the longest row, E sampled rows, N = E × positions sampled of
each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Protocol

from torch import Tensor

from thalweg.batch.draft_selection import DraftSelection


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive rows with the same number of query tokens: a rectangle of rows × query tokens, in row order.

    Decode rows are one group, ragged rows one each. `max_kv_len` is the host's upper bound of its longest context, in
    tokens, this step's tokens included; the truth is in `Batch.positions_T`.
    """

    row_start: int
    rows: int
    token_start: int
    query: int
    max_kv_len: int

    @property
    def row_slice(self) -> slice:
        return slice(self.row_start, self.row_start + self.rows)

    @property
    def token_slice(self) -> slice:
        return slice(self.token_start, self.token_start + self.rows * self.query)


class RowExtent(NamedTuple):
    """A row's query tokens, and an upper bound (exact for a prompt) of its context with them, in tokens."""

    query: int
    max_kv_len: int


# The part of an attention layer whose work depends on lengths and pages, all between its projections: (what the layers
# of a forward share, projected inputs [T, ...], ...) → [T, ...] for the output projection
Attend = Callable[..., Tensor]


class GraphBreak(Protocol):
    """Stands between the static parts of a forward and the attention of each layer: a recording is cut there."""

    def __call__(self, attend: Attend, step: Any, *inputs: Tensor) -> Tensor: ...


def no_graph_break(attend: Attend, step: Any, *inputs: Tensor) -> Tensor:
    """No cut: attention at once."""
    return attend(step, *inputs)


class TreeMask(NamedTuple):
    """Of a step whose drafts part ways. columns_T int64: where a token's KV stands in the context of its row, which is
    its position but for drafts, that stand one behind the other whatever their depth; padding is 0. tree_mask_T int64:
    bit i is set if a token sees the i-th column before its own; bit 63 is always set and stands for all columns further
    away. rows: the leading rows of the step that may have drafts; the mask of all other tokens is -1.
    """

    columns_T: Tensor
    tree_mask_T: Tensor
    rows: int


class PromptRows(NamedTuple):
    """Rows of a captured step. Their number and lengths are on the device: up to D decode rows, and up to N rows of
    prompts behind them. Tokens behind these are padding.
    """

    decode_table_DP: Tensor  # int32
    decode_positions_D: Tensor  # int64: 0 of rows beyond the step's decode rows
    table_NP: Tensor  # int32
    starts_N1: Tensor  # int32 [N + 1]: row i has the tokens starts[i] to starts[i + 1] of the step
    context_starts_N1: Tensor  # int32 [N + 1]: the same of the rows' contexts, one behind the other
    cached: int  # upper bound of the tokens of all contexts that are not of this step


class ContextRanks(Protocol):
    """The ranks that the tokens of a forward are divided over, and this one's number."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: the tensors of all ranks, in rank order."""


class TokenShare(NamedTuple):
    """Of a batch that holds one rank's share of the tokens of a forward, see `batch.share`. write_all: int64, where the
    KV of the tokens of all ranks is written, in rank order; 0 for padding.
    """

    ranks: ContextRanks
    write_all: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """The device tensors of one model pass."""

    ids_T: Tensor  # int64: token ids; padding is 0
    positions_T: Tensor  # int64: a token attends to positions of its row up to its own (but see `tree`); padding is 0
    write_T: Tensor  # int64: flat index page * page size + offset where KV is written; padding goes into the null page
    table_RP: Tensor  # the pages of a row's positions in order, 0 beyond its end; in the type of the slots' table
    real_T: Tensor  # bool: False for padding
    logits_indices_N: Tensor  # int64: tokens whose logits are sampled, equally many of each sampled row
    groups: tuple[Group, ...]  # rectangles that cover all tokens in order
    extents: tuple[RowExtent, ...] = ()  # of each row
    graph_break: GraphBreak = no_graph_break  # through which layers call their attention
    tree: TreeMask | None = None  # None: columns are positions, and all before is seen
    shares_slots: bool = False  # rows of one token may belong to one request: they read each other's keys
    verifies: bool = False  # the rows of the first group have drafts, so their extents are upper bounds
    prompts: PromptRows | None = None  # of a captured step, whose table_RP and extents are not read
    # int64: the slot of each row, whose hot sets attention may use; rows without real tokens may have any. None: it
    # reads host memory
    slot_R: Tensor | None = None
    share: TokenShare | None = None  # None: all tokens of the forward are here
    draft_selection: DraftSelection | None = None  # None: every layer with an indexer selects for itself
    # int32 [T, K]: where layers with an indexer put the positions that they choose, and layers without one find them.
    # Captured code receives those of the pipeline stage before into it, and sends it to the next one, so it is the same
    # memory in every step. None: no choice crosses a border, or nothing is captured
    border_TK: Tensor | None = None

    @property
    def columns_T(self) -> Tensor:
        """int64: the last place of its row's context that each token sees."""
        return self.positions_T if self.tree is None else self.tree.columns_T

    def tree_mask(self, tokens: int) -> Tensor | None:
        """int64: what the first tokens see of their rows' contexts if drafts branch; else None."""
        return None if self.tree is None else self.tree.tree_mask_T[:tokens]
