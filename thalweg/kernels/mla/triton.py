"""Latent attention on a GPU: absorbed split-KV decode over pages, its merges, and prefill on expanded latents.

Decode reads each latent once: of a tile of keys the first `rank` columns are also the values. Bytes are 1,152 a context
token and row in bfloat16, 576 in e4m3; work is 2 * H * (576 + 512) FLOPs. With up to 16 heads memory is the floor
(V2-Lite, batch 128 of 1,024 tokens: 151 MB, 49 µs at 3.1 TB/s), with 128 heads the tensor cores are (V3, the same
batch: 36 GFLOP, 46 µs at 800 TFLOP/s). Heads are the M of the products: 16 rows (mma) or 64 (wgmma; the sums are 64 x
512 floats, half of the registers of a multiprocessor, and queries and two tiles of 64 keys fill its shared memory: one
program each).

Prefill (Dk = 192, Dv = 128) costs 640 * H FLOPs for each pair of tokens and is bound by the tensor cores: 8,192 tokens
of 128 heads are 2.75 TFLOP with a causal mask, 3.4 ms at 800 TFLOP/s.

Letters: T query tokens, R rows, H heads, r latent rank, c rope dims, D = r + c, n nope dims, q = n + c, v value dims, P
pages of 64, S context tokens of ragged rows, L columns of the page table, s splits. LSE: log-sum-exp,
natural logarithm, float32; -inf where nothing was seen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from thalweg.core.kernels import LATENT_TILE
from thalweg.kernels.attend.args import ContextChunk, DecodeRows, LatentPlane, RaggedRows
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
    merge_splits,
    page_after,
    pages_of_split,
    path_rows,
    store_states,
    wait_for_previous,
    waves,
    zero_tokens,
)
from thalweg.kernels.launch import capability, launch_config

MERGE_UP_RANKS = LATENT_TILE  # latent dims of a step of `merge_up_many` and `up`


def decode_tiles(rows: int, is_fp8: bool, device: tuple[int, int] = (9, 0)) -> TileConfig:
    """rows: query tokens times heads that share a context. device: `launch.capability`. The tiles are an H100's, but
    where its largest do not fit.
    """
    if rows <= 16:
        return TileConfig(16, 64, 8, 4) if is_fp8 else TileConfig(16, 64, 4, 3)
    if rows <= 32:
        return TileConfig(32, 32, 8, 4)
    return TileConfig(64, 32 if device[0] == 10 else 64, 8, 2)  # a B200 stages its sums in shared memory


def prefill_tiles() -> TileConfig:
    return TileConfig(128, 64, 8, 3)


def splits_for(tokens: int, heads: int, context: int, query: int = 1) -> int:
    """The number of parts that `decode` cuts each context into. context: an upper bound of the longest, in tokens."""
    rows = query * heads
    return waves(tokens // query * -(-rows // decode_tiles(rows, False).rows), context)


@triton.jit
def load_columns(block, plane, place, column, width, DIM: constexpr):
    """Columns from `column` on of a tile of keys. place: the row of the first key, which the others follow, for the
    descriptor `block`; or the row of each, for `plane`, whose rows are `width` wide.
    """
    if plane is None:
        tile = block.load([place, column])
    else:
        tile = tl.load(plane + place[:, None] * width + column + tl.arange(0, DIM)[None, :])
    return tile


@triton.jit
def load_queries(at_q, real, plane_scale, scale, RANK: constexpr, ROPE: constexpr, M: constexpr):
    """M absorbed queries and the scale of their scores: → their latent part, their rotated part, float32 [M]. For
    latents in e4m3 float16, of at most 1.
    """
    q = tl.load(at_q + tl.arange(0, RANK)[None, :], mask=real[:, None], other=0.0)
    rope_q = tl.load(at_q + RANK + tl.arange(0, ROPE)[None, :], mask=real[:, None], other=0.0)
    strength = tl.full((M,), scale, tl.float32)
    if plane_scale is not None:
        largest = tl.maximum(largest_of(q), largest_of(rope_q))
        q = (q.to(tl.float32) / largest[:, None]).to(tl.float16)
        rope_q = (rope_q.to(tl.float32) / largest[:, None]).to(tl.float16)
        strength *= tl.load(plane_scale) * largest
    return q, rope_q, strength


@triton.jit(
    do_not_specialize=["splits", "table_row"],
    do_not_specialize_on_alignment=["table", "positions", "rows", "tree_mask"],
)
def _decode(
    query, latents, keys, plane, paths, table, positions, rows, tree_mask, out, lse, plane_scale, scale, heads, splits,
    query_token, query_head, table_row,
    QUERY: constexpr, TOGETHER: constexpr, RANK: constexpr, ROPE: constexpr,
    M: constexpr, N: constexpr, FIXED: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (b, s, u): split s of the context of TOGETHER query tokens from u * TOGETHER on, for the b-th block of
    their heads.
    """
    wait_for_previous(PDL)
    split, first_token = tl.program_id(1), tl.program_id(2) * TOGETHER
    row_pages, ahead = first_page(table, rows, first_token, table_row, split, QUERY)
    lane = tl.program_id(0) * M + tl.arange(0, M)
    token, head, real = (first_token + lane // heads).to(tl.int64), lane % heads, lane < TOGETHER * heads
    position = tl.load(positions + token, mask=real, other=0).to(tl.int32)
    token_mask = position if tree_mask is None else tl.load(tree_mask + token, mask=real, other=-1)
    first, step, count = pages_of_split(split, splits, tl.max(position) // 64 + 1, FIXED)
    at = (token * heads + head) * splits + split
    if count <= 0:
        tl.store(lse + at, tl.full((M,), -float("inf"), tl.float32), mask=real)
        return
    key = tl.arange(0, N)
    at_q = query + token[:, None] * query_token + head[:, None] * query_head
    q, rope_q, strength = load_queries(at_q, real, plane_scale, scale, RANK, ROPE, M)
    top, total, sums = empty_softmax(M, RANK)
    if FIXED:
        ahead = tl.load(row_pages + first).to(tl.int32)
    for tile in range(count * (64 // N)):
        page, ordinal = ahead, first + tile // (64 // N) * step
        ahead = page_after(row_pages, first, step, count, tile, 64 // N)
        if paths is None:
            place = page * 64 + tile * N % 64
        else:
            place = path_rows(paths, row_pages, first_token, tl.max(position), ordinal * 64 + tile * N % 64 + key)
        latent = load_columns(latents, plane, place, 0, RANK + ROPE, RANK).to(q.dtype)
        scores = tl.dot(q, latent.T)
        scores = tl.dot(rope_q, load_columns(keys, plane, place, RANK, RANK + ROPE, ROPE).to(q.dtype).T, scores)
        scores = mask_scores(scores, ordinal * 64 + tile * N % 64 + key, position, tree_mask, token_mask)
        top, total, sums = add_values(scores, latent, strength, top, total, sums)
    store_states(out, lse, at, real, plane_scale, top, total, sums, RANK)


def decode(
    query_THD: Tensor,
    latents: LatentPlane,
    rows: DecodeRows,
    *,
    scale: float,
    rank: int,
    splits: int,
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Absorbed queries over the pages of their rows: → (partial bfloat16 [T, H, splits, r], LSE [T, H, splits]), for
    `merge` or `merge_up`. With one split partial is final.

    query_THD: bfloat16, already multiplied by W_UK and rotated. fixed: the splits of a token depend on its own position
    alone, given the same `splits` (DETERMINISTIC_SPLITS). With `rows.paths_TD` keys have the same lanes of the same
    tiles as if a token's path were the whole row.
    """
    assert rows.paths_TD is None or (fixed and rows.tree_mask_T is None), "paths: fixed splits, and no tree mask"
    tokens, heads, dim = query_THD.shape
    together = 1 if fixed or rows.rows_T is not None else rows.query
    plane = latents.paged_PSD.view(-1, dim)
    tiles = decode_tiles(together * heads, latents.scale is not None, capability(query_THD))
    partial = torch.empty(tokens, heads, splits, rank, dtype=query_THD.dtype, device=query_THD.device)
    lse = torch.empty(tokens, heads, splits, dtype=torch.float32, device=query_THD.device)
    _decode[triton.cdiv(together * heads, tiles.rows), splits, tokens // together](
        query_THD, TensorDescriptor.from_tensor(plane, [tiles.keys, rank]),
        TensorDescriptor.from_tensor(plane, [tiles.keys, dim - rank]), None if rows.paths_TD is None else plane,
        rows.paths_TD,
        rows.table_RL, rows.positions_T, rows.rows_T, rows.tree_mask_T, partial, lse, latents.scale,
        scale * LOG2E, heads, splits, *query_THD.stride()[:2], rows.table_RL.stride(0),
        QUERY=rows.query, TOGETHER=together, RANK=rank, ROPE=dim - rank, M=tiles.rows, N=tiles.keys,
        FIXED=max(tiles.rows // 8, 4) if fixed else 0, **tiles.options(query_THD),
    )  # fmt: skip
    return partial, lse


@triton.jit(do_not_specialize=["splits"])
def _merge_up(
    partial, lse, up, out, heads, splits, width, up_head, up_rank, up_value,
    RANK: constexpr, V: constexpr, SPLITS: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (h, b, t): V columns of head h's values of token t. Loads its part of W_UV before the wait for
    `decode`.
    """
    head, value = tl.program_id(0), tl.program_id(1) * V + tl.arange(0, V)
    dim, real = tl.arange(0, RANK), value < width
    at = up + head.to(tl.int64) * up_head + dim[:, None] * up_rank + value[None, :] * up_value
    weights = tl.load(at, mask=real[None, :], other=0.0)
    wait_for_previous(PDL)
    pair = (tl.program_id(2) * heads + head).to(tl.int64)
    joined = merge_splits(partial, lse, pair, splits, RANK, SPLITS).to(out.dtype.element_ty).to(tl.float32)
    sums = tl.sum(joined[:, None] * weights.to(tl.float32), 0)
    tl.store(out + pair * width + value, sums.to(out.dtype.element_ty), mask=real)


def merge_up(partial: Tensor, lse_THs: Tensor, uv_HRv: Tensor) -> Tensor:
    """Merges the splits of `decode` and multiplies by W_UV in one launch: → [T, H * v]. Where `merges_up`.

    Every token reads all of W_UV again. uv_HRv: bfloat16, a view of any strides.
    """
    tokens, heads, splits, rank = partial.shape
    width, columns = uv_HRv.shape[2], 16 if heads <= 32 else 32
    out = torch.empty(tokens, heads * width, dtype=uv_HRv.dtype, device=partial.device)
    _merge_up[heads, triton.cdiv(width, columns), tokens](
        partial, lse_THs, uv_HRv, out, heads, splits, width, *uv_HRv.stride(),
        RANK=rank, V=columns, SPLITS=triton.next_power_of_2(splits), **launch_config(out, 8),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens", "splits"])
def _merge_up_many(
    partial, lse, up, out, tokens, heads, splits, width, token_row, head_row, up_head, up_rank, up_value,
    RANK: constexpr, V: constexpr, M: constexpr, K: constexpr, SPLITS: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (h, b, i): V columns of head h's values of the i-th M tokens. Splits are merged as the product reads
    them; without LSE there is one, whose rows have any strides.
    """
    head, value = tl.program_id(0).to(tl.int64), tl.program_id(1) * V + tl.arange(0, V)
    lane, dim, split = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, K), tl.arange(0, SPLITS)
    weights = up + head * up_head + dim[None, :] * up_rank + value[:, None] * up_value
    live, real = lane < tokens, value < width
    pair = lane.to(tl.int64) * heads + head
    wait_for_previous(PDL)
    if lse is not None:
        seen = live[:, None] & (split < splits)[None, :]
        own = tl.load(lse + pair[:, None] * splits + split[None, :], mask=seen, other=-float("inf"))
        top = tl.max(own, 1)
        share = tl.exp(own - tl.where(top == -float("inf"), 0.0, top)[:, None])
        share /= tl.maximum(tl.sum(share, 1), 1e-30)[:, None]
    product = tl.zeros((M, V), tl.float32)
    for first in range(0, RANK, K):
        w = tl.load(weights + first * up_rank, mask=real[:, None], other=0.0)
        if lse is None:
            at = partial + lane.to(tl.int64)[:, None] * token_row + head * head_row + first + dim[None, :]
            x = tl.load(at, mask=live[:, None], other=0.0)
        else:
            x = tl.zeros((M, K), tl.float32)
            for s in tl.static_range(SPLITS):
                mine = tl.sum(tl.where(split[None, :] == s, share, 0.0), 1)
                at = partial + (pair * splits + s)[:, None] * RANK + first + dim[None, :]
                x += tl.load(at, mask=(mine > 0.0)[:, None], other=0.0).to(tl.float32) * mine[:, None]
        product = tl.dot(x.to(out.dtype.element_ty), w.T, product)
    to = out + pair[:, None] * width + value[None, :]
    tl.store(to, product.to(out.dtype.element_ty), mask=live[:, None] & real[None, :])


def merges_up(tokens: int, heads: int, splits: int) -> bool:
    """Whether `merge_up` is faster than `merge` and a library's batched product. H200, us: 1 token of 16 heads in 2, 4
    and 32 splits 2.3, 4.5, 4.8 and 5.1, 5.4, 6.0; 4 tokens in 2 and 4 splits 4.6, 12.3 and 5.4, 5.5; 1 token of 128
    heads in 2 and 32 splits 6.5, 15.2 and 6.2, 7.2.
    """
    return tokens * heads <= (64 if splits <= 2 else 16)


def merges_many(tokens: int, heads: int, splits: int, rank: int) -> bool:
    """Whether `merge_up_many` serves and is faster than `merge` and a library's batched product. H200, 128 heads, us: 2
    tokens in 4 splits 7.9 and 7.0, 4 tokens 7.8 and 8.2, 32 tokens 9.2 and 28.0; 4 tokens in 8 splits 17.3 and 8.6.
    """
    return 2 < tokens <= 64 and 1 < splits <= 4 and heads >= 64 and rank % MERGE_UP_RANKS == 0


def merge_up_many(partial: Tensor, lse_THs: Tensor, uv_HRv: Tensor) -> Tensor:
    """`merge_up` for some dozen tokens, with tensor cores, so that W_UV is read once. Where `merges_many`."""
    columns = min(triton.next_power_of_2(uv_HRv.shape[2]), 128)
    return _product_up(partial, lse_THs, uv_HRv, columns, 32, launch_config(partial, 4, 3))


def up(u_THr: Tensor, uv_HRv: Tensor, *, overlap: bool = True) -> Tensor:
    """Sums of latents times W_UV: → [T, H * v].

    The tiles do not depend on the number of tokens, so that a token's bits do not either; where they may, a library's
    batched product is faster. uv_HRv: bfloat16, a view of any strides. overlap: whether it may start while the kernel
    before it ends. r is a multiple of MERGE_UP_RANKS.
    """
    options = launch_config(u_THr, 4, 4) if overlap else {"num_warps": 4, "num_stages": 4, "PDL": False}
    columns = min(triton.next_power_of_2(uv_HRv.shape[2]), 64)
    return _product_up(u_THr.unsqueeze(2), None, uv_HRv, columns, 64, options)


def _product_up(
    partial: Tensor, lse_THs: Tensor | None, uv_HRv: Tensor, columns: int, rows: int, options: dict[str, int | bool]
) -> Tensor:
    tokens, heads, splits, rank = partial.shape
    width = uv_HRv.shape[2]
    out = torch.empty(tokens, heads * width, dtype=uv_HRv.dtype, device=partial.device)
    _merge_up_many[heads, triton.cdiv(width, columns), triton.cdiv(tokens, rows)](
        partial, lse_THs, uv_HRv, out, tokens, heads, splits, width, *partial.stride()[:2], *uv_HRv.stride(),
        RANK=rank, V=columns, M=rows, K=MERGE_UP_RANKS, SPLITS=triton.next_power_of_2(splits), **options,
    )  # fmt: skip
    return out


def gather(latents: LatentPlane, table_RL: Tensor, chunk: ContextChunk, rank: int) -> Tensor:
    """`gather_rows` of latents: → bfloat16 [tokens, D], zero after the last row: padded products stay finite."""
    plane_PSD, scale = latents
    dim = plane_PSD.shape[2]
    return gather_rows((plane_PSD, plane_PSD, scale, scale), table_RL, chunk, (rank, dim - rank, rank, dim), 8, True)


@triton.jit(
    do_not_specialize=["tokens", "rows", "mask_row"], do_not_specialize_on_alignment=["query_starts", "context_starts"]
)
def _prefill(
    query, keys, rope_keys, values, query_starts, context_starts, out, lse, chosen, scale, tokens, heads, rows,
    query_token, query_head, key_head, value_head, mask_row,
    NOPE: constexpr, ROPE: constexpr, V: constexpr, M: constexpr, N: constexpr,
    CAUSAL: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (b, h, i): the b-th block from the end of row i's query tokens, for head h; row `rows` is the padding
    after all rows. The last blocks have the most to do, so they come first. chosen: what each query token attends to of
    what it sees; None is all.
    """
    wait_for_previous(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_starts + row)
    if row == rows:
        zero_tokens(out, begin, tokens, head, heads, V, M)
        return
    end = tl.load(query_starts + row + 1)
    context, context_end = tl.load(context_starts + row), tl.load(context_starts + row + 1)
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if block >= end - begin:
        return
    context_tokens = context_end - context
    lane, key = tl.arange(0, M), tl.arange(0, N)
    token, real = (begin + block + lane).to(tl.int64), begin + block + lane < end
    nope, rope = tl.arange(0, NOPE), tl.arange(0, ROPE)
    at = query + token[:, None] * query_token + head * query_head
    q = tl.load(at + nope[None, :], mask=real[:, None], other=0.0)
    rope_q = tl.load(at + NOPE + rope[None, :], mask=real[:, None], other=0.0)
    # the first context token that a query token does not see
    limit = tl.full((M,), 0, tl.int32) + context_tokens
    if CAUSAL:
        limit = tl.minimum(context_tokens - (end - begin) + block + lane + 1, context_tokens)
    plain = tl.maximum(tl.min(limit), 0) // N * N  # keys that every query token of the block sees
    strength = tl.full((M,), scale, tl.float32)
    top, total, sums = empty_softmax(M, V)
    for MASKED in tl.static_range(2):
        for start in range(plain if MASKED else 0, tl.max(limit) if MASKED else plain, N):
            scores = tl.dot(q, keys.load([context + start, head * key_head]).T)
            scores = tl.dot(rope_q, rope_keys.load([context + start, 0]).T, scores)
            if MASKED:
                scores = tl.where((start + key)[None, :] < limit[:, None], scores, -float("inf"))
            if chosen is not None:
                held = real[:, None] & (start + key < context_tokens)[None, :]
                is_chosen = tl.load(chosen + token[:, None] * mask_row + (start + key)[None, :], mask=held, other=0)
                scores = tl.where(is_chosen > 0, scores, -float("inf"))
            column = head * value_head
            top, total, sums = add_block(scores, values, context + start, column, q.dtype, strength, top, total, sums)
    store_states(out, lse, token * heads + head, real, None, top, total, sums, V)


def prefill(
    query_THq: Tensor,
    key_SHn: Tensor,
    rope_Sc: Tensor,
    value_SHv: Tensor,
    rows: RaggedRows,
    *,
    scale: float,
    out_THv: Tensor | None = None,
    chosen_TS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of ragged rows to expanded keys and values: → (out [T, H, v], LSE [T, H]).

    Keys and values are token-major views; rope_Sc is the rotated key that all heads share. A query that sees nothing
    gets 0 and -inf. Tokens after the last row are padding: their result is 0, and their LSE undefined. out_THv: a
    contiguous tensor for the result. chosen_TS: uint8, not 0 where a query token attends to a token of its row's
    context; it needs no room behind the longest context.
    """
    tokens, heads, _ = query_THq.shape
    nope, rope, width, count = key_SHn.shape[2], rope_Sc.shape[1], value_SHv.shape[2], len(rows.query_starts_R1) - 1
    tiles = prefill_tiles()
    out = query_THq.new_empty(tokens, heads, width) if out_THv is None else out_THv
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=query_THq.device)
    _prefill[triton.cdiv(rows.max_query, tiles.rows), heads, count + 1](
        query_THq, _described(key_SHn, tiles.keys), TensorDescriptor.from_tensor(rope_Sc, [tiles.keys, rope]),
        _described(value_SHv, tiles.keys), *rows[:2], out, lse, chosen_TS, scale * LOG2E, tokens, heads, count,
        *query_THq.stride()[:2], key_SHn.stride(1), value_SHv.stride(1),
        0 if chosen_TS is None else chosen_TS.stride(0),
        NOPE=nope, ROPE=rope, V=width, M=tiles.rows, N=tiles.keys, CAUSAL=rows.is_causal, **tiles.options(out),
    )  # fmt: skip
    return out, lse


def _described(x_SHd: Tensor, keys: int) -> TensorDescriptor:
    """A descriptor of rows of all heads' columns; column head * stride(1) is where a head begins."""
    tokens, heads, dim = x_SHd.shape
    width = (heads - 1) * x_SHd.stride(1) + dim
    return TensorDescriptor(x_SHd, [tokens, width], [x_SHd.stride(0), 1], [keys, dim])
