"""Grouped-query attention over pages on a GPU: split-KV decode, and causal prefill of ragged rows.

Decode: the query heads of a key head, times the query tokens of its row, are the M of the products, so each key and
value is read once: 4 * d bytes a context token and key head in bfloat16, half in e4m3, for 4 * d * group FLOPs. Memory
is the floor (Qwen2.5-7B, 256 rows of 1,024 tokens: 537 MB, 173 µs at 3.1 TB/s).

Prefill: 4 * d FLOPs for each pair of tokens and query head; 8,192 tokens of 28 heads of 128 dims are 481 GFLOP with a
causal mask, 0.6 ms at 800 TFLOP/s. A tile is 64 query tokens by one page, so that two programs fit a multiprocessor and
one multiplies while the other exponentiates.

Letters: T query tokens, R rows, H query heads, K key heads, d head dim, P pages of 64, L columns of the page table, s
splits. LSE: log-sum-exp, natural logarithm, float32; -inf where nothing was seen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from thalweg.kernels.attend.args import ContextChunk, DecodeRows, KvPlanes, KvWrite, PagedRows
from thalweg.kernels.attend.triton import (
    LOG2E,
    TileConfig,
    add_block,
    add_values,
    empty_softmax,
    first_page,
    gather_rows,
    largest_of,
    mask_scores,
    page_after,
    pages_of_split,
    path_rows,
    store_states,
    wait_for_previous,
    waves,
    zero_tokens,
)
from thalweg.kernels.launch import SMS
from thalweg.kernels.rope.triton import QkNorms, encode, normed, rotated


def decode_tiles(rows: int, dim: int, programs: int = 1) -> TileConfig:
    """rows: query tokens times query heads that share a key head. programs: of the whole step with one split.

    Three programs on a multiprocessor read more steadily than one with a longer pipeline (H100, Qwen2.5-7B, 256 rows of
    1,024 tokens: 185 us against 190; 64 rows: 50 against 51).
    """
    stages = 2 if programs > SMS else 4 if dim <= 128 else 3
    return TileConfig(16 if rows <= 16 else 32 if rows <= 32 else 64, 64, 4, stages)


def prefill_tiles(dim: int) -> TileConfig:
    return TileConfig(64, 64, 4, 3) if dim <= 128 else TileConfig(128, 64, 8, 2)


def splits_for(tokens: int, heads: int, kv_heads: int, context: int, query: int = 1) -> int:
    """The number of parts that `decode` cuts each context into. context: an upper bound of the longest, in tokens."""
    rows = query * heads // kv_heads
    programs = tokens // query * kv_heads * -(-rows // decode_tiles(rows, 128).rows)
    return waves(programs, context)


@triton.jit
def _scaled(q, scale, key_scale, M: constexpr):
    """→ queries for keys of this scale, and the scale of each query's scores."""
    strength = tl.full((M,), scale, tl.float32)
    if key_scale is not None:
        largest = largest_of(q)
        q = (q.to(tl.float32) / largest[:, None]).to(tl.float16)
        strength *= tl.load(key_scale) * largest
    return q, strength


@triton.jit(
    do_not_specialize=["splits", "table_row"],
    do_not_specialize_on_alignment=["table", "positions", "rows", "tree_mask", "write"],
)
def _decode(
    query, keys, values, table, positions, rows, tree_mask, out, lse, key_scale, value_scale, scale, heads, splits,
    query_token, query_head, table_row,
    key, value, key_plane, value_plane, write, cos, sin, query_norm, key_norm, eps,
    key_token, value_token, plane_row,
    QUERY: constexpr, TOGETHER: constexpr, GROUP: constexpr, DIM: constexpr, M: constexpr, N: constexpr,
    FIXED: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (k * blocks + b, s, u): split s of the context of TOGETHER query tokens from u * TOGETHER on, for key
    head k and block b of the rows that those tokens and the GROUP query heads of k make.

    With `key` queries and the token's own key are neither normed nor rotated. The split that has the token's page
    stores its key and value, and starts from them instead of reading them.
    """
    wait_for_previous(PDL)
    BLOCKS: constexpr = (TOGETHER * GROUP + M - 1) // M
    kv_head, split, first_token = tl.program_id(0) // BLOCKS, tl.program_id(1), tl.program_id(2) * TOGETHER
    row_pages, ahead = first_page(table, rows, first_token, table_row, split, QUERY)
    lane = tl.program_id(0) % BLOCKS * M + tl.arange(0, M)
    token, head = (first_token + lane // GROUP).to(tl.int64), kv_head * GROUP + lane % GROUP
    real = lane < TOGETHER * GROUP
    position = tl.load(positions + token, mask=real, other=0).to(tl.int32)
    token_mask = position if tree_mask is None else tl.load(tree_mask + token, mask=real, other=-1)
    first, step, count = pages_of_split(split, splits, tl.max(position) // 64 + 1, FIXED)
    at = (token * heads + head) * splits + split
    if count <= 0:
        tl.store(lse + at, tl.full((M,), -float("inf"), tl.float32), mask=real)
        return
    dim, lane_key = tl.arange(0, DIM), tl.arange(0, N)
    at_q = query + token[:, None] * query_token + head[:, None] * query_head + dim[None, :]
    q = tl.load(at_q, mask=real[:, None], other=0.0)
    if key is not None:
        angle = tl.load(positions + first_token) * (DIM // 2) + tl.arange(0, DIM // 2)
        cos_P, sin_P = tl.load(cos + angle), tl.load(sin + angle)
        rotated_q = rotated(normed(q.to(tl.float32), query_norm, eps, DIM), cos_P, sin_P, M, DIM)
        q = rotated_q.to(query.dtype.element_ty)
    q, strength = _scaled(q, scale, key_scale, M)
    top, total, sums = empty_softmax(M, DIM)
    if key is not None:
        if tl.max(position) // 64 % splits == split:
            own, column = first_token.to(tl.int64), kv_head * DIM + dim[None, :]
            own_k = normed(tl.load(key + own * key_token + column).to(tl.float32), key_norm, eps, DIM)
            own_k = encode(rotated(own_k, cos_P, sin_P, 1, DIM), key_scale, key_plane.dtype.element_ty)
            own_v = tl.load(value + own * value_token + column).to(tl.float32)
            own_v = encode(own_v, value_scale, value_plane.dtype.element_ty)
            top = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * strength
            total += 1.0
            sums += own_v.to(tl.float32)
            if tl.program_id(0) % BLOCKS == 0:
                to = tl.load(write + first_token)
                tl.store(key_plane + to * plane_row + column, own_k)
                tl.store(value_plane + to * plane_row + column, own_v)
        position -= 1  # of the last token that is read
    if FIXED:
        ahead = tl.load(row_pages + first).to(tl.int32)
    for tile in range(count * (64 // N)):
        page, ordinal = ahead, first + tile // (64 // N) * step
        ahead = page_after(row_pages, first, step, count, tile, 64 // N)
        start, column = page * 64 + tile * N % 64, kv_head * DIM
        scores = tl.dot(q, keys.load([start, column]).to(q.dtype).T)
        scores = mask_scores(scores, ordinal * 64 + tile * N % 64 + lane_key, position, tree_mask, token_mask)
        top, total, sums = add_block(scores, values, start, column, q.dtype, strength, top, total, sums)
    store_states(out, lse, at, real, value_scale, top, total, sums, DIM)


class NewTokens(NamedTuple):
    """The tokens that `decode` stores first. Their queries are neither normed nor rotated yet."""

    key_TKd: Tensor  # views of a projection's output, neither normed nor rotated
    value_TKd: Tensor
    write: KvWrite
    norms: QkNorms


def decode(
    query_THd: Tensor,
    kv: KvPlanes,
    rows: DecodeRows,
    *,
    scale: float,
    splits: int,
    fixed: bool = False,
    new: NewTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries over the pages of their rows: → (partial bfloat16 [T, H, splits, d], LSE [T, H, splits]), for `merge`.

    With one split partial is final. fixed: the splits of a token depend on its own position alone, given the same
    `splits` (DETERMINISTIC_SPLITS). new: does what `rope.gqa_write` does, too; one query token a row, not fixed.
    """
    tokens, heads, dim = query_THd.shape
    kv_heads, together = kv.key.shape[2], 1 if fixed or rows.rows_T is not None else rows.query
    assert new is None or (rows.query == 1 and not fixed), "new tokens: one query token a row, not fixed"
    group, width = heads // kv_heads, kv_heads * dim
    tiles = decode_tiles(together * group, dim, kv_heads * (tokens // together))
    partial = torch.empty(tokens, heads, splits, dim, dtype=query_THd.dtype, device=query_THd.device)
    lse = torch.empty(tokens, heads, splits, dtype=torch.float32, device=query_THd.device)
    grid = (kv_heads * triton.cdiv(together * group, tiles.rows), splits, tokens // together)
    own: tuple[object, ...] = (None,) * 9 + (0.0, 0, 0, 0)
    if new is not None:
        strides = new.key_TKd.stride(0), new.value_TKd.stride(0), width
        turn = new.write.write_T, new.write.cos_SC, new.write.sin_SC
        own = (new.key_TKd, new.value_TKd, kv.key, kv.value, *turn, *new.norms, *strides)
    _decode[grid](
        query_THd, *_described(kv, tiles.keys), rows.table_RL, rows.positions_T, rows.rows_T, rows.tree_mask_T,
        partial, lse,
        kv.key_scale, kv.value_scale, scale * LOG2E, heads, splits, *query_THd.stride()[:2], rows.table_RL.stride(0),
        *own,
        QUERY=rows.query, TOGETHER=together, GROUP=group, DIM=dim, M=tiles.rows, N=tiles.keys, FIXED=4 if fixed else 0,
        **tiles.options(query_THd),
    )  # fmt: skip
    return partial, lse


def _described(kv: KvPlanes, keys: int) -> list[TensorDescriptor]:
    """Descriptors of the tokens of keys and values; column head * d is where a key head begins."""
    heads, dim = kv.key.shape[2:]
    return [TensorDescriptor.from_tensor(plane.reshape(-1, heads * dim), [keys, dim]) for plane in kv[:2]]


@triton.jit(
    do_not_specialize=["tokens", "rows", "table_row"], do_not_specialize_on_alignment=["table", "positions", "starts"]
)
def _prefill(
    query, keys, values, key_plane, value_plane, paths, table, positions, starts, out, lse, key_scale, value_scale,
    scale, tokens, heads, rows, query_token, query_head, table_row,
    GROUP: constexpr, WIDTH: constexpr, DIM: constexpr, M: constexpr, N: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (b, h, i): the b-th block from the end of row i's query tokens, for head h; row `rows` is the padding
    after all rows.
    """
    wait_for_previous(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts + row)
    if row == rows:
        zero_tokens(out, begin, tokens, head, heads, DIM, M)
        return
    end = tl.load(starts + row + 1)
    block = begin + (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if block >= end:
        return
    lane, dim, key = block + tl.arange(0, M), tl.arange(0, DIM), tl.arange(0, N)
    token, real = lane.to(tl.int64), lane < end
    q = tl.load(query + token[:, None] * query_token + head * query_head + dim[None, :], mask=real[:, None], other=0.0)
    position = tl.load(positions + token, mask=real, other=0).to(tl.int32)
    last = tl.max(position)
    # every query token of the block sees at least as much as its first one
    plain = tl.load(positions + block).to(tl.int32) + 1
    q, strength = _scaled(q, scale, key_scale, M)
    pages = table + row.to(tl.int64) * table_row
    column = head // GROUP * DIM
    top, total, sums = empty_softmax(M, DIM)
    page = tl.load(pages).to(tl.int32)
    for MASKED in tl.static_range(2 if paths is None else 1):
        for start in range(plain // N * N if MASKED else 0, last + 1 if MASKED else plain // N * N, N):
            at = page * 64
            page = tl.load(pages + tl.minimum(start + N, last) // 64).to(tl.int32)
            scores = tl.dot(q, keys.load([at, column]).to(q.dtype).T)
            if MASKED:
                scores = tl.where((start + key)[None, :] <= position[:, None], scores, -float("inf"))
            top, total, sums = add_block(scores, values, at, column, q.dtype, strength, top, total, sums)
    if paths is not None:
        # after the first token each has keys of its own; a tile of which a token sees nothing leaves its sums as they
        # are
        for node in range(block, tl.minimum(block + M, end)):
            own = tl.load(positions + node).to(tl.int32)
            for start in range(plain // N * N, own + 1, N):
                at = (path_rows(paths, pages, node, own, start + key) * WIDTH)[:, None] + column + dim[None, :]
                scores = tl.dot(q, tl.load(key_plane + at).to(q.dtype).T)
                seen = (lane == node)[:, None] & (start + key <= own)[None, :]
                scores = tl.where(seen, scores, -float("inf"))
                value = tl.load(value_plane + at).to(q.dtype)
                top, total, sums = add_values(scores, value, strength, top, total, sums)
    store_states(out, lse, token * heads + head, real, value_scale, top, total, sums, DIM)


def prefill(query_THd: Tensor, kv: KvPlanes, rows: PagedRows, *, scale: float, lse_TH: Tensor | None = None) -> Tensor:
    """Causal attention of ragged rows to their pages, this step's keys among them: → [T, H, d], 0 for padding.

    With `rows.paths_TD` the tokens of a row are nodes of a tree, root first, at most a block of them; they share what
    is before the root. A token's result has the bits that it would have if its path were the whole row. lse_TH:
    receives the LSE, undefined for padding.
    """
    tokens, heads, dim = query_THd.shape
    tiles, count, kv_heads = prefill_tiles(dim), len(rows.starts_R1) - 1, kv.key.shape[2]
    out = torch.empty(tokens, heads, dim, dtype=query_THd.dtype, device=query_THd.device)
    planes = (None, None) if rows.paths_TD is None else kv[:2]
    _prefill[(triton.cdiv(rows.max_query, tiles.rows), heads, count + 1)](
        query_THd, *_described(kv, tiles.keys), *planes, rows.paths_TD, rows.table_RL, rows.positions_T,
        rows.starts_R1, out, lse_TH, kv.key_scale, kv.value_scale, scale * LOG2E, tokens, heads, count,
        *query_THd.stride()[:2], rows.table_RL.stride(0),
        GROUP=heads // kv_heads, WIDTH=kv_heads * dim, DIM=dim, M=tiles.rows, N=tiles.keys, **tiles.options(out),
    )  # fmt: skip
    return out


def gather(kv: KvPlanes, table_RL: Tensor, chunk: ContextChunk) -> tuple[Tensor, Tensor]:
    """`gather_rows` of keys and values: → bfloat16 views [tokens, K, d], undefined after the last row. K * d is a power
    of two.
    """
    kv_heads, dim = kv.key.shape[2:]
    width = kv_heads * dim
    out = gather_rows(kv, table_RL, chunk, (width, width, 0, width), max(4096 // width, 1), False)
    out = out.view(-1, 2 * kv_heads, dim)
    return out[:, :kv_heads], out[:, kv_heads:]
