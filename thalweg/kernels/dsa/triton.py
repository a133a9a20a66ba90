"""DSA over pages (DeepSeek-V3.2 report §2.1): the indexer scores every context token of a query, the `topk` highest are
chosen, and latent attention reads those alone. All lengths are on the device.

Floors for one query token behind S context tokens, index keys of 128 dims in bf16: the scores read 256 S bytes, the
choice 4 S, attention 1,152 * topk (2.4 MB of 2,048 tokens). For many query tokens of one context the scores are bound
by the tensor cores: 2 * 64 * 128 FLOPs a pair.

Letters: T query tokens, H heads of the indexer or of attention, d index dims, S context tokens, K chosen tokens, L
columns of the page table, r latent rank, D latent and rope dims, s splits.
"""

from __future__ import annotations

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
    store_states,
    wait_for_previous,
    waves,
)
from thalweg.kernels.launch import launch_config
from thalweg.kernels.mla.triton import load_queries
from thalweg.kernels.rope.triton import encode, rotated

# Added to a score for each position, as `attention.context.TIE`: of equal scores, of which many are 0, the latest is
# the highest
TIE = constexpr(1e-20)
CHUNK = 8  # pages whose scores one program computes
COLUMNS = 2048  # scores that `_choose` compares at a time
QUERIES_AT_ONCE = 8  # index heads that one program rotates


class KeyNorm(NamedTuple):
    """A layer norm of the index keys."""

    weight_d: Tensor  # float32
    bias_d: Tensor
    eps: float


@triton.jit(do_not_specialize_on_alignment=["positions", "write"])
def _write(
    key, query, weight, bias, cos, sin, positions, write, plane, eps, heads, key_token, query_token,
    DIM: constexpr, ROPE: constexpr, HEADS: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (t, 0): the key of token t; (t, 1 + b): the b-th HEADS of its index queries."""
    wait_for_previous(PDL)
    token, turn, rest = tl.program_id(0).to(tl.int64), tl.arange(0, ROPE), tl.arange(0, DIM)
    angle = tl.load(positions + token) * (ROPE // 2) + tl.arange(0, ROPE // 2)
    cos_P, sin_P = tl.load(cos + angle), tl.load(sin + angle)
    if tl.program_id(1) == 0:
        at, row = key + token * key_token, plane + tl.load(write + token) * DIM
        x = tl.load(at + rest).to(tl.float32)
        mean = tl.sum(x) / DIM
        scale = 1 / tl.sqrt(tl.sum((x - mean) * (x - mean)) / DIM + eps)
        y = ((x - mean) * scale * tl.load(weight + rest) + tl.load(bias + rest)).to(key.dtype.element_ty)
        own = (tl.load(at + turn).to(tl.float32) - mean) * scale * tl.load(weight + turn) + tl.load(bias + turn)
        own = rotated(own.to(key.dtype.element_ty).to(tl.float32)[None, :], cos_P, sin_P, 1, ROPE)
        own = tl.reshape(own, (ROPE,)).to(key.dtype.element_ty).to(tl.float32)
        tl.store(row + rest, encode(y.to(tl.float32), None, plane.dtype.element_ty), mask=rest >= ROPE)
        tl.store(row + turn, encode(own, None, plane.dtype.element_ty))
    else:
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        at_q, real = query + token * query_token + head[:, None] * DIM + turn[None, :], (head < heads)[:, None]
        q = rotated(tl.load(at_q, mask=real, other=0.0).to(tl.float32), cos_P, sin_P, HEADS, ROPE)
        tl.store(at_q, q.to(query.dtype.element_ty), mask=real)


def write(key_Td: Tensor, query_TX: Tensor, norm: KeyNorm, write: KvWrite, keys_PSd: Tensor) -> None:
    """Norms, rotates and stores each token's index key; rotates its index queries in place. The first dims rotate.

    key_Td: a view of a projection's output. query_TX: the queries of all index heads, likewise; X may be 0. keys_PSd:
    the plane of index keys [P, 64, d], never e4m3.
    """
    tokens, dim = key_Td.shape
    heads, plane = query_TX.shape[1] // dim, keys_PSd.view(-1, dim)
    _write[tokens, 1 + triton.cdiv(heads, QUERIES_AT_ONCE)](
        key_Td, query_TX, norm.weight_d, norm.bias_d, *write, plane, norm.eps, heads, key_Td.stride(0),
        query_TX.stride(0), DIM=dim, ROPE=2 * write.cos_SC.shape[1], HEADS=QUERIES_AT_ONCE, **launch_config(key_Td, 4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["columns", "table_row"], do_not_specialize_on_alignment=["table", "positions", "rows"])
def _scores(
    query, weights, plane, rows, table, positions, out, scale, heads, columns, query_token, table_row,
    DIM: constexpr, HEADS: constexpr, CHUNK: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (t, c): the scores of CHUNK pages of token t's context. Those past its position are left as they are."""
    wait_for_previous(PDL)
    token, head, key = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS), tl.arange(0, 64)
    position = tl.load(positions + token).to(tl.int32)
    first, last = tl.program_id(1) * CHUNK, position // 64 + 1
    if first < last:
        dim, real = tl.arange(0, DIM), head < heads
        q = tl.load(query + token * query_token + head[:, None] * DIM + dim[None, :], mask=real[:, None], other=0.0)
        weight = tl.load(weights + token * heads + head, mask=real, other=0.0) * scale
        row_pages = table + tl.load(rows + token).to(tl.int64) * table_row
        for page in range(first, tl.minimum(first + CHUNK, last)):
            at = tl.load(row_pages + page).to(tl.int64) * 64 + key
            k = tl.load(plane + at[:, None] * DIM + dim[None, :]).to(q.dtype)
            products = tl.maximum(tl.dot(q, k.T, input_precision="ieee"), 0.0)
            column = page * 64 + key
            score = tl.sum(products * weight[:, None], 0) + column.to(tl.float32) * TIE
            tl.store(out + token * columns + column, score, mask=column <= position)


def scores(
    query_TX: Tensor, weights_TH: Tensor, keys_PSd: Tensor, rows: QueryRows, max_kv_len: int, scale: float
) -> Tensor:
    """scale * Σ_h weight[t, h] * relu(query[t, h] · key[s]) of every context token: → float32 [T, S], S whole pages;
    undefined past a token's own position.

    query_TX: rotated, the heads of a token side by side. weights_TH: float32, contiguous.
    """
    (tokens, heads), dim = weights_TH.shape, keys_PSd.shape[2]
    pages = triton.cdiv(max_kv_len, 64)
    out = torch.empty(tokens, pages * 64, dtype=torch.float32, device=query_TX.device)
    _scores[tokens, triton.cdiv(pages, CHUNK)](
        query_TX, weights_TH, keys_PSd.view(-1, dim), *rows, out, scale, heads, pages * 64,
        query_TX.stride(0), rows.table_RL.stride(0),
        DIM=dim, HEADS=max(triton.next_power_of_2(heads), 16), CHUNK=CHUNK, **launch_config(out, 4, 2),
    )  # fmt: skip
    return out


@triton.jit
def _ordered(x):
    """uint32 in the order of these float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["columns"], do_not_specialize_on_alignment=["positions"])
def _choose(scores, positions, out, columns, K: constexpr, BLOCK: constexpr, PDL: constexpr):
    """Program t: the positions of the K highest scores of token t, rising. Digit by digit of 8 bits, the highest first:
    which digit the K-th highest has, and how many scores are above. At last those that equal it; the latest are taken.
    """
    wait_for_previous(PDL)
    token, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    count = tl.load(positions + token).to(tl.int32) + 1
    own, to = scores + token * columns, out + token * K
    if count <= K:
        for start in range(0, K, BLOCK):
            column = start + c
            tl.store(to + column, tl.where(column < count, column, -1), mask=column < K)
    else:
        digits = tl.arange(0, 256)
        prefix, left, equal = tl.zeros((), tl.uint32), tl.full((), K, tl.int32), tl.zeros((), tl.int32)
        for step in tl.static_range(4):
            shift = 24 - 8 * step
            found = tl.zeros((256,), tl.int32)
            for start in range(0, count, BLOCK):
                inside = start + c < count
                number = _ordered(tl.load(own + start + c, mask=inside, other=0.0))
                if step > 0:
                    inside = inside & (number >> (shift + 8) == prefix)
                found += tl.histogram(((number >> shift) & 255).to(tl.int32), 256, mask=inside)
            above = tl.sum(found) - tl.cumsum(found, 0)  # scores with a higher digit
            digit = tl.sum((above + found >= left).to(tl.int32)) - 1
            left -= tl.sum(tl.where(digits == digit, above, 0))
            equal = tl.sum(tl.where(digits == digit, found, 0))
            prefix = (prefix << 8) | digit.to(tl.uint32)
        taken, passed, skipped = tl.zeros((), tl.int32), tl.zeros((), tl.int32), equal - left
        for start in range(0, count, BLOCK):
            inside = start + c < count
            number = _ordered(tl.load(own + start + c, mask=inside, other=0.0))
            is_equal = (inside & (number == prefix)).to(tl.int32)
            is_late = passed + tl.cumsum(is_equal, 0) > skipped
            chosen = (inside & ((number > prefix) | ((is_equal > 0) & is_late))).to(tl.int32)
            at = taken + tl.cumsum(chosen, 0) - chosen
            tl.store(to + at, start + c, mask=chosen > 0)
            taken, passed = taken + tl.sum(chosen), passed + tl.sum(is_equal)


def choose(scores_TS: Tensor, positions_T: Tensor, topk: int) -> Tensor:
    """The positions of the `topk` highest scores of each token, of 0 to its own: → int32 [T, topk], rising, -1 after
    the last where it sees fewer. Of equal scores at the border the latest are chosen, so all ranks choose the same.
    """
    out_TK = torch.empty(len(scores_TS), topk, dtype=torch.int32, device=scores_TS.device)
    # at least a number for each thread of 8 warps
    block = min(COLUMNS, triton.next_power_of_2(max(topk, scores_TS.shape[1], 256)))
    _choose[(len(scores_TS),)](
        scores_TS, positions_T, out_TK, scores_TS.shape[1], K=topk, BLOCK=block, **launch_config(scores_TS, 8)
    )
    return out_TK


@triton.jit(do_not_specialize=["splits", "table_row"], do_not_specialize_on_alignment=["table", "positions", "rows"])
def _attend(
    query, plane, plane_scale, chosen, rows, table, positions, out, lse, scale, heads, splits, query_token, query_head,
    table_row,
    K: constexpr, RANK: constexpr, ROPE: constexpr, M: constexpr, N: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (t, s, b): split s of the chosen tokens of token t, for the b-th block of its heads."""
    wait_for_previous(PDL)
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, key = tl.program_id(2) * M + tl.arange(0, M), tl.arange(0, N)
    real, at = head < heads, (token * heads + head) * splits + split
    count = tl.minimum(tl.load(positions + token).to(tl.int32) + 1, K)
    each = tl.cdiv((K + N - 1) // N, splits) * N
    first, last = split * each, tl.minimum(split * each + each, count)
    if first >= last:
        tl.store(lse + at, tl.full((M,), -float("inf"), tl.float32), mask=real)
        return
    at_q = query + token * query_token + head[:, None] * query_head
    q, rope_q, strength = load_queries(at_q, real, plane_scale, scale, RANK, ROPE, M)
    top, total, sums = empty_softmax(M, RANK)
    row_pages = table + tl.load(rows + token).to(tl.int64) * table_row
    for start in range(first, last, N):
        is_seen = start + key < last
        column = tl.load(chosen + token * K + start + key, mask=is_seen, other=0)
        place = tl.load(row_pages + column // 64).to(tl.int64) * 64 + column % 64
        at_k = plane + place[:, None] * (RANK + ROPE)
        latent = tl.load(at_k + tl.arange(0, RANK)[None, :]).to(q.dtype)
        rope_k = tl.load(at_k + RANK + tl.arange(0, ROPE)[None, :]).to(q.dtype)
        scores = tl.dot(rope_q, rope_k.T, tl.dot(q, latent.T, input_precision="ieee"), input_precision="ieee")
        scores = tl.where(is_seen[None, :], scores, -float("inf"))
        top, total, sums = add_values(scores, latent, strength, top, total, sums)
    store_states(out, lse, at, real, plane_scale, top, total, sums, RANK)


def attend_tiles(heads: int) -> TileConfig:
    if heads <= 16:
        return TileConfig(16, 64, 8, 2)
    return TileConfig(32, 32, 8, 2) if heads <= 32 else TileConfig(64, 64, 8, 2)


def attend(
    query_THD: Tensor, latents: LatentPlane, chosen_TK: Tensor, rows: QueryRows, *, scale: float, rank: int
) -> tuple[Tensor, Tensor]:
    """Absorbed attention to the chosen tokens: → (partial [T, H, s, r], LSE float32 [T, H, s]), as `mla.triton.decode`.

    query_THD: multiplied by W_UK and rotated.
    """
    tokens, heads, dim = query_THD.shape
    tiles, topk = attend_tiles(heads), chosen_TK.shape[1]
    blocks = triton.cdiv(heads, tiles.rows)
    splits = waves(tokens * blocks, topk)
    partial = torch.empty(tokens, heads, splits, rank, dtype=query_THD.dtype, device=query_THD.device)
    lse = torch.empty(tokens, heads, splits, dtype=torch.float32, device=query_THD.device)
    _attend[tokens, splits, blocks](
        query_THD, latents.paged_PSD.view(-1, dim), latents.scale, chosen_TK, *rows, partial, lse, scale * LOG2E, heads,
        splits, *query_THD.stride()[:2], rows.table_RL.stride(0),
        K=topk, RANK=rank, ROPE=dim - rank, M=tiles.rows, N=tiles.keys, **tiles.options(query_THD),
    )  # fmt: skip
    return partial, lse
