"""Rotary embedding, norms and the write into the KV cache in one launch, for latent and grouped-query attention.

Neighbouring pairs (2j, 2j+1) rotate by the angle of the token's position, in float32. A token of DeepSeek-V3 moves
33 KB (128 heads of 64 dims read and written, a latent of 576 written), so 128 tokens take 1.4 µs at 3.1 TB/s and a
launch is the floor: norm, rotation, quantization and scatter are one kernel instead of seven.

Letters: T tokens, H query heads, K key heads, r latent rank, c rope dims, D = r + c, d head dim, S = pages * 64 rows of
a plane.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.attend.args import KvPlanes, KvWrite, LatentPlane
from thalweg.kernels.attend.triton import wait_for_previous
from thalweg.kernels.launch import launch_config

E4M3_MAX = constexpr(448.0)
LARGEST = constexpr(2.0**126)  # as in `memory.records`
BF16_MAX = constexpr(3.3895313892515355e38)
MOST_AT_ONCE = 64  # tokens of one program of `mla_absorb`
HEADS_AT_ONCE = 16  # query heads of one program: of 64 dims, one 16-byte access for each of 128 threads


class QkNorms(NamedTuple):
    """RMS norms of queries and keys; both or none."""

    query_d: Tensor | None = None  # float32 [d]
    key_d: Tensor | None = None
    eps: float = 1e-6


class LatentNorm(NamedTuple):
    """x / sqrt(mean(x²) + eps) * weight; the eps of DeepSeek-V2's kv_a_layernorm is 1e-6."""

    weight_r: Tensor  # float32
    eps: float = 1e-6


@triton.jit
def rotated(x_NC, cos_P, sin_P, ROWS: constexpr, DIM: constexpr):
    """Rotates the pairs of the last axis; float32 in, float32 out."""
    even, odd = tl.split(tl.reshape(x_NC, (ROWS, DIM // 2, 2)))
    pairs = tl.join(even * cos_P[None, :] - odd * sin_P[None, :], odd * cos_P[None, :] + even * sin_P[None, :])
    return tl.reshape(pairs, (ROWS, DIM))


@triton.jit
def encode(x, scale, dtype: constexpr):
    """x as a plane stores it: the value, or e4m3 of value / scale unless that is None; saturated, NaN as 0.

    Attention multiplies masked values by 0, and a NaN of one request would reach the next owner of its page. What is
    only attended to may be bf16's largest number, since 0 times that is 0. A latent, which is multiplied first
    (`expand_latents`), is never near it: a norm gives at most sqrt(r) times its weight, and NaN or 0 for an infinity or
    numbers whose squares overflow.
    """
    x = tl.where(x == x, x, 0.0)
    if scale is not None:
        x = tl.minimum(tl.maximum(x / tl.load(scale), -E4M3_MAX), E4M3_MAX)
    else:
        x = tl.minimum(tl.maximum(x, -BF16_MAX), BF16_MAX)
    return x.to(dtype)


@triton.jit
def codes_of(x_ND):
    """Rows in e4m3 and the scale of each, as `memory.records.quantize`: a power of two, by the bits of the largest."""
    x_ND = tl.where(x_ND == x_ND, tl.minimum(tl.maximum(x_ND, -LARGEST), LARGEST), 0.0)
    largest = tl.maximum(tl.max(tl.abs(x_ND), 1), 1e-4)
    # 448 is 1.75 * 2^8: a fraction beyond .75 carries into the exponent
    exponent = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (x_ND * inverse[:, None]).to(tl.float8e4nv), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_record(at, x_r, key, RANK: constexpr, ROPE: constexpr):
    """Stores a latent and its rotated key as `memory.records.encode_record` lays them out. at: uint8."""
    tile: constexpr = min(RANK, 128)
    tiles: constexpr = RANK // tile
    codes, scales = codes_of(tl.reshape(x_r, (tiles, tile)))
    dims = tl.arange(0, tiles)[:, None] * tile + tl.arange(0, tile)[None, :]
    tl.store(at.to(tl.pointer_type(tl.float8e4nv)) + dims, codes)
    tl.store((at + RANK).to(tl.pointer_type(tl.float32)) + tl.arange(0, tiles), scales)
    to_key = (at + RANK + 4 * tiles).to(tl.pointer_type(tl.bfloat16))
    tl.store(to_key + tl.arange(0, ROPE), encode(key, None, tl.bfloat16))


@triton.jit
def normed(x_ND, weight, eps, DIM: constexpr):
    if weight is not None:
        x_ND = x_ND * (1 / tl.sqrt(tl.sum(x_ND * x_ND, 1) / DIM + eps))[:, None]
        x_ND *= tl.load(weight + tl.arange(0, DIM))[None, :]
    return x_ND


@triton.jit
def _store_token(
    query, out, latent, norm, cos, sin, positions, write, plane, scale, eps, token, block, heads,
    query_token, query_head, out_token, out_head, latent_token, plane_row,
    RANK: constexpr, ROPE: constexpr, HEADS: constexpr, IN_PLACE: constexpr,
):  # fmt: skip
    """Block 0: a token's latent, normed, and its key, rotated, into its row of the plane. Block 1 + b: its b-th HEADS
    queries, rotated.
    """
    col = tl.arange(0, ROPE)
    angle = tl.load(positions + token) * (ROPE // 2) + tl.arange(0, ROPE // 2)
    if block == 0:
        dim, at = tl.arange(0, RANK), latent + token * latent_token
        x_r = tl.load(at + dim).to(tl.float32)
        x_r = x_r * (1 / tl.sqrt(tl.sum(x_r * x_r) / RANK + eps)) * tl.load(norm + dim)
        key = tl.load(at + RANK + col).to(tl.float32)
        key = tl.reshape(rotated(key[None, :], tl.load(cos + angle), tl.load(sin + angle), 1, ROPE), (ROPE,))
        if IN_PLACE:
            tl.store(at + dim, encode(x_r, None, latent.dtype.element_ty))
            tl.store(at + RANK + col, encode(key, None, latent.dtype.element_ty))
        row = plane + tl.load(write + token) * plane_row
        if plane.dtype.element_ty == tl.uint8:
            store_record(row, x_r, key, RANK, ROPE)
        else:
            tl.store(row + dim, encode(x_r, scale, plane.dtype.element_ty))
            tl.store(row + RANK + col, encode(key, scale, plane.dtype.element_ty))
    else:
        head = (block - 1) * HEADS + tl.arange(0, HEADS)
        real = (head < heads)[:, None]
        x = tl.load(query + token * query_token + head[:, None] * query_head + col[None, :], mask=real, other=0.0)
        x = rotated(x.to(tl.float32), tl.load(cos + angle), tl.load(sin + angle), HEADS, ROPE)
        to = out + token * out_token + head[:, None] * out_head + col[None, :]
        tl.store(to, x.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize_on_alignment=["positions", "write"])
def _mla_write(
    query, out, latent, norm, cos, sin, positions, write, plane, scale, eps, heads,
    query_token, query_head, out_token, out_head, latent_token, plane_row,
    RANK: constexpr, ROPE: constexpr, HEADS: constexpr, IN_PLACE: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (t, b): block b of token t."""
    wait_for_previous(PDL)
    _store_token(
        query, out, latent, norm, cos, sin, positions, write, plane, scale, eps, tl.program_id(0).to(tl.int64),
        tl.program_id(1), heads, query_token, query_head, out_token, out_head, latent_token, plane_row,
        RANK, ROPE, HEADS, IN_PLACE,
    )  # fmt: skip


def mla_write(
    query_THc: Tensor,
    out_THc: Tensor,
    latent_TD: Tensor,
    norm: LatentNorm,
    write: KvWrite,
    latents: LatentPlane,
    *,
    in_place: bool = False,
) -> None:
    """Norms each token's latent, rotates its key and its queries, and stores latent and key in the plane.

    query_THc: the rope part of the queries, a view [T, H, c], H may be 0; out_THc: the view that receives it, maybe the
    same memory. latent_TD: a view [T, r + c] of a projection's output, bfloat16; with `in_place` it receives what the
    plane does.
    """
    (tokens, heads, rope), rows = query_THc.shape, _rows_of(latents)
    _mla_write[tokens, 1 + triton.cdiv(heads, HEADS_AT_ONCE)](
        query_THc, out_THc, latent_TD, norm.weight_r, *write, rows, latents.scale, norm.eps, heads,
        *query_THc.stride()[:2], *out_THc.stride()[:2], latent_TD.stride(0), rows.stride(0),
        RANK=len(norm.weight_r), ROPE=rope, HEADS=HEADS_AT_ONCE, IN_PLACE=in_place,
        **launch_config(latent_TD, 4),
    )  # fmt: skip


def _rows_of(latents: LatentPlane) -> Tensor:
    """The plane as [S, D]."""
    paged = latents.paged_PSD
    assert (paged.dtype == torch.float8_e4m3fn) == (latents.scale is not None), "e4m3 planes have a scale, no others"
    return paged.view(-1, paged.shape[-1])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions", "write"])
def _mla_absorb(
    query, absorbed, latent, norm, cos, sin, positions, write, plane, uk, scale, eps, tokens, heads,
    query_token, query_head, absorbed_token, absorbed_head, latent_token, plane_row, uk_head, uk_nope,
    NOPE: constexpr, RANK: constexpr, ROPE: constexpr, HEADS: constexpr, M: constexpr,
    COLUMNS: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """First the programs of `_mla_write`, token by token; then those that multiply: a head, a block of latent dims, M
    tokens each. They load their weights before the wait for the queries.
    """
    parts = 1 + tl.cdiv(heads, HEADS)
    program = tl.program_id(0)
    if program < tokens * parts:
        wait_for_previous(PDL)
        _store_token(
            query + NOPE, absorbed + RANK, latent, norm, cos, sin, positions, write, plane, scale, eps,
            (program // parts).to(tl.int64), program % parts, heads, query_token, query_head, absorbed_token,
            absorbed_head, latent_token, plane_row, RANK, ROPE, HEADS, False,
        )  # fmt: skip
    else:
        program -= tokens * parts
        blocks: constexpr = RANK // COLUMNS
        head, column = program // blocks % heads, program % blocks * COLUMNS + tl.arange(0, COLUMNS)
        lane, nope = program // (blocks * heads) * M + tl.arange(0, M), tl.arange(0, NOPE)
        weights = tl.load(uk + head.to(tl.int64) * uk_head + nope[:, None] * uk_nope + column[None, :])
        wait_for_previous(PDL)
        real = (lane < tokens)[:, None]
        at = lane.to(tl.int64)[:, None]
        x = tl.load(query + at * query_token + head * query_head + nope[None, :], mask=real, other=0.0)
        product = tl.dot(x, weights).to(absorbed.dtype.element_ty)
        tl.store(absorbed + at * absorbed_token + head * absorbed_head + column[None, :], product, mask=real)


def mla_absorb(
    query_THq: Tensor,
    uk_HnR: Tensor,
    latent_TD: Tensor,
    norm: LatentNorm,
    write: KvWrite,
    latents: LatentPlane,
    *,
    fixed: bool = False,
) -> Tensor:
    """`mla_write` and the product of the queries with W_UK in one launch: → absorbed queries [T, H, r + c].

    query_THq: a view [T, H, n + c]. uk_HnR: bfloat16 [H, n, r], last stride 1. For up to some 64 tokens: every 16 (32,
    64) of them read all weights again, from the second-level cache. fixed: the tiles do not depend on the number of
    tokens, so that a token's bits do not either.
    """
    (tokens, heads, width), (_, nope, rank), rows = query_THq.shape, uk_HnR.shape, _rows_of(latents)
    rope = width - nope
    absorbed = torch.empty(tokens, heads, rank + rope, dtype=query_THq.dtype, device=query_THq.device)
    columns = min(64 if heads <= 32 else 128, rank)
    at_once = MOST_AT_ONCE if fixed else min(max(triton.next_power_of_2(tokens), 16), MOST_AT_ONCE)
    programs = tokens * (1 + triton.cdiv(heads, HEADS_AT_ONCE)) + heads * rank // columns * triton.cdiv(tokens, at_once)
    _mla_absorb[(programs,)](
        query_THq, absorbed, latent_TD, norm.weight_r, *write, rows, uk_HnR, latents.scale, norm.eps, tokens, heads,
        *query_THq.stride()[:2], *absorbed.stride()[:2], latent_TD.stride(0), rows.stride(0), *uk_HnR.stride()[:2],
        NOPE=nope, RANK=rank, ROPE=rope, HEADS=HEADS_AT_ONCE, M=at_once, COLUMNS=columns, **launch_config(absorbed, 4),
    )  # fmt: skip
    return absorbed


@triton.jit(do_not_specialize_on_alignment=["positions", "write"])
def _mha_write(
    query, wide, key, value, rope_key, cos, sin, positions, write, key_plane, value_plane, key_scale, value_scale,
    heads, queries,
    query_token, query_head, key_token, value_token, rope_token, plane_row,
    NOPE: constexpr, ROPE: constexpr, V: constexpr, WIDE: constexpr, HEADS: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """Program (t, b): the b-th block of heads of token t."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    nope, turn, dim = tl.arange(0, NOPE)[None, :], tl.arange(0, ROPE)[None, :], tl.arange(0, V)[None, :]
    pair = tl.arange(0, ROPE // 2)
    wait_for_previous(PDL)
    angle = tl.load(positions + token) * (ROPE // 2) + pair
    cos_P, sin_P = tl.load(cos + angle), tl.load(sin + angle)
    asks, real, at = (head < queries)[:, None], (head < heads)[:, None], head[:, None]
    q = query + token * query_token + at * query_head
    rotated_q = rotated(tl.load(q + NOPE + turn, mask=asks, other=0.0).to(tl.float32), cos_P, sin_P, HEADS, ROPE)
    q_out = wide + (token * queries + at) * WIDE
    tl.store(q_out + nope, tl.load(q + nope, mask=asks, other=0.0), mask=asks)
    tl.store(q_out + NOPE + turn, rotated_q.to(wide.dtype.element_ty), mask=asks)
    behind = tl.arange(0, WIDE)[None, :]
    tl.store(q_out + behind, tl.zeros((HEADS, WIDE), wide.dtype.element_ty), mask=asks & (behind >= NOPE + ROPE))
    own = tl.load(rope_key + token * rope_token + tl.arange(0, ROPE)).to(tl.float32)
    own = rotated(own[None, :], cos_P, sin_P, 1, ROPE).to(key.dtype.element_ty).to(tl.float32)
    k = tl.load(key + token * key_token + at * NOPE + nope, mask=real, other=0.0).to(tl.float32)
    v = tl.load(value + token * value_token + at * V + dim, mask=real, other=0.0).to(tl.float32)
    row = tl.load(write + token)
    to_k, to_v = key_plane + row * plane_row + at * WIDE, value_plane + row * plane_row + at * WIDE
    shared = encode(own, key_scale, key_plane.dtype.element_ty)
    tl.store(to_k + nope, encode(k, key_scale, key_plane.dtype.element_ty), mask=real)
    tl.store(to_k + NOPE + turn, tl.broadcast_to(shared, (HEADS, ROPE)), mask=real)
    tl.store(to_v + dim, encode(v, value_scale, value_plane.dtype.element_ty), mask=real)


def mha_write(
    query_THq: Tensor, key_THn: Tensor, value_THv: Tensor, rope_Tc: Tensor, write: KvWrite, kv: KvPlanes
) -> Tensor:
    """Stores expanded keys and values, the one rotated key of a token after each head's own: → the queries, rotated,
    [T, H, w].

    query_THq: a view [T, H, n + c], H may be 0. key_THn, value_THv: contiguous. rope_Tc: a view [T, c], the key before
    its rotation. The planes' heads are w wide; what lies after a key or value there stays 0.
    """
    tokens, heads, nope = key_THn.shape
    queries, rope, width, row = query_THq.shape[1], rope_Tc.shape[1], kv.key.shape[-1], kv.key.stride(-3)
    wide = torch.empty(tokens, queries, width, dtype=query_THq.dtype, device=query_THq.device)
    at_once = min(8, triton.next_power_of_2(heads))
    _mha_write[tokens, triton.cdiv(heads, at_once)](
        query_THq, wide, key_THn, value_THv, rope_Tc, *write, *kv, heads, queries, *query_THq.stride()[:2],
        key_THn.stride(0), value_THv.stride(0), rope_Tc.stride(0), row,
        NOPE=nope, ROPE=rope, V=value_THv.shape[2], WIDE=width, HEADS=at_once, **launch_config(wide, 4),
    )  # fmt: skip
    return wide


@triton.jit(do_not_specialize_on_alignment=["positions", "write"])
def _gqa_write(
    query, key, value, query_norm, key_norm, cos, sin, positions, write, key_plane, value_plane, key_scale,
    value_scale, eps,
    heads, kv_heads, query_token, key_token, value_token, plane_row,
    DIM: constexpr, HEADS: constexpr, KV_HEADS: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (t, 0): keys and values of token t; (t, 1 + b): the b-th block of its query heads."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, col = tl.arange(0, DIM // 2), tl.arange(0, DIM)
    wait_for_previous(PDL)
    angle = tl.load(positions + token) * (DIM // 2) + pair
    cos_P, sin_P = tl.load(cos + angle), tl.load(sin + angle)
    if block == 0:
        row, kv_head = tl.load(write + token), tl.arange(0, KV_HEADS)
        at, real = kv_head[:, None] * DIM + col[None, :], (kv_head < kv_heads)[:, None]
        k_at = key + token * key_token + at
        x_k = tl.load(k_at, mask=real, other=0.0).to(tl.float32)
        v_at = value + token * value_token + at
        x_v = tl.load(v_at, mask=real, other=0.0).to(tl.float32)
        x_k = rotated(normed(x_k, key_norm, eps, DIM), cos_P, sin_P, KV_HEADS, DIM)
        # back in place, too: an attention to the step's own tokens reads those of the next row beside the last of one,
        # and multiplies them by 0
        tl.store(k_at, encode(x_k, None, key.dtype.element_ty), mask=real)
        tl.store(v_at, encode(x_v, None, value.dtype.element_ty), mask=real)
        tl.store(key_plane + row * plane_row + at, encode(x_k, key_scale, key_plane.dtype.element_ty), mask=real)
        v_to = value_plane + row * plane_row + at
        tl.store(v_to, encode(x_v, value_scale, value_plane.dtype.element_ty), mask=real)
    else:
        head = (block - 1) * HEADS + tl.arange(0, HEADS)
        queries, asks = query + token * query_token + head[:, None] * DIM + col[None, :], (head < heads)[:, None]
        x_q = tl.load(queries, mask=asks, other=0.0).to(tl.float32)
        x_q = rotated(normed(x_q, query_norm, eps, DIM), cos_P, sin_P, HEADS, DIM)
        tl.store(queries, x_q.to(query.dtype.element_ty), mask=asks)


def gqa_write(
    query_THd: Tensor, key_TKd: Tensor, value_TKd: Tensor, norms: QkNorms, write: KvWrite, kv: KvPlanes
) -> None:
    """Norms (where there are weights) and rotates queries and keys in place, and stores keys and values. Both are
    finite then, in place as in the planes.

    query, key, value: views of a projection's output, heads side by side; d is a power of two, all of it rotated.
    """
    (tokens, heads, dim), kv_heads, row = query_THd.shape, key_TKd.shape[1], kv.key.stride(-3)
    assert write.cos_SC.shape[1] * 2 == dim, (
        f"all {dim} dims of a head rotate, the table has {2 * write.cos_SC.shape[1]}"
    )
    assert query_THd.stride(1) == key_TKd.stride(1) == value_TKd.stride(1) == dim, "heads lie side by side"
    assert (norms.query_d is None) == (norms.key_d is None), "queries and keys are both normed or neither"
    assert (kv.key.dtype == torch.float8_e4m3fn) == kv.is_fp8, "e4m3 planes have scales, no others"
    at_once = min(2048 // dim, triton.next_power_of_2(heads))
    _gqa_write[tokens, 1 + triton.cdiv(heads, at_once)](
        query_THd, key_TKd, value_TKd, *norms[:2], *write, *kv, norms.eps, heads, kv_heads,
        query_THd.stride(0), key_TKd.stride(0), value_TKd.stride(0), row,
        DIM=dim, HEADS=at_once, KV_HEADS=triton.next_power_of_2(kv_heads), **launch_config(query_THd, 4),
    )  # fmt: skip
