"""Which kernel computes an indexer's scores (DSA) of which tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

from torch import Tensor

from thalweg.core.plan import PAGE
from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.dsa import deep_gemm, triton
from thalweg.layers.paged import PagedStep

# (index queries, weights of their heads, rows, which of these tokens, upper bound of a context) → float32 [T, S], see
# `kernels.dsa.triton.scores`
Scores = Callable[[Tensor, Tensor, QueryRows, slice, int], Tensor]


class ScoredTokens(NamedTuple):
    """Consecutive tokens of a step that have one kernel."""

    tokens: slice
    max_kv_len: int  # upper bound of their contexts
    scores: Scores
    together: int = 1  # tokens that stay in one launch

    def chunks(self, most: int) -> Iterator[slice]:
        """Of up to so many tokens each, or as many as stay together."""
        count = max(most // self.together, 1) * self.together
        for first in range(self.tokens.start, self.tokens.stop, count):
            yield slice(first, min(first + count, self.tokens.stop))


class IndexScores(Protocol):
    """A backend of index scores: a row of `config.backends.INDEX_SCORES` names its class."""

    def parts(self, step: PagedStep, rows: QueryRows, keys_PSd: Tensor) -> Iterator[ScoredTokens]:
        """All tokens of the step, in order. keys_PSd: the plane of a layer's index keys."""


class TritonScores:
    """The project's own kernel for all tokens."""

    def parts(self, step: PagedStep, rows: QueryRows, keys_PSd: Tensor) -> Iterator[ScoredTokens]:
        """See `IndexScores`."""
        longest = max(group.max_kv_len for group in step.batch.groups)
        yield ScoredTokens(slice(0, len(rows.rows_T)), longest, partial(_by_triton, keys_PSd))


class DeepGemmScores:
    """DeepGEMM for decode rows and long prompts. The project's own kernel for prompts of few tokens, padding, and trees
    of drafts, whose tokens see paths.
    """

    def parts(self, step: PagedStep, rows: QueryRows, keys_PSd: Tensor) -> Iterator[ScoredTokens]:
        """See `IndexScores`."""
        if rows.paths_TD is not None:
            yield from TritonScores().parts(step, rows, keys_PSd)
            return
        own = partial(_by_triton, keys_PSd)
        first, longest = 0, 0  # of the tokens before this group that are left to our kernel
        for group in step.batch.groups:
            is_decode = group.token_slice.stop <= step.decode
            if not is_decode and group.query < deep_gemm.MIN_PROMPT_TOKENS:
                longest = max(longest, group.max_kv_len)
                continue
            if longest:
                yield ScoredTokens(slice(first, group.token_start), longest, own)
            first, longest = group.token_slice.stop, 0
            if is_decode:
                by = partial(_decode_rows, step, keys_PSd, group.query)
                yield ScoredTokens(group.token_slice, group.max_kv_len, by, group.query)
                continue
            for i in range(group.rows):
                pages_P = rows.table_RL[group.row_start + i, : -(-group.max_kv_len // PAGE)]
                by = partial(_prompt, step, deep_gemm.gather_keys(keys_PSd, pages_P))
                token = group.token_start + i * group.query
                yield ScoredTokens(slice(token, token + group.query), group.max_kv_len, by)
        if longest:
            yield ScoredTokens(slice(first, len(rows.rows_T)), longest, own)


def _by_triton(
    keys_PSd: Tensor, query_TX: Tensor, weights_TH: Tensor, rows: QueryRows, some: slice, max_kv_len: int
) -> Tensor:
    return triton.scores(query_TX[some], weights_TH[some], keys_PSd, rows.some(some), max_kv_len)


def _decode_rows(
    step: PagedStep,
    keys_PSd: Tensor,
    query: int,
    query_TX: Tensor,
    weights_TH: Tensor,
    rows: QueryRows,
    some: slice,
    max_kv_len: int,
) -> Tensor:
    metadata = step.metadata_of_scores(some, lambda: deep_gemm.schedule_decode(rows.some(some), query))
    return deep_gemm.decode_scores(query_TX[some], weights_TH[some], keys_PSd, metadata, max_kv_len)


def _prompt(
    step: PagedStep,
    keys: deep_gemm.GatheredKeys,
    query_TX: Tensor,
    weights_TH: Tensor,
    rows: QueryRows,
    some: slice,
    max_kv_len: int,
) -> Tensor:
    metadata = step.metadata_of_scores(some, lambda: deep_gemm.prompt_bounds(rows.positions_T[some]))
    return deep_gemm.prompt_scores(query_TX[some], weights_TH[some], keys, metadata, max_kv_len)
