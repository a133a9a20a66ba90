"""Rotary embedding, norms and the write into the cache in one launch, for latent attention and for grouped-query
attention.

Neighbouring pairs (2j, 2j+1) turn by the angle of the token's position, in float32. All of it is small: a token of
DeepSeek-V3 moves 33 KB (128 heads of 64 dims read and written, a latent of 576 written), so 128 tokens are 1.4 µs at
3.1 TB/s and a launch is the floor; what counts is that norm, rotation, quantisation and scatter are one kernel and not
seven.

Letters: T tokens, H query heads, K key heads, r latent rank, c rope dims, D = r + c, d head dim, S = pages * 64 rows of
a plane.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.launch import launch_options

E4M3_MAX = tl.constexpr(448.0)
BF16_MAX = tl.constexpr(3.3895313892515355e38)
MOST_AT_ONCE = 64  # tokens of one program of `mla_absorb`
HEADS_AT_ONCE = 16  # query heads of one program: of 64 dims, one 16-byte access for each of 128 threads


@triton.jit
def turned(x_NC, cos_P, sin_P, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Pairs of the last axis turned; float32 in, float32 out."""
    even, odd = tl.split(tl.reshape(x_NC, (ROWS, DIM // 2, 2)))
    turned = tl.join(even * cos_P[None, :] - odd * sin_P[None, :], odd * cos_P[None, :] + even * sin_P[None, :])
    return tl.reshape(turned, (ROWS, DIM))


@triton.jit
def stored(x, scale_pointer, SCALED: tl.constexpr, dtype: tl.constexpr):
    """What a plane holds: the value, or e4m3 of value / scale; saturated, and 0 for what is not a number. What a masked
    place holds is multiplied by 0, and a NaN of one request would reach the next that gets its page. What is only
    attended to may be bf16's largest number, since 0 times that is 0. A latent, which is multiplied before
    (`expand_latents`), is never near it: a norm gives at most sqrt(r) times its weight, and of what holds an infinity, or
    is so large that its squares overflow, NaN or 0.
    """
    x = tl.where(x == x, x, 0.0)
    if SCALED:
        x = tl.minimum(tl.maximum(x / tl.load(scale_pointer), -E4M3_MAX), E4M3_MAX)
    else:
        x = tl.minimum(tl.maximum(x, -BF16_MAX), BF16_MAX)
    return x.to(dtype)


@triton.jit
def _keep(
    latent, norm, cos, sin, positions, write, plane, scale, eps, token, latent_token, plane_row,
    RANK: tl.constexpr, ROPE: tl.constexpr, SCALED: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """One token's latent, normed, and its key, rotated, into its row of the plane."""
    pair, col, dim = tl.arange(0, ROPE // 2), tl.arange(0, ROPE), tl.arange(0, RANK)
    angle = tl.load(positions + token) * (ROPE // 2) + pair
    at = latent + token * latent_token
    normed = tl.load(at + dim).to(tl.float32)
    normed = normed * (1 / tl.sqrt(tl.sum(normed * normed) / RANK + eps)) * tl.load(norm + dim)
    key = tl.load(at + RANK + col).to(tl.float32)
    key = tl.reshape(turned(key[None, :], tl.load(cos + angle), tl.load(sin + angle), 1, ROPE), (ROPE,))
    if IN_PLACE:
        tl.store(at + dim, stored(normed, scale, False, latent.dtype.element_ty))
        tl.store(at + RANK + col, stored(key, scale, False, latent.dtype.element_ty))
    row = plane + tl.load(write + token) * plane_row
    tl.store(row + dim, stored(normed, scale, SCALED, plane.dtype.element_ty))
    tl.store(row + RANK + col, stored(key, scale, SCALED, plane.dtype.element_ty))


@triton.jit
def _turn(
    query, rotated, cos, sin, positions, token, block, heads, query_token, query_head, rotated_token, rotated_head,
    ROPE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One token's `block`-th HEADS queries, rotated."""
    pair, col, head = tl.arange(0, ROPE // 2), tl.arange(0, ROPE), block * HEADS + tl.arange(0, HEADS)
    angle = tl.load(positions + token) * (ROPE // 2) + pair
    real = (head < heads)[:, None]
    x = tl.load(query + token * query_token + head[:, None] * query_head + col[None, :], mask=real, other=0.0)
    x = turned(x.to(tl.float32), tl.load(cos + angle), tl.load(sin + angle), HEADS, ROPE)
    at = rotated + token * rotated_token + head[:, None] * rotated_head + col[None, :]
    tl.store(at, x.to(rotated.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize_on_alignment=["positions", "write"])
def _mla_write(
    query, rotated, latent, norm, cos, sin, positions, write, plane, scale, eps, heads,
    query_token, query_head, rotated_token, rotated_head, latent_token, plane_row,
    RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr,
    SCALED: tl.constexpr, IN_PLACE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, 0): latent and key of token t; (t, 1 + b): the b-th block of its query heads."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if block == 0:
        _keep(
            latent, norm, cos, sin, positions, write, plane, scale, eps, token, latent_token, plane_row,
            RANK, ROPE, SCALED, IN_PLACE,
        )  # fmt: skip
    else:
        _turn(
            query, rotated, cos, sin, positions, token, block - 1, heads, query_token, query_head, rotated_token,
            rotated_head, ROPE, HEADS,
        )  # fmt: skip


def mla_write(
    query_THc: Tensor,
    rotated_THc: Tensor,
    latent_TD: Tensor,
    norm_r: Tensor,
    cos_SC: Tensor,
    sin_SC: Tensor,
    positions_T: Tensor,
    write_T: Tensor,
    plane_SD: Tensor,
    *,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    in_place: bool = False,
) -> None:
    """Norms each token's latent, rotates its key and its queries, and stores latent and key in row write_T[t] of the
    plane.

    query_THc: the rope part of the queries, a view [T, H, c]; rotated_THc: the view that receives it, which may be the
    same memory; H may be 0. latent_TD: a view [T, r + c] of a projection's output, bfloat16; with `in_place` it
    receives what the plane does. norm_r: float32. cos_SC, sin_SC: float32 [context, c / 2]. positions_T, write_T:
    int64. plane_SD: [S, r + c], bfloat16, or e4m3 of value / scale with scale float32 [1]. The norm is x /
    sqrt(mean(x²) + eps) * weight (DeepSeek-V2's kv_a_layernorm, whose eps is 1e-6).
    """
    tokens, heads, rope = query_THc.shape
    rank = norm_r.shape[0]
    assert (plane_SD.dtype == torch.float8_e4m3fn) == (scale is not None), "e4m3 planes have a scale, no others"
    grid = (tokens, 1 + triton.cdiv(heads, HEADS_AT_ONCE))
    _mla_write[grid](
        query_THc, rotated_THc, latent_TD, norm_r, cos_SC, sin_SC, positions_T, write_T, plane_SD, scale, eps, heads,
        query_THc.stride(0), query_THc.stride(1), rotated_THc.stride(0), rotated_THc.stride(1), latent_TD.stride(0),
        plane_SD.stride(0), RANK=rank, ROPE=rope, HEADS=HEADS_AT_ONCE, SCALED=scale is not None, IN_PLACE=in_place,
        num_warps=4, **launch_options(latent_TD),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions", "write"])
def _mla_absorb(
    query, absorbed, latent, norm, cos, sin, positions, write, plane, uk, scale, eps, tokens, heads,
    query_token, query_head, absorbed_token, absorbed_head, latent_token, plane_row, uk_head, uk_nope,
    NOPE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, HEADS: tl.constexpr, M: tl.constexpr, COLUMNS: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """First the programs of `_mla_write`, token by token; then those that multiply: a head, a block of latent dims, M
    tokens each. The weights of these are on the way before the wait for the queries.
    """
    parts = 1 + tl.cdiv(heads, HEADS)
    program = tl.program_id(0)
    if program < tokens * parts:
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        token, block = (program // parts).to(tl.int64), program % parts
        if block == 0:
            _keep(
                latent, norm, cos, sin, positions, write, plane, scale, eps, token, latent_token, plane_row,
                RANK, ROPE, SCALED, False,
            )  # fmt: skip
        else:
            _turn(
                query + NOPE, absorbed + RANK, cos, sin, positions, token, block - 1, heads, query_token, query_head,
                absorbed_token, absorbed_head, ROPE, HEADS,
            )  # fmt: skip
    else:
        program -= tokens * parts
        head, column = (
            program // (RANK // COLUMNS) % heads,
            program % (RANK // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS),
        )
        lane, nope = program // (RANK // COLUMNS * heads) * M + tl.arange(0, M), tl.arange(0, NOPE)
        weights = tl.load(uk + head.to(tl.int64) * uk_head + nope[:, None] * uk_nope + column[None, :])
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        real = (lane < tokens)[:, None]
        at = lane.to(tl.int64)[:, None]
        x = tl.load(query + at * query_token + head * query_head + nope[None, :], mask=real, other=0.0)
        product = tl.dot(x, weights).to(absorbed.dtype.element_ty)
        tl.store(absorbed + at * absorbed_token + head * absorbed_head + column[None, :], product, mask=real)


def mla_absorb(
    query_THq: Tensor,
    uk_HnR: Tensor,
    latent_TD: Tensor,
    norm_r: Tensor,
    cos_SC: Tensor,
    sin_SC: Tensor,
    positions_T: Tensor,
    write_T: Tensor,
    plane_SD: Tensor,
    *,
    scale: Tensor | None = None,
    eps: float = 1e-6,
    fixed: bool = False,
) -> Tensor:
    """`mla_write` and the product of the queries with W_UK in one launch, for few tokens: → absorbed queries [T, H, r +
    c].

    query_THq: a view [T, H, n + c]. uk_HnR: bfloat16 [H, n, r], last stride 1. The rest as in `mla_write`. For up to
    some 64 tokens: every 16 (32, 64) of them read all weights again, from the second-level cache. fixed: the tiles do
    not depend on the number of tokens, so that a token's bits do not either.
    """
    tokens, heads, _ = query_THq.shape
    _, nope, rank = uk_HnR.shape
    rope = query_THq.shape[2] - nope
    assert (plane_SD.dtype == torch.float8_e4m3fn) == (scale is not None), "e4m3 planes have a scale, no others"
    absorbed = torch.empty(tokens, heads, rank + rope, dtype=query_THq.dtype, device=query_THq.device)
    columns = min(64 if heads <= 32 else 128, rank)
    at_once = MOST_AT_ONCE if fixed else min(max(triton.next_power_of_2(tokens), 16), MOST_AT_ONCE)
    programs = tokens * (1 + triton.cdiv(heads, HEADS_AT_ONCE)) + heads * rank // columns * triton.cdiv(tokens, at_once)
    _mla_absorb[(programs,)](
        query_THq, absorbed, latent_TD, norm_r, cos_SC, sin_SC, positions_T, write_T, plane_SD, uk_HnR, scale, eps, tokens, heads,
        query_THq.stride(0), query_THq.stride(1), absorbed.stride(0), absorbed.stride(1), latent_TD.stride(0), plane_SD.stride(0),
        uk_HnR.stride(0), uk_HnR.stride(1), NOPE=nope, RANK=rank, ROPE=rope, HEADS=HEADS_AT_ONCE, M=at_once, COLUMNS=columns,
        SCALED=scale is not None, num_warps=4, **launch_options(absorbed),
    )  # fmt: skip
    return absorbed


@triton.jit(do_not_specialize_on_alignment=["positions", "write"])
def _mha_write(
    query, wide, key, value, turning, cos, sin, positions, write, key_plane, value_plane, key_scale, value_scale, heads, queries,
    query_token, query_head, key_token, value_token, turning_token, key_row, value_row,
    NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, b): the b-th block of heads of token t."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    nope, turn, dim, pair = (
        tl.arange(0, NOPE)[None, :],
        tl.arange(0, ROPE)[None, :],
        tl.arange(0, V)[None, :],
        tl.arange(0, ROPE // 2),
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    angle = tl.load(positions + token) * (ROPE // 2) + pair
    cos_P, sin_P = tl.load(cos + angle), tl.load(sin + angle)
    asks, real, at = (head < queries)[:, None], (head < heads)[:, None], head[:, None]
    q = query + token * query_token + at * query_head
    q_turned = turned(tl.load(q + NOPE + turn, mask=asks, other=0.0).to(tl.float32), cos_P, sin_P, HEADS, ROPE)
    q_out = wide + (token * queries + at) * WIDE
    tl.store(q_out + nope, tl.load(q + nope, mask=asks, other=0.0), mask=asks)
    tl.store(q_out + NOPE + turn, q_turned.to(wide.dtype.element_ty), mask=asks)
    behind = tl.arange(0, WIDE)[None, :]
    tl.store(q_out + behind, tl.zeros((HEADS, WIDE), wide.dtype.element_ty), mask=asks & (behind >= NOPE + ROPE))
    own = tl.load(turning + token * turning_token + tl.arange(0, ROPE)).to(tl.float32)
    own = turned(own[None, :], cos_P, sin_P, 1, ROPE).to(key.dtype.element_ty).to(tl.float32)
    k = tl.load(key + token * key_token + at * NOPE + nope, mask=real, other=0.0).to(tl.float32)
    v = tl.load(value + token * value_token + at * V + dim, mask=real, other=0.0).to(tl.float32)
    row = tl.load(write + token)
    to_k, to_v = key_plane + row * key_row + at * WIDE, value_plane + row * value_row + at * WIDE
    kept = stored(own, key_scale, SCALED, key_plane.dtype.element_ty)
    tl.store(to_k + nope, stored(k, key_scale, SCALED, key_plane.dtype.element_ty), mask=real)
    tl.store(to_k + NOPE + turn, tl.broadcast_to(kept, (HEADS, ROPE)), mask=real)
    tl.store(to_v + dim, stored(v, value_scale, SCALED, value_plane.dtype.element_ty), mask=real)


def mha_write(
    query_THq: Tensor,
    key_THn: Tensor,
    value_THv: Tensor,
    turning_Tc: Tensor,
    cos_SC: Tensor,
    sin_SC: Tensor,
    positions_T: Tensor,
    write_T: Tensor,
    key_SHw: Tensor,
    value_SHw: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Stores decompressed keys and values in row write_T[t] of their planes, the one rotated key of a token behind each
    head's own: → the queries, rotated, [T, H, w].

    query_THq: a view [T, H, n + c], H may be 0. key_THn, value_THv: contiguous. turning_Tc: a view [T, c], the key that
    is yet to be rotated. Planes: [S, H, w], bfloat16, or e4m3 of value / scale with scales float32 [1]; what lies
    behind a key or value there is left as it is: 0.
    """
    tokens, heads, nope = key_THn.shape
    queries, rope, width = query_THq.shape[1], turning_Tc.shape[1], key_SHw.shape[2]
    wide = torch.empty(tokens, queries, width, dtype=query_THq.dtype, device=query_THq.device)
    at_once = min(8, triton.next_power_of_2(heads))
    _mha_write[(tokens, triton.cdiv(heads, at_once))](
        query_THq, wide, key_THn, value_THv, turning_Tc, cos_SC, sin_SC, positions_T, write_T, key_SHw, value_SHw,
        key_scale, value_scale, heads, queries, query_THq.stride(0), query_THq.stride(1), key_THn.stride(0), value_THv.stride(0),
        turning_Tc.stride(0), key_SHw.stride(0), value_SHw.stride(0), NOPE=nope, ROPE=rope, V=value_THv.shape[2], WIDE=width,
        HEADS=at_once, SCALED=key_scale is not None, num_warps=4, **launch_options(wide),
    )  # fmt: skip
    return wide


@triton.jit
def normed(x_ND, weight, eps, NORM: tl.constexpr, DIM: tl.constexpr):
    if NORM:
        x_ND = x_ND * (1 / tl.sqrt(tl.sum(x_ND * x_ND, 1) / DIM + eps))[:, None]
        x_ND *= tl.load(weight + tl.arange(0, DIM))[None, :]
    return x_ND


@triton.jit(do_not_specialize_on_alignment=["positions", "write"])
def _gqa_write(
    query, key, value, query_norm, key_norm, cos, sin, positions, write, key_plane, value_plane, key_scale, value_scale, eps,
    heads, kv_heads, query_token, key_token, value_token, key_row, value_row,
    DIM: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, 0): keys and values of token t; (t, 1 + b): the b-th block of its query heads."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair, col = tl.arange(0, DIM // 2), tl.arange(0, DIM)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    angle = tl.load(positions + token) * (DIM // 2) + pair
    cos_P, sin_P = tl.load(cos + angle), tl.load(sin + angle)
    if block == 0:
        row, kv_head = tl.load(write + token), tl.arange(0, KV_HEADS)
        at, held = kv_head[:, None] * DIM + col[None, :], (kv_head < kv_heads)[:, None]
        x_k = tl.load(key + token * key_token + at, mask=held, other=0.0).to(tl.float32)
        x_v = tl.load(value + token * value_token + at, mask=held, other=0.0).to(tl.float32)
        x_k = turned(normed(x_k, key_norm, eps, NORM, DIM), cos_P, sin_P, KV_HEADS, DIM)
        # back in place, too: an attention to the step's own tokens reads those of the next row beside the last of one,
        # and multiplies them by 0
        tl.store(key + token * key_token + at, stored(x_k, key_scale, False, key.dtype.element_ty), mask=held)
        tl.store(value + token * value_token + at, stored(x_v, value_scale, False, value.dtype.element_ty), mask=held)
        tl.store(key_plane + row * key_row + at, stored(x_k, key_scale, SCALED, key_plane.dtype.element_ty), mask=held)
        tl.store(
            value_plane + row * value_row + at,
            stored(x_v, value_scale, SCALED, value_plane.dtype.element_ty),
            mask=held,
        )
    else:
        head = (block - 1) * HEADS + tl.arange(0, HEADS)
        queries, real = query + token * query_token + head[:, None] * DIM + col[None, :], (head < heads)[:, None]
        x_q = tl.load(queries, mask=real, other=0.0).to(tl.float32)
        x_q = turned(normed(x_q, query_norm, eps, NORM, DIM), cos_P, sin_P, HEADS, DIM)
        tl.store(queries, x_q.to(query.dtype.element_ty), mask=real)


def gqa_write(
    query_THd: Tensor,
    key_TKd: Tensor,
    value_TKd: Tensor,
    cos_SC: Tensor,
    sin_SC: Tensor,
    positions_T: Tensor,
    write_T: Tensor,
    key_SKd: Tensor,
    value_SKd: Tensor,
    *,
    query_norm_d: Tensor | None = None,
    key_norm_d: Tensor | None = None,
    eps: float = 1e-6,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Norms (where there are weights) and rotates queries and keys in place, and stores keys and values in row
    write_T[t] of their planes; both are finite then, in place as in the planes.

    query, key, value: views of a projection's output, heads side by side; d is a power of two, all of it rotated.
    norms: float32 [d], both or none. key_SKd, value_SKd: planes [S, K, d], bfloat16, or e4m3 of value / scale with
    scales float32 [1].
    """
    tokens, heads, dim = query_THd.shape
    kv_heads, fp8 = key_TKd.shape[1], key_SKd.dtype == torch.float8_e4m3fn
    assert cos_SC.shape[1] * 2 == dim, f"all {dim} dims of a head turn, the table has {2 * cos_SC.shape[1]}"
    assert query_THd.stride(1) == key_TKd.stride(1) == value_TKd.stride(1) == dim, "heads lie side by side"
    assert (query_norm_d is None) == (key_norm_d is None), "queries and keys are both normed or neither"
    assert fp8 == (key_scale is not None) == (value_scale is not None), "e4m3 planes have scales, no others"
    at_once = min(2048 // dim, triton.next_power_of_2(heads))
    grid = (tokens, 1 + triton.cdiv(heads, at_once))
    _gqa_write[grid](
        query_THd, key_TKd, value_TKd, query_norm_d, key_norm_d, cos_SC, sin_SC, positions_T, write_T, key_SKd, value_SKd,
        key_scale, value_scale, eps, heads, kv_heads, query_THd.stride(0), key_TKd.stride(0), value_TKd.stride(0),
        key_SKd.stride(0), value_SKd.stride(0), DIM=dim, HEADS=at_once, KV_HEADS=triton.next_power_of_2(kv_heads),
        NORM=query_norm_d is not None, SCALED=fp8,
        num_warps=4, **launch_options(query_THd),
    )  # fmt: skip
