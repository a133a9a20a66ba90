"""Grouped-query attention over pages on a GPU: split-KV decode and causal prefill of ragged rows.

Decode: the query heads of a key head (times the query tokens of its row) are the M of the products, so each key and
value is read once: 4 * d bytes a context token and key head in bfloat16, half in e4m3, against 4 * d * group FLOPs.
Memory is the floor (Qwen2.5-7B, 256 rows of 1,024 tokens: 537 MB, 173 µs at 3.1 TB/s). Prefill: 4 * d FLOPs for each
pair of tokens and query head; 8,192 tokens of 28 heads of 128 dims are 481 GFLOP with a causal mask, 0.6 ms at 800
TFLOP/s. A tile is 64 query tokens by one page, so that two programs fit a multiprocessor and one multiplies while the
other exponentiates.

Letters: T query tokens, R rows, H query heads, K key heads, d head dim, P pages of 64, L columns of the page table, s
splits. LSE: natural logarithm, float32; -inf where nothing was seen.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from thalweg.kernels.attend.triton import (
    DETERMINISTIC_SPLITS,
    LOG2E,
    SMS,
    TileConfig,
    cleared,
    is_seen,
    largest_of,
    merge,
    places,
    share_of,
    waves,
    weigh,
)
from thalweg.kernels.launch import launch_options
from thalweg.kernels.rope.triton import normed, stored, turned

__all__ = [
    "DETERMINISTIC_SPLITS",
    "NewTokens",
    "decode",
    "decode_tiles",
    "gather",
    "merge",
    "prefill",
    "prefill_tiles",
    "splits_for",
]

LN2 = tl.constexpr(0.6931471805599453)


def decode_tiles(rows: int, dim: int, programs: int = 1) -> TileConfig:
    """rows: query tokens times query heads that share a key head. programs: of the whole step with one split. Three
    that share a multiprocessor read more steadily than one with a longer pipeline (H100, Qwen2.5-7B, 256 rows of 1,024
    tokens: 185 us against 190; 64 rows: 50 against 51).
    """
    stages = 2 if programs > SMS else 4 if dim <= 128 else 3
    if rows <= 16:
        return TileConfig(16, 64, 4, stages)
    if rows <= 32:
        return TileConfig(32, 64, 4, stages)
    return TileConfig(64, 64, 4, stages)


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
    key, value, key_plane, value_plane, write, cos, sin, query_norm, key_norm, eps, key_token, value_token, key_row, value_row,
    QUERY: tl.constexpr, TOGETHER: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, FIXED: tl.constexpr, FRESH: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (k * blocks + b, s, u): split s of the context of TOGETHER query tokens from u * TOGETHER on, for key
    head k and block b of the rows that those tokens and the GROUP query heads of k make. FRESH: queries and the token's
    key are still to be normed and rotated, and the split that has the token's page writes its key and value, and starts
    from them instead of reading them.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (TOGETHER * GROUP + M - 1) // M
    kv_head, split, first_token = tl.program_id(0) // BLOCKS, tl.program_id(1), tl.program_id(2) * TOGETHER
    row = (first_token // QUERY if rows is None else tl.load(rows + first_token)).to(tl.int64)
    row_pages = table + row * table_row
    ahead = tl.load(row_pages + tl.minimum(split, table_row - 1)).to(tl.int32)  # the first page, unless FIXED
    lane = tl.program_id(0) % BLOCKS * M + tl.arange(0, M)
    token, head = (first_token + lane // GROUP).to(tl.int64), kv_head * GROUP + lane % GROUP
    real = lane < TOGETHER * GROUP
    position = tl.load(positions + token, mask=real, other=0).to(tl.int32)
    if tree_mask is not None:
        token_mask = tl.load(tree_mask + token, mask=real, other=-1)
    first, step, count = share_of(split, splits, tl.max(position) // 64 + 1, FIXED)
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
        turned_q = turned(normed(q.to(tl.float32), query_norm, eps, NORM, DIM), cos_P, sin_P, M, DIM)
        q = turned_q.to(query.dtype.element_ty)
    strength = tl.full((M,), scale, tl.float32)
    if SCALED:
        largest = largest_of(q)
        q = (q.to(tl.float32) / largest[:, None]).to(tl.float16)
        strength *= tl.load(key_scale) * largest
    top, total = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, DIM), tl.float32)
    if FRESH:
        if tl.max(position) // 64 % splits == split:
            own, column = first_token.to(tl.int64), kv_head * DIM + dim[None, :]
            own_k = normed(tl.load(key + own * key_token + column).to(tl.float32), key_norm, eps, NORM, DIM)
            own_k = stored(turned(own_k, cos_P, sin_P, 1, DIM), key_scale, SCALED, key_plane.dtype.element_ty)
            own_v = tl.load(value + own * value_token + column).to(tl.float32)
            own_v = stored(own_v, value_scale, SCALED, value_plane.dtype.element_ty)
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
        # the page's number is always fetched one tile ahead, so that the loop never waits for it
        following = tl.minimum((tile + 1) // (64 // N), count - 1)
        ahead = tl.load(row_pages + first + following * step).to(tl.int32)
        start = page * 64 + tile * N % 64
        scores = tl.dot(q, keys.load([start, kv_head * DIM]).to(q.dtype).T)
        seen = (ordinal * 64 + tile * N % 64 + lane_key)[None, :] <= position[:, None]
        if tree_mask is not None:
            seen &= is_seen(token_mask, position[:, None] - (ordinal * 64 + tile * N % 64 + lane_key)[None, :])
        weights, factor, top = weigh(tl.where(seen, scores, -float("inf")), strength, top)
        total = total * factor + tl.sum(weights, 1)
        sums = tl.dot(weights.to(q.dtype), values.load([start, kv_head * DIM]).to(q.dtype), sums * factor[:, None])
    some = total > 0.0
    sums *= (1.0 / tl.where(some, total, 1.0))[:, None]
    if SCALED:
        sums *= tl.load(value_scale)
    tl.store(lse + at, tl.where(some, top * LN2 + tl.log(total), -float("inf")), mask=real)
    tl.store(out + at[:, None] * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=real[:, None])


class NewTokens(NamedTuple):
    """What `decode` stores first. key_TKd, value_TKd: views of a projection's output, neither normed nor rotated, and
    so are the queries then. write_T int64: rows of the planes. cos_SC, sin_SC: float32 [context, d / 2]. norms float32
    [d], both or none.
    """

    key_TKd: Tensor
    value_TKd: Tensor
    write_T: Tensor
    cos_SC: Tensor
    sin_SC: Tensor
    query_norm_d: Tensor | None
    key_norm_d: Tensor | None
    eps: float


def decode(
    query_THd: Tensor,
    key_PSKd: Tensor,
    value_PSKd: Tensor,
    table_RL: Tensor,
    positions_T: Tensor,
    *,
    scale: float,
    splits: int,
    query: int = 1,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    rows_T: Tensor | None = None,
    tree_mask_T: Tensor | None = None,
    fixed: bool = False,
    fresh: NewTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """Queries over the pages of their rows: → (partial [T, H, splits, d], LSE [T, H, splits]), for `merge`.

    The row of token t is t // query, or rows_T[t] (int32), and its context positions 0 … positions_T[t]. Planes: [P,
    64, K, d] bfloat16, or e4m3 with scales float32 [1]. partial is bfloat16; with one split it is final. fixed: the
    splits of a token depend on its own position alone, given the same `splits` (DETERMINISTIC_SPLITS). tree_mask_T
    int64: of drafts that branch, what each token sees (`batch.TreeMask`); positions are columns then. fresh: does what
    `rope.gqa_write` does, too; one query token a row, not fixed.
    """
    tokens, heads, dim = query_THd.shape
    kv_heads, together = key_PSKd.shape[2], 1 if fixed or rows_T is not None else query
    assert fresh is None or (query == 1 and not fixed), "fresh: one query token a row, not fixed"
    group, width = heads // kv_heads, kv_heads * dim
    tiles = decode_tiles(together * group, dim, kv_heads * (tokens // together))
    partial = torch.empty(tokens, heads, splits, dim, dtype=query_THd.dtype, device=query_THd.device)
    lse = torch.empty(tokens, heads, splits, dtype=torch.float32, device=query_THd.device)
    grid = (kv_heads * triton.cdiv(together * group, tiles.rows), splits, tokens // together)
    own: tuple[object, ...] = (None,) * 9 + (0.0, 0, 0, 0, 0)
    if fresh is not None:
        strides = fresh.key_TKd.stride(0), fresh.value_TKd.stride(0), width, width
        own = (fresh.key_TKd, fresh.value_TKd, key_PSKd, value_PSKd, *fresh[2:], *strides)
    _decode[grid](
        query_THd, _paged(key_PSKd, tiles.keys), _paged(value_PSKd, tiles.keys), table_RL, positions_T, rows_T, tree_mask_T, partial, lse,
        key_scale, value_scale, scale * LOG2E, heads, splits, query_THd.stride(0), query_THd.stride(1), table_RL.stride(0), *own,
        QUERY=query, TOGETHER=together, GROUP=group, DIM=dim, M=tiles.rows, N=tiles.keys, FIXED=4 if fixed else 0, FRESH=fresh is not None,
        NORM=fresh is not None and fresh.query_norm_d is not None, SCALED=key_scale is not None,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers, **launch_options(query_THd),
    )  # fmt: skip
    return partial, lse


def _paged(plane_PSKd: Tensor, keys: int) -> TensorDescriptor:
    """A descriptor of a plane's tokens; column head * d is where a key head begins."""
    dim = plane_PSKd.shape[3]
    return TensorDescriptor.from_tensor(plane_PSKd.reshape(-1, plane_PSKd.shape[2] * dim), [keys, dim])


@triton.jit(
    do_not_specialize=["tokens", "rows", "table_row"], do_not_specialize_on_alignment=["table", "positions", "starts"]
)
def _prefill(
    query, keys, values, key_plane, value_plane, paths, table, positions, starts, out, key_scale, value_scale, scale, tokens, heads, rows,
    query_token, query_head, table_row,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, h, i): the b-th block from the end of row i's query tokens, for head h; row `rows` is the padding
    behind all rows.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, row = tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts + row)
    if row == rows:
        cleared(out, begin, tokens, head, heads, DIM, M)
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
    top, total = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    sums = tl.zeros((M, DIM), tl.float32)
    page = tl.load(pages).to(tl.int32)
    for start in range(0, plain // N * N, N):
        at = page * 64
        page = tl.load(pages + tl.minimum(start + N, last) // 64).to(tl.int32)
        scores = tl.dot(q, keys.load([at, column]).to(q.dtype).T)
        weights, factor, top = weigh(scores, strength, top)
        total = total * factor + tl.sum(weights, 1)
        sums = tl.dot(weights.to(q.dtype), values.load([at, column]).to(q.dtype), sums * factor[:, None])
    if paths is None:
        for start in range(plain // N * N, last + 1, N):
            at = page * 64
            page = tl.load(pages + tl.minimum(start + N, last) // 64).to(tl.int32)
            scores = tl.dot(q, keys.load([at, column]).to(q.dtype).T)
            scores = tl.where((start + key)[None, :] <= position[:, None], scores, -float("inf"))
            weights, factor, top = weigh(scores, strength, top)
            total = total * factor + tl.sum(weights, 1)
            sums = tl.dot(weights.to(q.dtype), values.load([at, column]).to(q.dtype), sums * factor[:, None])
    else:
        # behind the first token each has keys of its own; a tile of which a token sees nothing leaves its sums as they
        # are
        for node in range(block, tl.minimum(block + M, end)):
            own = tl.load(positions + node).to(tl.int32)
            for start in range(plain // N * N, own + 1, N):
                at = (places(paths, pages, node, own, start + key) * WIDTH)[:, None] + column + dim[None, :]
                scores = tl.dot(q, tl.load(key_plane + at).to(q.dtype).T)
                seen = (lane == node)[:, None] & (start + key <= own)[None, :]
                weights, factor, top = weigh(tl.where(seen, scores, -float("inf")), strength, top)
                total = total * factor + tl.sum(weights, 1)
                sums = tl.dot(weights.to(q.dtype), tl.load(value_plane + at).to(q.dtype), sums * factor[:, None])
    sums *= (1.0 / total)[:, None]
    if SCALED:
        sums *= tl.load(value_scale)
    pair = token * heads + head
    tl.store(out + pair[:, None] * DIM + dim[None, :], sums.to(out.dtype.element_ty), mask=real[:, None])


def prefill(
    query_THd: Tensor,
    key_PSKd: Tensor,
    value_PSKd: Tensor,
    table_RL: Tensor,
    positions_T: Tensor,
    starts_R1: Tensor,
    *,
    max_query: int,
    scale: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    paths_TD: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged rows to their pages, this step's keys among them: → [T, H, d].

    Row i's query tokens are starts[i] … starts[i + 1], at consecutive positions; starts: int32 [R + 1]. max_query: an
    upper bound of a row's query tokens. Tokens behind starts[R] are padding: their result is 0. Planes: [P, 64, K, d]
    bfloat16, or e4m3 with scales float32 [1]. paths_TD: as of `mla.triton.decode`, of rows whose tokens are nodes of a
    tree, its root first, and no more than a block has: they share what is before the root. A token's result is then
    what it would be if its path stood alone, bit for bit.
    """
    tokens, heads, dim = query_THd.shape
    tiles, rows = prefill_tiles(dim), len(starts_R1) - 1
    out = torch.empty(tokens, heads, dim, dtype=query_THd.dtype, device=query_THd.device)
    planes = (None, None) if paths_TD is None else (key_PSKd, value_PSKd)
    _prefill[(triton.cdiv(max_query, tiles.rows), heads, rows + 1)](
        query_THd, _paged(key_PSKd, tiles.keys), _paged(value_PSKd, tiles.keys), *planes, paths_TD, table_RL, positions_T, starts_R1, out,
        key_scale, value_scale, scale * LOG2E, tokens, heads, rows, query_THd.stride(0), query_THd.stride(1), table_RL.stride(0),
        GROUP=heads // key_PSKd.shape[2], WIDTH=key_PSKd.shape[2] * dim, DIM=dim, M=tiles.rows, N=tiles.keys, SCALED=key_scale is not None,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers, **launch_options(out),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table", "starts", "firsts"])
def _gather(
    keys, values, table, starts, firsts, out, key_scale, value_scale, table_row,
    WIDTH: tl.constexpr, N: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, i): N tokens of row i."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
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


def gather(
    key_PSKd: Tensor,
    value_PSKd: Tensor,
    table_RL: Tensor,
    starts_R1: Tensor,
    first_R: Tensor,
    tokens: int,
    *,
    max_context: int,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cached keys and values of ragged rows, side by side: → bfloat16 views [tokens, K, d]; row i's lie from starts[i]
    to starts[i + 1] and are its context positions from first[i] on. Beyond the last row the result is undefined.

    starts_R1, first_R: int32. max_context: an upper bound of a row's part. K * d is a power of two. e4m3 planes are
    multiplied by their scales.
    """
    kv_heads, dim = key_PSKd.shape[2:]
    dtype = torch.bfloat16 if key_scale is not None else key_PSKd.dtype
    out = torch.empty(tokens, 2 * kv_heads, dim, dtype=dtype, device=key_PSKd.device)
    at_once = max(4096 // (kv_heads * dim), 1)
    _gather[(triton.cdiv(max_context, at_once), len(starts_R1) - 1)](
        key_PSKd, value_PSKd, table_RL, starts_R1, first_R, out, key_scale, value_scale, table_RL.stride(0),
        WIDTH=kv_heads * dim, N=at_once, SCALED=key_scale is not None, num_warps=4, **launch_options(out),
    )  # fmt: skip
    return out[:, :kv_heads], out[:, kv_heads:]
