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
from triton.tools.tensor_descriptor import TensorDescriptor

from thalweg.kernels.attend.args import ContextChunk, DecodeRows, KvPlanes, KvWrite, PagedRows
from thalweg.kernels.attend.triton import (
    LOG2E,
    SMS,
    TileConfig,
    add_block,
    empty_softmax,
    first_page,
    largest_of,
    lse_of,
    mask_scores,
    mean_of,
    page_after,
    pages_of_split,
    path_rows,
    wait_for_previous,
    waves,
    weigh,
    zero_tokens,
)
from thalweg.kernels.launch import launch_options
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
    """How many parts `decode` cuts each context into. context: an upper bound of the longest, in tokens."""
    rows = query * heads // kv_heads
    programs = tokens // query * kv_heads * -(-rows // decode_tiles(rows, 128).rows)
    return waves(programs, context)


@triton.jit(
    do_not_specialize=["splits", "table_row"],
    do_not_specialize_on_alignment=["table", "positions", "rows", "tree_mask", "write"],
)
def _decode(
    query, keys, values, table, positions, rows, tree_mask, out, lse, key_scale, value_scale, scale, heads, splits,
    query_token, query_head, table_row,
    key, value, key_plane, value_plane, write, cos, sin, query_norm, key_norm, eps, key_token, value_token, key_row,
    value_row,
    QUERY: tl.constexpr, TOGETHER: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
    FIXED: tl.constexpr, FRESH: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (k * blocks + b, s, u): split s of the context of TOGETHER query tokens from u * TOGETHER on, for key
    head k and block b of the rows that those tokens and the GROUP query heads of k make.

    FRESH: queries and the token's key are neither normed nor rotated. The split that has the token's page stores its
    key and value, and starts from them instead of reading them.
    """
    wait_for_previous(PDL)
    BLOCKS: tl.constexpr = (TOGETHER * GROUP + M - 1) // M
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
    if FRESH:
        angle = tl.load(positions + first_token) * (DIM // 2) + tl.arange(0, DIM // 2)
        cos_P, sin_P = tl.load(cos + angle), tl.load(sin + angle)
        rotated_q = rotated(normed(q.to(tl.float32), query_norm, eps, NORM, DIM), cos_P, sin_P, M, DIM)
        q = rotated_q.to(query.dtype.element_ty)
    strength = tl.full((M,), scale, tl.float32)
    if SCALED:
        largest = largest_of(q)
        q = (q.to(tl.float32) / largest[:, None]).to(tl.float16)
        strength *= tl.load(key_scale) * largest
    top, total, sums = empty_softmax(M, DIM)
    if FRESH:
        if tl.max(position) // 64 % splits == split:
            own, column = first_token.to(tl.int64), kv_head * DIM + dim[None, :]
            own_k = normed(tl.load(key + own * key_token + column).to(tl.float32), key_norm, eps, NORM, DIM)
            own_k = encode(rotated(own_k, cos_P, sin_P, 1, DIM), key_scale, SCALED, key_plane.dtype.element_ty)
            own_v = tl.load(value + own * value_token + column).to(tl.float32)
            own_v = encode(own_v, value_scale, SCALED, value_plane.dtype.element_ty)
            top = tl.sum(q.to(tl.float32) * own_k.to(tl.float32), 1) * strength
            total += 1.0
            sums += own_v.to(tl.float32)
            if tl.program_id(0) % BLOCKS == 0:
                to = tl.load(write + first_token)
                tl.store(key_plane + to * key_row + column, own_k)
                tl.store(value_plane + to * value_row + column, own_v)
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
    sums = mean_of(total, sums)
    if SCALED:
        sums *= tl.load(value_scale)
    tl.store(lse + at, lse_of(top, total), mask=real)
    tl.store(out + at[:, None] * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=real[:, None])


class NewTokens(NamedTuple):
    """What `decode` stores first. The queries are then neither normed nor rotated."""

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
    own: tuple[object, ...] = (None,) * 9 + (0.0, 0, 0, 0, 0)
    if new is not None:
        strides = new.key_TKd.stride(0), new.value_TKd.stride(0), width, width
        turn = new.write.write_T, new.write.cos_SC, new.write.sin_SC
        own = (new.key_TKd, new.value_TKd, kv.key, kv.value, *turn, *new.norms, *strides)
    _decode[grid](
        query_THd, *_described(kv, tiles.keys), rows.table_RL, rows.positions_T, rows.rows_T, rows.tree_mask_T,
        partial, lse,
        kv.key_scale, kv.value_scale, scale * LOG2E, heads, splits, *query_THd.stride()[:2], rows.table_RL.stride(0),
        *own,
        QUERY=rows.query, TOGETHER=together, GROUP=group, DIM=dim, M=tiles.rows, N=tiles.keys, FIXED=4 if fixed else 0,
        FRESH=new is not None, NORM=new is not None and new.norms.query_d is not None, SCALED=kv.is_fp8,
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
    scale,
    tokens, heads, rows, query_token, query_head, table_row,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
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
    strength = tl.full((M,), scale, tl.float32)
    if SCALED:
        largest = largest_of(q)
        q = (q.to(tl.float32) / largest[:, None]).to(tl.float16)
        strength *= tl.load(key_scale) * largest
    pages = table + row.to(tl.int64) * table_row
    column = head // GROUP * DIM
    top, total, sums = empty_softmax(M, DIM)
    page = tl.load(pages).to(tl.int32)
    for start in range(0, plain // N * N, N):
        at = page * 64
        page = tl.load(pages + tl.minimum(start + N, last) // 64).to(tl.int32)
        scores = tl.dot(q, keys.load([at, column]).to(q.dtype).T)
        top, total, sums = add_block(scores, values, at, column, q.dtype, strength, top, total, sums)
    if paths is None:
        for start in range(plain // N * N, last + 1, N):
            at = page * 64
            page = tl.load(pages + tl.minimum(start + N, last) // 64).to(tl.int32)
            scores = tl.dot(q, keys.load([at, column]).to(q.dtype).T)
            scores = tl.where((start + key)[None, :] <= position[:, None], scores, -float("inf"))
            top, total, sums = add_block(scores, values, at, column, q.dtype, strength, top, total, sums)
    else:
        # after the first token each has keys of its own; a tile of which a token sees nothing leaves its sums as they
        # are
        for node in range(block, tl.minimum(block + M, end)):
            own = tl.load(positions + node).to(tl.int32)
            for start in range(plain // N * N, own + 1, N):
                at = (path_rows(paths, pages, node, own, start + key) * WIDTH)[:, None] + column + dim[None, :]
                scores = tl.dot(q, tl.load(key_plane + at).to(q.dtype).T)
                seen = (lane == node)[:, None] & (start + key <= own)[None, :]
                scores = tl.where(seen, scores, -float("inf"))
                weights, factor, top = weigh(scores, strength, top)
                total = total * factor + tl.sum(weights, 1)
                sums = tl.dot(weights.to(q.dtype), tl.load(value_plane + at).to(q.dtype), sums * factor[:, None])
    sums = sums * (1.0 / total)[:, None] if lse is None else mean_of(total, sums)
    if SCALED:
        sums *= tl.load(value_scale)
    pair = token * heads + head
    if lse is not None:
        tl.store(lse + pair, lse_of(top, total), mask=real)
    tl.store(out + pair[:, None] * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=real[:, None])


def prefill(query_THd: Tensor, kv: KvPlanes, rows: PagedRows, *, scale: float) -> Tensor:
    """Causal attention of ragged rows to their pages, this step's keys among them: → [T, H, d], 0 for padding.

    With `rows.paths_TD` the tokens of a row are nodes of a tree, root first, at most a block of them; they share what
    is before the root. A token's result has the bits that it would have if its path were the whole row.
    """
    return _launch_prefill(query_THd, kv, rows, scale, None)


def prefill_with_lse(query_THd: Tensor, kv: KvPlanes, rows: PagedRows, *, scale: float) -> tuple[Tensor, Tensor]:
    """`prefill`, with the LSE of each token and head, undefined for padding: → ([T, H, d], [T, H])."""
    lse = torch.empty(query_THd.shape[:2], dtype=torch.float32, device=query_THd.device)
    return _launch_prefill(query_THd, kv, rows, scale, lse), lse


def _launch_prefill(query_THd: Tensor, kv: KvPlanes, rows: PagedRows, scale: float, lse: Tensor | None) -> Tensor:
    tokens, heads, dim = query_THd.shape
    tiles, count, kv_heads = prefill_tiles(dim), len(rows.starts_R1) - 1, kv.key.shape[2]
    out = torch.empty(tokens, heads, dim, dtype=query_THd.dtype, device=query_THd.device)
    planes = (None, None) if rows.paths_TD is None else kv[:2]
    _prefill[(triton.cdiv(rows.max_query, tiles.rows), heads, count + 1)](
        query_THd, *_described(kv, tiles.keys), *planes, rows.paths_TD, rows.table_RL, rows.positions_T,
        rows.starts_R1, out, lse,
        kv.key_scale, kv.value_scale, scale * LOG2E, tokens, heads, count, *query_THd.stride()[:2],
        rows.table_RL.stride(0),
        GROUP=heads // kv_heads, WIDTH=kv_heads * dim, DIM=dim, M=tiles.rows, N=tiles.keys, SCALED=kv.is_fp8,
        **tiles.options(out),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table", "starts", "firsts"])
def _gather(
    keys, values, table, starts, firsts, out, key_scale, value_scale, table_row,
    WIDTH: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, i): N tokens of row i."""
    wait_for_previous(PDL)
    row, column = tl.program_id(1), tl.arange(0, WIDTH)[None, :]
    token = tl.load(starts + row) + tl.program_id(0) * N + tl.arange(0, N)
    real = token < tl.load(starts + row + 1)
    position = tl.load(firsts + row) + tl.program_id(0) * N + tl.arange(0, N)
    page = tl.load(table + row.to(tl.int64) * table_row + position // 64, mask=real, other=0).to(tl.int64)
    source = (page * 64 + position % 64)[:, None] * WIDTH + column
    target = out + token.to(tl.int64)[:, None] * (2 * WIDTH) + column
    key = tl.load(keys + source, mask=real[:, None], other=0.0)
    value = tl.load(values + source, mask=real[:, None], other=0.0)
    if SCALED:
        key, value = key.to(tl.float32) * tl.load(key_scale), value.to(tl.float32) * tl.load(value_scale)
    tl.store(target, key.to(out.dtype.element_ty), mask=real[:, None])
    tl.store(target + WIDTH, value.to(out.dtype.element_ty), mask=real[:, None])


def gather(kv: KvPlanes, table_RL: Tensor, chunk: ContextChunk) -> tuple[Tensor, Tensor]:
    """Cached keys and values of ragged rows, contiguous and dequantized: → bfloat16 views [tokens, K, d], undefined
    after the last row. K * d is a power of two.
    """
    kv_heads, dim = kv.key.shape[2:]
    dtype = torch.bfloat16 if kv.is_fp8 else kv.key.dtype
    out = torch.empty(chunk.tokens, 2 * kv_heads, dim, dtype=dtype, device=kv.key.device)
    at_once = max(4096 // (kv_heads * dim), 1)
    _gather[(triton.cdiv(chunk.max_tokens, at_once), len(chunk.starts_R1) - 1)](
        *kv[:2], table_RL, chunk.starts_R1, chunk.first_R, out, *kv[2:], table_RL.stride(0),
        WIDTH=kv_heads * dim, N=at_once, SCALED=kv.is_fp8, num_warps=4, **launch_options(out),
    )  # fmt: skip
    return out[:, :kv_heads], out[:, kv_heads:]
