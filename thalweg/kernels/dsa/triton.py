"""DSA over pages (DeepSeek-V3.2 report §2.1): the indexer scores every context token of a query, the `topk` highest
are chosen, and latent attention reads those alone. All lengths are on the device.

Index keys and queries are of the model's type, or e4m3 with a power of two as scale of each: keys in pages of 64 keys
and then their 64 float32 scales, queries with their scale in the weights of the heads. Latents are of the model's type,
or records of FlashMLA's FP8 cache (`memory.records`).

Floors for one query token behind S context tokens, index keys of 128 dims: the scores read 256 S bytes, in e4m3 132 S,
the choice 4 S, attention 1,152 * topk (2.4 MB of 2,048 tokens), in records 656 * topk. For many query tokens of one
context the scores are bound by the tensor cores: 2 * 64 * 128 FLOPs a pair.

Letters: T query tokens, H heads of the indexer or of attention, d index dims, S context tokens, K chosen tokens, L
columns of the page table, r latent rank, D latent and rope dims, s splits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.attend.args import KvWrite, LatentPlane, QueryRows
from thalweg.kernels.attend.triton import (
    LOG2E,
    TileConfig,
    add_values,
    empty_softmax,
    path_rows,
    store_states,
    wait_for_previous,
    waves,
)
from thalweg.kernels.launch import SMS, launch_config
from thalweg.kernels.mla.triton import load_queries
from thalweg.kernels.rope.triton import codes_of, encode, rotated

CHUNK = 8  # pages whose scores one program computes, of the longest context
AT_ONCE = 4096  # scores that one program of a choice compares, in registers; of short contexts twice as many
QUERIES_AT_ONCE = 8  # index heads that one program rotates


class KeyNorm(NamedTuple):
    """A layer norm of the index keys."""

    weight_d: Tensor  # float32
    bias_d: Tensor
    eps: float


@triton.jit
def _turned(x_ND, ROWS: constexpr, DIM: constexpr, STEPS: constexpr):
    """Each row times the Hadamard matrix and DIM^-1/2. Each of log2(DIM) steps transforms the last bit of the index and
    makes it the first.
    """
    for _ in tl.static_range(STEPS):
        even, odd = tl.split(tl.reshape(x_ND, (ROWS, DIM // 2, 2)))
        x_ND = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (ROWS, DIM))
    return x_ND * (1 / tl.sqrt(tl.full((), DIM, tl.float32)))


@triton.jit(do_not_specialize_on_alignment=["positions", "write"])
def _write(
    key, query, weight, bias, cos, sin, positions, write, plane, out, head_weights, eps, scale, heads, key_token,
    query_token,
    DIM: constexpr, ROPE: constexpr, HEADS: constexpr, FP8: constexpr, STEPS: constexpr, SPLITS: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """Program (t, 0): the key of token t; (t, 1 + b): the b-th HEADS of its index queries. STEPS: of `_turned`, or
    0. SPLITS: of the weights of the heads, whose sum the first receives.
    """
    wait_for_previous(PDL)
    token, dim, pair = tl.program_id(0).to(tl.int64), tl.arange(0, DIM), tl.arange(0, DIM // 2)
    angle, turns = tl.load(positions + token) * (ROPE // 2) + pair, pair < ROPE // 2
    cos_P, sin_P = tl.load(cos + angle, mask=turns, other=1.0), tl.load(sin + angle, mask=turns, other=0.0)
    if tl.program_id(1) == 0:
        x, place = tl.load(key + token * key_token + dim).to(tl.float32), tl.load(write + token)
        x -= tl.sum(x) / DIM
        x = x * (1 / tl.sqrt(tl.sum(x * x) / DIM + eps)) * tl.load(weight + dim) + tl.load(bias + dim)
        x = rotated(x.to(key.dtype.element_ty).to(tl.float32)[None, :], cos_P, sin_P, 1, DIM)
        x = x.to(key.dtype.element_ty).to(tl.float32)
        if FP8:
            if STEPS > 0:
                x = _turned(x, 1, DIM, STEPS)
            codes, key_scale = codes_of(x)
            page, slot = plane + place // 64 * (64 * (DIM + 4)), place % 64
            tl.store(page.to(tl.pointer_type(tl.float8e4nv)) + slot * DIM + dim[None, :], codes)
            tl.store((page + 64 * DIM).to(tl.pointer_type(tl.float32)) + slot + tl.arange(0, 1), key_scale)
        else:
            tl.store(plane + place * DIM + dim[None, :], encode(x, None, plane.dtype.element_ty))
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        at_q, real = query + token * query_token + head[:, None] * DIM + dim[None, :], (head < heads)[:, None]
        used = real if FP8 else real & (dim < ROPE)[None, :]
        q = rotated(tl.load(at_q, mask=used, other=0.0).to(tl.float32), cos_P, sin_P, HEADS, DIM)
        at_w, live = head_weights + token * heads + head, head < heads
        head_weight = tl.zeros([HEADS], tl.float32)
        for split in tl.static_range(SPLITS):
            head_weight += tl.load(at_w + split * tl.num_programs(0) * heads, mask=live, other=0.0)
        head_weight *= scale
        if FP8:
            q = q.to(query.dtype.element_ty).to(tl.float32)
            if STEPS > 0:
                q = _turned(q, HEADS, DIM, STEPS)
            q_codes, q_scale = codes_of(q)
            tl.store(out + (token * heads + head[:, None]) * DIM + dim[None, :], q_codes, mask=real)
            head_weight *= q_scale
        else:
            tl.store(at_q, q.to(query.dtype.element_ty), mask=used)
        tl.store(at_w, head_weight, mask=live)


def write(
    key_Td: Tensor,
    query_TX: Tensor,
    weights_STH: Tensor | None,
    norm: KeyNorm,
    write: KvWrite,
    keys_PSd: Tensor,
    scale: float,
    hadamard: bool = False,
) -> Tensor:
    """Norms, rotates and stores each token's index key, and rotates its index queries: → the queries as `scores`
    reads them. The first dims rotate. The first of the parts of the weights of the heads receives their sum times
    `scale`.

    key_Td: a view of a projection's output. query_TX: the queries of all index heads, likewise; X may be 0. keys_PSd:
    the plane of index keys: of the model's type [P, 64, d], and queries rotate in place; or e4m3 with scales, uint8
    [P, 64, d + 4], and queries are rounded to e4m3, each with a scale, which goes into its weight. weights_STH: of the
    heads, float32, contiguous, in parts; may be None without queries. hadamard: rounded keys and queries are turned
    first.
    """
    (tokens, dim), is_fp8 = key_Td.shape, keys_PSd.dtype == torch.uint8
    heads = query_TX.shape[1] // dim
    out = query_TX.new_empty(query_TX.shape, dtype=torch.float8_e4m3fn) if is_fp8 else query_TX
    head_weights, splits = (norm.weight_d, 0) if weights_STH is None else (weights_STH, len(weights_STH))
    _write[tokens, 1 + triton.cdiv(heads, QUERIES_AT_ONCE)](
        key_Td, query_TX, norm.weight_d, norm.bias_d, *write, keys_PSd, out, head_weights, norm.eps, scale, heads,
        key_Td.stride(0), query_TX.stride(0), DIM=dim, ROPE=2 * write.cos_SC.shape[1], HEADS=QUERIES_AT_ONCE,
        FP8=is_fp8, STEPS=dim.bit_length() - 1 if hadamard else 0, SPLITS=splits, **launch_config(key_Td, 4),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["columns", "table_row"], do_not_specialize_on_alignment=["table", "positions", "rows"])
def _scores(
    query, weights, plane, rows, table, positions, paths, out, heads, columns, query_token, table_row,
    DIM: constexpr, HEADS: constexpr, FP8: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (t, p): the scores of every P-th page of token t's context from the p-th on, so that all programs have
    some of a short one. Those past its position are left as they are.
    """
    wait_for_previous(PDL)
    token, head, key = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS), tl.arange(0, 64)
    position = tl.load(positions + token).to(tl.int32)
    first, last = tl.program_id(1), position // 64 + 1
    if first < last:
        dim, real = tl.arange(0, DIM), head < heads
        q = tl.load(query + token * query_token + head[:, None] * DIM + dim[None, :], mask=real[:, None], other=0.0)
        weight = tl.load(weights + token * heads + head, mask=real, other=0.0)
        row_pages = table + tl.load(rows + token).to(tl.int64) * table_row
        for page in range(first, last, tl.num_programs(1)):
            column = page * 64 + key
            if paths is None:
                block, slot = tl.load(row_pages + page).to(tl.int64), key
            else:
                place = path_rows(paths, row_pages, token, position, column)
                block, slot = place // 64, place % 64
            if FP8:
                at = block * (64 * (DIM + 4)) + slot * DIM
                k = tl.load(plane.to(tl.pointer_type(tl.float8e4nv)) + at[:, None] + dim[None, :])
                at_scale = block * (16 * (DIM + 4)) + 16 * DIM + slot
                products = tl.dot(q, k.T) * tl.load(plane.to(tl.pointer_type(tl.float32)) + at_scale)[None, :]
            else:
                k = tl.load(plane + (block * 64 + slot)[:, None] * DIM + dim[None, :]).to(q.dtype)
                products = tl.dot(q, k.T, input_precision="ieee")
            score = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
            tl.store(out + token * columns + column, score, mask=column <= position)


def scores(query_TX: Tensor, weights_TH: Tensor, keys_PSd: Tensor, rows: QueryRows, max_kv_len: int) -> Tensor:
    """Σ_h weight[t, h] * relu(query[t, h] · key[s]) of every context token: → float32 [T, S], S whole pages;
    undefined past a token's own position.

    query_TX: as `write` has made them, the heads of a token side by side. weights_TH: likewise; float32, contiguous.
    """
    (tokens, heads), is_fp8 = weights_TH.shape, keys_PSd.dtype == torch.uint8
    pages, dim = triton.cdiv(max_kv_len, 64), query_TX.shape[1] // heads
    out = torch.empty(tokens, pages * 64, dtype=torch.float32, device=query_TX.device)
    _scores[tokens, triton.cdiv(pages, CHUNK)](
        query_TX, weights_TH, keys_PSd, *rows, out, heads, pages * 64, query_TX.stride(0),
        rows.table_RL.stride(0), DIM=dim, HEADS=max(triton.next_power_of_2(heads), 16), FP8=is_fp8,
        **launch_config(out, 4, 2),
    )  # fmt: skip
    return out


@triton.jit
def _ordered(x):
    """uint32 above 0 in the order of these float32 numbers, where -0 is 0, and NaN beyond the infinite."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.maximum((bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True), 1)


@triton.jit
def _load(scores, token, columns, at, last, other, ALIGN: constexpr):
    """A token's scores at positions from a multiple of ALIGN on, as its row's first is; `other` past `last`."""
    row = scores + tl.multiple_of(token * columns, ALIGN)
    return tl.where(at <= last, tl.load(row + at, mask=at < (last // ALIGN + 1) * ALIGN, other=0.0), other)


@triton.jit
def _border(number, seen, least, most):
    """(border, count): what `count` numbers of the `seen` that are not 0 reach, from `least` to `most`, or more if that
    many are equal. Found bit by bit, by counting, from the first bit on in which numbers differ.
    """
    highest = tl.max(number)
    differ, bit = highest ^ tl.min(tl.where(number > 0, number, highest)), tl.full((), 0x80000000, tl.uint32)
    while bit > differ:
        bit = bit >> 1
    border, count = tl.where(bit > 0, highest ^ (highest & (bit | (bit - 1))), highest), seen
    while (bit > 0) & (count > most):
        above = tl.sum((number >= (border | bit)).to(tl.int32))
        border, count = tl.where(above >= least, border | bit, border), tl.where(above >= least, above, count)
        bit = bit >> 1
    return border, count


@triton.jit
def _put_highest(score, column, to, K: constexpr, BLOCK: constexpr):
    """Stores those of BLOCK positions, -1 for none, that have the K highest scores, then -1 up to the K-th."""
    chosen, lane = (column >= 0).to(tl.int32), tl.arange(0, BLOCK)
    seen = tl.sum(chosen)
    if seen > K:
        number = tl.where(column >= 0, _ordered(score), 0)
        border, count = _border(number, seen, K, K)
        chosen = (number >= border).to(tl.int32)
        if count > K:  # of equal numbers at the border, the last ones are left out
            equal = (number == border).to(tl.int32)
            chosen -= equal * (tl.cumsum(equal, 0) > tl.sum(equal) - count + K).to(tl.int32)
        seen = K
    tl.store(to + tl.cumsum(chosen, 0) - chosen, column, mask=chosen > 0)
    tl.store(to + lane, tl.full((BLOCK,), -1, tl.int32), mask=(lane >= seen) & (lane < K))


@triton.jit(do_not_specialize=["columns"], do_not_specialize_on_alignment=["positions"])
def _highest_of_groups(
    scores, positions, highest, columns, BLOCK: constexpr, ALIGN: constexpr, GROUPS: constexpr, PDL: constexpr
):  # fmt: skip
    """Program (t, p): the highest score in each of the p-th GROUPS groups of token t, into `highest` [T, BLOCK],
    where it sees more than BLOCK. A group has a position of each BLOCK, 37 pages further on, since texts repeat.
    """
    wait_for_previous(PDL)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    last = tl.load(positions + token).to(tl.int32)
    if last >= BLOCK:
        most = tl.full((GROUPS,), float("-inf"), tl.float32)
        for start in tl.range(0, last + 1, BLOCK, loop_unroll_factor=4):  # four loads wait for memory together
            at = start + (group // 64 + start // BLOCK * 37) % (BLOCK // 64) * 64 + group % 64
            most = tl.maximum(most, _load(scores, token, columns, at, last, float("-inf"), ALIGN))
        tl.store(highest + token * BLOCK + group, most)


@triton.jit(do_not_specialize=["columns"], do_not_specialize_on_alignment=["positions"])
def _choose_or_bound(
    scores, positions, highest, bounds, out, columns, K: constexpr, BLOCK: constexpr, ALIGN: constexpr, PDL: constexpr
):  # fmt: skip
    """Program t: where token t sees BLOCK positions at most, their K highest go into `out`. Else a score is stored that
    K groups reach, so no lower one is among the K highest. An eighth more groups may reach it.
    """
    wait_for_previous(PDL)
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    last = tl.load(positions + token).to(tl.int32)
    if last < BLOCK:
        score = _load(scores, token, columns, lane, last, 0.0, ALIGN)
        _put_highest(score, tl.where(lane <= last, lane, -1), out + token * K, K, BLOCK)
    else:
        score = tl.load(highest + token * BLOCK + lane)
        number = _ordered(score)
        border, count = _border(number, last * 0 + BLOCK, K, K + K // 8)
        tl.store(bounds + token, tl.min(tl.where(number >= border, score, float("inf"))))


@triton.jit(do_not_specialize=["columns", "parts"], do_not_specialize_on_alignment=["positions"])
def _keep_above(
    scores, positions, bounds, found, counts, columns, parts, BLOCK: constexpr, ALIGN: constexpr, PDL: constexpr
):  # fmt: skip
    """Program (t, p): the candidates among the p-th BLOCK positions of token t, into `found` [T, P, BLOCK] as places
    among these, and their number into `counts` [T, P]; likewise of each further part that no program begins with.
    """
    wait_for_previous(PDL)
    token, part, lane = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    last = tl.load(positions + token).to(tl.int32)
    if last >= BLOCK:
        bound = tl.load(bounds + token)
        while part * BLOCK <= last:
            at, to = part * BLOCK + lane, token * parts + part
            score = _load(scores, token, columns, at, last, 0.0, ALIGN)
            kept = tl.where((score < bound) | (at > last), 0, 1)  # NaN is kept
            tl.store(found + to * BLOCK + tl.cumsum(kept, 0) - kept, lane.to(found.dtype.element_ty), mask=kept > 0)
            tl.store(counts + to, tl.sum(kept))
            part += tl.num_programs(1)


@triton.jit
def _candidates(found, count_P, index, BLOCK: constexpr, STEPS: constexpr):
    """The candidates of 2^STEPS parts, numbered in rising order, with these numbers; -1 where there is none."""
    end_P, part, real = tl.cumsum(count_P, 0), index * 0, (index >= 0) & (index < tl.sum(count_P))
    for step in tl.static_range(STEPS):
        half = 1 << (STEPS - 1 - step)
        part += (tl.gather(end_P, part + half - 1, 0) <= index).to(tl.int32) * half
    place = part * BLOCK + index - tl.gather(end_P - count_P, part, 0)
    return tl.where(real, part * BLOCK + tl.load(found + place, mask=real, other=0), -1)


@triton.jit(do_not_specialize=["columns", "parts"], do_not_specialize_on_alignment=["positions"])
def _choose_among(
    scores, positions, found, counts, out, columns, parts,
    K: constexpr, BLOCK: constexpr, STEPS: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program t: the K highest of the candidates of several parts of BLOCK positions. The choice among the first BLOCK
    of them takes their place ahead of the others, until no others are left.
    """
    wait_for_previous(PDL)
    token, lane, each = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, 1 << STEPS)
    last = tl.load(positions + token).to(tl.int32)
    scores, out, found = scores + token * columns, out + token * K, found + token * parts * BLOCK
    if last >= BLOCK:
        count_P = tl.load(counts + token * parts + each, mask=each <= last // BLOCK, other=0)
        first, have, total = last * 0, last * 0, tl.sum(count_P)
        while first < total:
            column = _candidates(found, count_P, tl.where(lane < have, -1, first + lane - have), BLOCK, STEPS)
            column = tl.where(lane < have, tl.load(out + lane, mask=lane < have, other=-1), column)
            tl.debug_barrier()  # `out` is read before it is written
            _put_highest(tl.load(scores + column, mask=column >= 0, other=0.0), column, out, K, BLOCK)
            tl.debug_barrier()
            first, have = first + BLOCK - have, last * 0 + K


def choose(scores_TS: Tensor, positions_T: Tensor, topk: int) -> Tensor:
    """The positions of the `topk` highest scores of each token, of 0 to its own: → int32 [T, topk], rising, -1 after
    the last where it sees fewer. Of equal scores at the border the first are chosen, so all ranks choose the same.

    A long context is divided into groups. What `topk` of their highest scores reach, `topk` scores reach, so lower ones
    are left out. The rest, half as many again unless the highest are equal or in few groups, is compared at last.
    """
    (tokens, columns), least = scores_TS.shape, 2 * triton.next_power_of_2(topk)
    whole = triton.next_power_of_2(max(columns, topk))  # in one block
    block = whole if whole <= max(2 * AT_ONCE, least) else max(AT_ONCE, least)
    parts, row = triton.cdiv(columns, block), scores_TS.stride(0)
    align = {"ALIGN": math.gcd(row, scores_TS.storage_offset(), 4)}  # 4 in rows of whole pages

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return scores_TS.new_empty((tokens, *shape), dtype=dtype)

    def options(registers: int) -> dict[str, int | bool]:
        return {"BLOCK": block} | launch_config(scores_TS, min(max(block // 512, 4), 16), registers=registers)

    out, bounds, given = empty(torch.int32, topk), empty(torch.float32), (scores_TS, positions_T)
    highest, groups = empty(torch.float32, block) if parts > 1 else scores_TS, {"GROUPS": block // 16} | align
    if parts > 1:
        _highest_of_groups[tokens, 16](*given, highest, row, BLOCK=block, **groups, **launch_config(scores_TS, 4))
    config = {"K": topk} | align | options(128 if block <= AT_ONCE else 64)
    _choose_or_bound[(tokens,)](*given, highest, bounds, out, row, **config)
    if parts > 1:
        found = empty(torch.int16 if block <= 1 << 15 else torch.int32, parts, block)
        counts, each = empty(torch.int32, parts), triton.next_power_of_2(8 * SMS // max(tokens, 1))
        config = align | options(64)
        _keep_above[tokens, min(max(each, 4), parts)](*given, bounds, found, counts, row, parts, **config)
        config = {"K": topk, "STEPS": (parts - 1).bit_length()} | options(128)
        _choose_among[(tokens,)](*given, found, counts, out, row, parts, **config)
    return out


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["mask"])
def _mark(chosen, mask, width, K: constexpr, BLOCK: constexpr, PDL: constexpr):
    """Program t: the choice of token t."""
    wait_for_previous(PDL)
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    column = tl.load(chosen + token * K + lane, mask=lane < K, other=-1)
    tl.store(mask + token * width + column, tl.full((BLOCK,), 1, tl.uint8), mask=column >= 0)


def mask_of(chosen_TK: Tensor, width: int) -> Tensor:
    """A choice as a mask of `mla.triton.prefill`: → uint8 [T, width], 1 where a token is chosen. width: no context is
    longer.
    """
    tokens, topk = chosen_TK.shape
    mask_TS = torch.zeros(tokens, width, dtype=torch.uint8, device=chosen_TK.device)
    _mark[(tokens,)](
        chosen_TK, mask_TS, width, K=topk, BLOCK=triton.next_power_of_2(topk), **launch_config(chosen_TK, 4)
    )
    return mask_TS


@triton.jit
def _load_latents(plane, place, dtype: constexpr, RANK: constexpr, ROPE: constexpr, N: constexpr):
    """Latents and rotated keys of N rows of a plane, which is of numbers or of records."""
    dim, turn = tl.arange(0, RANK)[None, :], tl.arange(0, ROPE)[None, :]
    if plane.dtype.element_ty == tl.uint8:
        tiles: constexpr = (RANK + 127) // 128
        row = RANK + 4 * tiles + 2 * ROPE
        codes = tl.load(plane.to(tl.pointer_type(tl.float8e4nv)) + place[:, None] * row + dim)
        at = plane + RANK + place[:, None] * row
        scales = tl.load(at.to(tl.pointer_type(tl.float32)) + tl.arange(0, tiles)[None, :])
        latent = tl.reshape(codes.to(tl.float32), (N, tiles, RANK // tiles)) * scales[:, :, None]
        latent = tl.reshape(latent, (N, RANK)).to(dtype)
        rope = tl.load((at + 4 * tiles).to(tl.pointer_type(tl.bfloat16)) + turn).to(dtype)
    else:
        at = plane + place[:, None] * (RANK + ROPE)
        latent, rope = tl.load(at + dim).to(dtype), tl.load(at + RANK + turn).to(dtype)
    return latent, rope


@triton.jit(do_not_specialize_on_alignment=["pages"])
def _decode_pages(plane, pages, out, RANK: constexpr, ROPE: constexpr, N: constexpr, PDL: constexpr):
    """Program (p, i): the i-th N records of the p-th page."""
    wait_for_previous(PDL)
    token = tl.program_id(1) * N + tl.arange(0, N)
    place = tl.load(pages + tl.program_id(0)).to(tl.int64) * 64 + token
    latent, rope = _load_latents(plane, place, out.dtype.element_ty, RANK, ROPE, N)
    to = out + (tl.program_id(0).to(tl.int64) * 64 + token)[:, None] * (RANK + ROPE)
    tl.store(to + tl.arange(0, RANK)[None, :], latent)
    tl.store(to + RANK + tl.arange(0, ROPE)[None, :], rope)


def decode_pages(records_PSB: Tensor, pages_N: Tensor, rank: int, rope: int, dtype: torch.dtype) -> Tensor:
    """These pages of records, decoded: → [N, 64, r + rope]. pages: int32."""
    out = torch.empty(len(pages_N), 64, rank + rope, dtype=dtype, device=records_PSB.device)
    _decode_pages[len(pages_N), 2](
        records_PSB, pages_N, out, RANK=rank, ROPE=rope, N=32, **launch_config(out, 8)
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["splits", "table_row"], do_not_specialize_on_alignment=["table", "positions", "rows"])
def _attend(
    query, plane, chosen, rows, table, positions, paths, out, lse, scale, heads, splits, query_token, query_head,
    table_row,
    K: constexpr, RANK: constexpr, ROPE: constexpr, M: constexpr, N: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (t, s, b): split s of the chosen tokens of token t, for the b-th block of its heads. chosen: None is all
    that the token sees, K at most.
    """
    wait_for_previous(PDL)
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, key = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, N)
    real, at = head < heads, (token * heads + head) * splits + split
    position = tl.load(positions + token).to(tl.int32)
    count = tl.minimum(position + 1, K)
    each = tl.cdiv((K + N - 1) // N, splits) * N
    first, last = split * each, tl.minimum(split * each + each, count)
    if first >= last:
        tl.store(lse + at, tl.full((M,), -float("inf"), tl.float32), mask=real)
        return
    at_q = query + token * query_token + head[:, None] * query_head
    q, rope_q, strength = load_queries(at_q, real, None, scale, RANK, ROPE, M)
    top, total, sums = empty_softmax(M, RANK)
    row_pages = table + tl.load(rows + token).to(tl.int64) * table_row
    for start in range(first, last, N):
        column = tl.minimum(start + key, last - 1)
        if chosen is not None:
            column = tl.load(chosen + token * K + column)
        if paths is None:
            place = tl.load(row_pages + column // 64).to(tl.int64) * 64 + column % 64
        else:
            place = path_rows(paths, row_pages, token, position, column)
        latent, rope_k = _load_latents(plane, place, q.dtype, RANK, ROPE, N)
        scores = tl.dot(rope_q, rope_k.T, tl.dot(q, latent.T, input_precision="ieee"), input_precision="ieee")
        scores = tl.where((start + key < last)[None, :], scores, -float("inf"))
        top, total, sums = add_values(scores, latent, strength, top, total, sums)
    store_states(out, lse, at, real, None, top, total, sums, RANK)


def attend_tiles(heads: int, is_record: bool) -> TileConfig:
    """What the compiler spills least of, but for records of more than 16 heads, which twice as many tokens at a time
    serve better (H200, 128 heads; 1, 4, 8, 16 tokens: 10.5, 17.0, 27.6, 48.3 us instead of 12.4, 20.8, 35.6, 64.8).
    """
    if heads <= 16:
        return TileConfig(16, 64, 8 if is_record else 4, 2)
    if is_record:
        return TileConfig(64, 64, 8, 2)
    return TileConfig(32, 32, 8, 2) if heads <= 32 else TileConfig(64, 32, 8, 2)


def attend(
    query_THD: Tensor,
    latents: LatentPlane,
    chosen_TK: Tensor | None,
    rows: QueryRows,
    topk: int,
    *,
    scale: float,
    rank: int,
    splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """Absorbed attention to the chosen tokens: → (partial [T, H, s, r], LSE float32 [T, H, s]), as
    `mla.triton.decode`.

    query_THD: multiplied by W_UK and rotated. chosen_TK: None is all that a token sees, `topk` at most. splits: 0 is
    the fastest number; a given one and `topk` alone decide how a token's context is cut.
    """
    tokens, heads, dim = query_THD.shape
    assert latents.scale is None, "numbers of the model's type, or records"
    tiles = attend_tiles(heads, latents.paged_PSD.dtype == torch.uint8)
    blocks = triton.cdiv(heads, tiles.rows)
    splits = splits or waves(tokens * blocks, topk)
    partial = torch.empty(tokens, heads, splits, rank, dtype=query_THD.dtype, device=query_THD.device)
    lse = torch.empty(tokens, heads, splits, dtype=torch.float32, device=query_THD.device)
    _attend[tokens, splits, blocks](
        query_THD, latents.paged_PSD, chosen_TK, *rows, partial, lse, scale * LOG2E, heads,
        splits, *query_THD.stride()[:2], rows.table_RL.stride(0),
        K=topk, RANK=rank, ROPE=dim - rank, M=tiles.rows, N=tiles.keys, **tiles.options(query_THD),
    )  # fmt: skip
    return partial, lse
