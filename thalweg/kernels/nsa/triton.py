"""Native sparse attention over pages, see `ref.py`: one launch attends to the pooled blocks and scores them, one
chooses, one attends to the chosen blocks and the window and adds the branches. All lengths are on the device.

A program is a token and a key head, whose G query heads are the M of the products: prefill and decode are the same, and
a token's bits depend on its own sequence alone.

Floors for one query token behind S context tokens, for each key head in bfloat16: compression reads 2 * (d + v) * S/64
bytes, attention 2 * (d + v) * (64 * topk + window), of which the window and the chosen blocks share up to 128 tokens.
The paper's model (K 4, G 16, d 192, v 128, topk 16, window 512) behind 64 Ki tokens: 2.6 MB and 3.6 MB, 2.0 µs at
3.1 TB/s; dense attention would read 168 MB. Each key is 2 * G * (d + v) FLOPs, so 8,192 query tokens are 0.52 TFLOP,
0.65 ms at 800 TFLOP/s. They read 3.9 MB each, which they share in the second-level cache only.

Letters: as in `ref.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.attend.triton import LOG2E, TileConfig, add_values, empty_softmax, wait_for_previous
from thalweg.kernels.dsa.triton import choose
from thalweg.kernels.launch import launch_config
from thalweg.kernels.nsa import ref
from thalweg.kernels.nsa.ref import PAGE, NsaConfig, NsaPlanes

FORCED = constexpr(ref.FORCED)


@triton.jit
def _write_head(new, plane, pooled, write, token, head, heads, new_token, DIM: constexpr, PAD: constexpr):
    dim, to = tl.arange(0, PAD), tl.load(write + token)
    is_dim = dim < DIM
    at = new + token * new_token + head * DIM + dim
    tl.store(plane + (to * heads + head) * DIM + dim, tl.load(at, mask=is_dim), mask=is_dim)
    if to % 64 == 63:
        # what this step stores is read from its input: another program may not have stored it yet
        back = tl.arange(0, 64)
        is_new = (back <= token) & (tl.load(write + token - back, mask=back <= token, other=-1) == to - back)
        fresh, stored = is_new[:, None] & is_dim[None, :], (is_new == 0)[:, None] & is_dim[None, :]
        x = tl.load(at[None, :] - back[:, None] * new_token, mask=fresh, other=0.0).to(tl.float32)
        x += tl.load(plane + ((to - back) * heads + head)[:, None] * DIM + dim[None, :], mask=stored, other=0.0)
        mean = tl.sum(x, 0) / 64
        tl.store(pooled + (to // 64 * heads + head) * DIM + dim, mean.to(pooled.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize_on_alignment=["write"])
def _write(
    key, value, write, key_plane, value_plane, pooled_key, pooled_value, key_token, value_token,
    KEY: constexpr, KEYS: constexpr, VALUE: constexpr, VALUES: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (t, k): key and value of token t for key head k."""
    wait_for_previous(PDL)
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    _write_head(key, key_plane, pooled_key, write, token, head, heads, key_token, KEY, KEYS)
    _write_head(value, value_plane, pooled_value, write, token, head, heads, value_token, VALUE, VALUES)


def write(key_TKd: Tensor, value_TKv: Tensor, write_T: Tensor, planes: NsaPlanes) -> None:
    """See `ref.write`. Keys and values may be views of a projection's output, the heads of a token side by side."""
    tokens, heads, key = key_TKd.shape
    _write[tokens, heads](
        key_TKd, value_TKv, write_T, *planes, key_TKd.stride(0), value_TKv.stride(0), **_dims(key, value_TKv.shape[2]),
        **launch_config(key_TKd, 4),
    )  # fmt: skip


def _dims(key: int, value: int) -> dict[str, int]:
    """Dims of keys and values, and the powers of two that hold them."""
    return {
        "KEY": key, "KEYS": triton.next_power_of_2(key), "VALUE": value, "VALUES": triton.next_power_of_2(value),
    }  # fmt: skip


@triton.jit
def _load_heads(at, heads, DIM: constexpr, M: constexpr, PAD: constexpr):
    """[M, PAD] of so many heads; 0 where there is none."""
    head, dim = tl.arange(0, M)[:, None], tl.arange(0, PAD)[None, :]
    return tl.load(at + head * DIM + dim, mask=(head < heads) & (dim < DIM), other=0.0)


@triton.jit
def _load_rows(plane, row, is_row, head, heads, DIM: constexpr, PAD: constexpr):
    """[N, PAD] of a key head; 0 where there is no row."""
    dim = tl.arange(0, PAD)[None, :]
    return tl.load(plane + (row * heads + head)[:, None] * DIM + dim, mask=is_row[:, None] & (dim < DIM), other=0.0)


@triton.jit
def _products(q, keys, row, is_row, head, heads, KEY: constexpr, KEYS: constexpr):
    k = _load_rows(keys, row, is_row, head, heads, KEY, KEYS)
    return tl.where(is_row[None, :], tl.dot(q, k.T, input_precision="ieee"), -float("inf"))


@triton.jit
def _add_rows(
    q, keys, values, row, is_row, head, heads, strength, top, total, sums,
    KEY: constexpr, KEYS: constexpr, VALUE: constexpr, VALUES: constexpr,
):  # fmt: skip
    """Adds rows of two planes to an online softmax."""
    products = _products(q, keys, row, is_row, head, heads, KEY, KEYS)
    v = _load_rows(values, row, is_row, head, heads, VALUE, VALUES)
    return add_values(products, v, strength, top, total, sums)


@triton.jit
def _gated(top, total, sums, gate):
    """The state of an online softmax as a branch: 0 where nothing was seen."""
    return sums * (gate / tl.where(total > 0.0, total, 1.0))[:, None]


@triton.jit(do_not_specialize=["columns", "table_row"], do_not_specialize_on_alignment=["table", "positions", "rows"])
def _compress(
    query, gates, pooled_key, pooled_value, rows, table, positions, out, scores, own_blocks, scale, columns,
    query_token, gate_token, table_row,
    GROUP: constexpr, KEY: constexpr, KEYS: constexpr, VALUE: constexpr, VALUES: constexpr, M: constexpr, N: constexpr,
    PDL: constexpr,
):  # fmt: skip
    """Program (t, k): the compression branch of token t for key head k, times its gate; the scores of blocks 0 to the
    token's own; and the number of that block.
    """
    wait_for_previous(PDL)
    token, kv_head, kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane, block, value = tl.arange(0, M), tl.arange(0, N), tl.arange(0, VALUES)
    real, pair = lane < GROUP, token * kv_heads + kv_head
    position = tl.load(positions + token).to(tl.int32)
    own, full = position // 64, (position + 1) // 64
    q = _load_heads(query + token * query_token + kv_head * GROUP * KEY, GROUP, KEY, M, KEYS)
    strength = tl.full((M,), scale, tl.float32)
    row_pages = table + tl.load(rows + token).to(tl.int64) * table_row
    top, total, sums = empty_softmax(M, VALUES)
    for start in range(0, full, N):
        is_full = start + block < full
        page = tl.load(row_pages + start + block, mask=is_full, other=0).to(tl.int64)
        top, total, sums = _add_rows(
            q, pooled_key, pooled_value, page, is_full, kv_head, kv_heads, strength, top, total, sums,
            KEY, KEYS, VALUE, VALUES,
        )  # fmt: skip
    gate = tl.load(gates + token * gate_token + (kv_head * GROUP + lane) * 3, mask=real, other=0.0).to(tl.float32)
    to = out + (pair * GROUP + lane)[:, None] * VALUE + value[None, :]
    branch = _gated(top, total, sums, gate)
    tl.store(to, branch.to(out.dtype.element_ty), mask=real[:, None] & (value < VALUE)[None, :])
    base, share = tl.where(total > 0.0, top, 0.0), tl.where(real, 1.0 / (tl.maximum(total, 1.0) * GROUP), 0.0)
    for start in range(0, own + 1, N):
        is_full = start + block < full
        page = tl.load(row_pages + start + block, mask=is_full, other=0).to(tl.int64)
        products = _products(q, pooled_key, page, is_full, kv_head, kv_heads, KEY, KEYS)
        score = tl.sum(tl.exp2(products * scale - base[:, None]) * share[:, None], 0)
        near = (start + block >= own - 1).to(tl.float32) + (start + block >= own).to(tl.float32)
        score = tl.where((start + block == 0) | (near > 0), FORCED + near, score)
        tl.store(scores + pair * columns + start + block, score, mask=start + block <= own)
    tl.store(own_blocks + pair, own)


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["table", "positions", "rows"])
def _attend(
    query, gates, keys, values, chosen, rows, table, positions, out, scale, query_token, gate_token, table_row,
    TOPK: constexpr, WINDOW: constexpr, GROUP: constexpr, KEY: constexpr, KEYS: constexpr, VALUE: constexpr,
    VALUES: constexpr, M: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (t, k): adds the other branches of token t for key head k. Numbers of pages are read one page ahead."""
    wait_for_previous(PDL)
    token, kv_head, kv_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lane, key, value = tl.arange(0, M), tl.arange(0, 64), tl.arange(0, VALUES)
    real, pair = lane < GROUP, token * kv_heads + kv_head
    position = tl.load(positions + token).to(tl.int32)
    own = position // 64
    q = _load_heads(query + token * query_token + kv_head * GROUP * KEY, GROUP, KEY, M, KEYS)
    strength = tl.full((M,), scale, tl.float32)
    row_pages = table + tl.load(rows + token).to(tl.int64) * table_row
    gate = gates + token * gate_token + (kv_head * GROUP + lane) * 3
    to = out + (pair * GROUP + lane)[:, None] * VALUE + value[None, :]
    is_out = real[:, None] & (value < VALUE)[None, :]
    branches = tl.load(to, mask=is_out, other=0.0).to(tl.float32)
    count, picked = tl.minimum(own + 1, TOPK), chosen + pair * TOPK
    top, total, sums = empty_softmax(M, VALUES)
    next_block = tl.load(picked)
    next_page = tl.load(row_pages + next_block).to(tl.int64)
    for i in range(count):
        block, page = next_block, next_page
        next_block = tl.load(picked + tl.minimum(i + 1, count - 1))
        next_page = tl.load(row_pages + next_block).to(tl.int64)
        top, total, sums = _add_rows(
            q, keys, values, page * 64 + key, block * 64 + key <= position, kv_head, kv_heads, strength, top, total,
            sums, KEY, KEYS, VALUE, VALUES,
        )  # fmt: skip
    branches += _gated(top, total, sums, tl.load(gate + 1, mask=real, other=0.0).to(tl.float32))
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
        top, total, sums = empty_softmax(M, VALUES)
        next_page = tl.load(row_pages + first // 64).to(tl.int64)
        for near in range(first // 64, own + 1):
            page = next_page
            next_page = tl.load(row_pages + tl.minimum(near + 1, own)).to(tl.int64)
            at = near * 64 + key
            top, total, sums = _add_rows(
                q, keys, values, page * 64 + key, (at >= first) & (at <= position), kv_head, kv_heads, strength, top,
                total, sums, KEY, KEYS, VALUE, VALUES,
            )  # fmt: skip
        branches += _gated(top, total, sums, tl.load(gate + 2, mask=real, other=0.0).to(tl.float32))
    tl.store(to, branches.to(out.dtype.element_ty), mask=is_out)


def tiles(group: int) -> TileConfig:
    """group: query heads of a key head, 1 to 64."""
    rows = max(triton.next_power_of_2(group), 16)
    return TileConfig(rows, PAGE, 4 if rows <= 32 else 8, 2)


def attend(
    query_THd: Tensor, gates_TH3: Tensor, planes: NsaPlanes, rows: QueryRows, config: NsaConfig, max_kv_len: int
) -> Tensor:
    """See `ref.attend`. Queries and gates may be views of a projection's output, the heads of a token side by side. A
    key head has 1 to 64 query heads.
    """
    tokens, heads, key = query_THd.shape
    kv_heads, value = planes.value_PSKv.shape[2:]
    pairs, columns, device = tokens * kv_heads, triton.cdiv(max_kv_len, PAGE), query_THd.device
    tile, dims = tiles(heads // kv_heads), {"GROUP": heads // kv_heads, **_dims(key, value)}
    scale, strides = config.scale * LOG2E, (query_THd.stride(0), gates_TH3.stride(0), rows.table_RL.stride(0))
    out = torch.empty(tokens, heads, value, dtype=query_THd.dtype, device=device)
    scores = torch.empty(pairs, columns, dtype=torch.float32, device=device)
    own_blocks = torch.empty(pairs, dtype=torch.int32, device=device)
    _compress[tokens, kv_heads](
        query_THd, gates_TH3, planes.pooled_key_PKd, planes.pooled_value_PKv, *rows[:3], out, scores, own_blocks, scale,
        columns, *strides, **dims, M=tile.rows, N=tile.keys, **tile.options(out),
    )  # fmt: skip
    chosen = choose(scores, own_blocks, config.topk)  # blocks of tokens and key heads, not tokens of tokens
    _attend[tokens, kv_heads](
        query_THd, gates_TH3, planes.key_PSKd, planes.value_PSKv, chosen, *rows[:3], out, scale, *strides,
        TOPK=config.topk, WINDOW=config.window, **dims, M=tile.rows, **tile.options(out),
    )  # fmt: skip
    return out
