"""Logits by temperature, -inf for what top-k, top-p and min-p remove (`ref.tempered`), without a sort of the
vocabulary; and scores of a race whose coins are computed on the way. For rules that need the distribution itself, where
`truncate` and `draw` need but one token of it.

    scan      a part of a row: its largest value, Σ exp, the maxima of groups of ids (`border.scan`) _border   a row:
    the key of the last id that is kept. What is kept is a prefix of the order (value descending, id ascending), so one
    number says it. Where only some thousand ids may be kept these are listed and sorted; else it is searched by
    bisection over keys, with a sum over the row at each step, until no two ids lie between what is known to be kept and
    what is known not to: some thirty steps of one multiprocessor _keep     a part: the result

Floor: 12 · E · V bytes, the logits read twice and the result written once: 32 µs for 64 rows of 129,280 on an H100. All
sums have a fixed order, and nothing depends on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.sample.triton import race, scaled
from thalweg.kernels.topk_topp.triton import SamplingColumns
from thalweg.kernels.topk_topp_threshold.triton import (
    GROUPS,
    LEAST,
    LIST,
    PART,
    RUN,
    RUNS,
    SCAN,
    SHORT,
    TILE,
    asked,
    key_of,
    kth,
    least_of,
    limit,
    listed,
    overall,
    scan,
    value_of,
)


def apply_temperature(logits_EV: Tensor, wishes: SamplingColumns, truncated: bool) -> Tensor:
    """float32 [E, V], see `ref.apply_temperature`. logits float32, rows of stride 1. truncated: whether any row is."""
    rows, vocab = logits_EV.shape
    parts, options, device = triton.cdiv(vocab, PART), launch_options(logits_EV), logits_EV.device
    slot, floats, ints, seed, top_k = wishes
    asks, shapes = (logits_EV, slot, floats, ints), (floats.shape[1], ints.shape[1], seed, top_k)
    stride, out_EV = logits_EV.stride(0), torch.empty(rows, vocab, device=device)
    border_E = torch.empty(rows, dtype=torch.int64, device=device)
    if truncated:
        tops, sums, groups = (torch.empty(rows, n, device=device) for n in (parts, parts, parts * GROUPS))
        ids, chosen = (torch.empty(rows, n, dtype=torch.int32, device=device) for n in (parts, parts * GROUPS))
        keys = torch.empty(rows, LIST, dtype=torch.int64, device=device)
        scan[rows, parts](
            *asks, tops, sums, ids, groups, stride, vocab, parts, *shapes, False, PART, RUN, RUNS, **SCAN, **options
        )  # fmt: skip
        _border[(rows,)](
            *asks,
            tops,
            sums,
            groups,
            chosen,
            keys,
            border_E,
            stride,
            vocab,
            parts,
            floats.shape[1],
            ints.shape[1],
            top_k,
            GROUPS,
            RUN,
            RUNS,
            TILE,
            SHORT,
            LIST,
            PART,
            triton.next_power_of_2(parts),
            triton.next_power_of_2(parts * GROUPS),
            num_warps=8,
            **options,
        )
    _keep[rows, parts](
        logits_EV,
        slot,
        floats,
        border_E,
        out_EV,
        stride,
        vocab,
        floats.shape[1],
        truncated,
        PART,
        num_warps=8,
        **options,
    )
    return out_EV


def add_gumbel_noise(score_NV: Tensor, seed_E: Tensor, position_E: Tensor) -> Tensor:
    """float32 [N, V]: the scores less the logarithms of the coins that (seed, position, id) decide
    (`sampling.random.exponential`). score float32, rows of stride 1, equally many of each seed, one behind the other.
    seed, position int64, which may be columns.
    """
    rows, vocab = score_NV.shape
    out_NV = torch.empty(rows, vocab, device=score_NV.device)
    _raced[rows, triton.cdiv(vocab, PART)](
        score_NV,
        seed_E,
        position_E,
        out_NV,
        score_NV.stride(0),
        seed_E.stride(0),
        position_E.stride(0),
        vocab,
        rows // len(seed_E),
        PART,
        num_warps=8,
        **launch_options(score_NV),
    )
    return out_NV


@triton.jit
def _border(
    logits_EV,
    slot_E,
    floats_SF,
    ints_EI,
    top_EC,
    sum_EC,
    group_EG,
    chosen_EG,
    key_EN,
    border_E,
    stride,
    V,
    parts,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row, g_G = tl.program_id(0), tl.arange(0, BLOCK_G)
    temperature, k, p, m = asked(row, slot_E, floats_SF, ints_EI, F, COLUMNS, TOP_K)
    border = tl.full((), LEAST, tl.int64)
    if (temperature > 0) & ((k < V) | (p < 1) | (m > 0)):
        groups = parts * GROUPS
        group_G = tl.load(group_EG + row * groups + g_G, mask=g_G < groups, other=float("-inf"))
        largest, total = overall(top_EC, sum_EC, row, parts, BLOCK_C)
        low = least_of(group_G, V, k, p, m, largest, total)
        reach = tl.sum(((group_G >= low) & (group_G > float("-inf"))).to(tl.int32))
        logits_V, keys = logits_EV + row.to(tl.int64) * stride, key_EN + row.to(tl.int64) * LIST
        found = tl.full((), LIST + 1, tl.int32)
        # see `truncate`: more groups are more ids than a list has room for, most likely
        if (reach < groups * (1 - tl.exp(-0.75 * LIST / groups))) | (V <= LIST):
            chosen_G = chosen_EG + row * groups
            found = listed(
                logits_V, group_G, low, temperature, chosen_G, keys, V, groups, RUN, RUNS, TILE, LIST, BLOCK_G
            )
        if found <= SHORT:
            border = _last(keys, found, V, k, p, m, largest, total, SHORT)
        elif found <= LIST:
            border = _last(keys, found, V, k, p, m, largest, total, LIST)
        else:
            border = _searched(logits_V, V, temperature, k, p, m, low, largest, total, BLOCK)
    tl.store(border_E + row, border)


@triton.jit
def _last(keys, count, V, k, p, m, largest, total, BLOCK: tl.constexpr):
    """The key of the last id that is kept, of a list that holds all those."""
    rank = tl.arange(0, BLOCK)
    key = tl.sort(tl.load(keys + rank, mask=rank < count, other=LEAST), descending=True)
    alive = (rank < count) & (rank < k)
    mass = tl.where(alive, tl.exp(value_of(key) - largest), 0.0)
    if k < V:
        total = tl.sum(mass)
    before = tl.cumsum(mass, 0) - mass
    kept = alive & ((rank == 0) | ((before < limit(p, total)) & (mass >= m)))
    return tl.min(tl.where(kept, key, -LEAST))


@triton.jit
def _searched(logits_V, V, temperature, k, p, m, low, largest, total, BLOCK: tl.constexpr):
    """A key that of all ids those that are kept reach, and no other. `low`: see `border.least_of`."""
    i_B = tl.arange(0, BLOCK)
    last_k, mass_k, first = tl.full((), LEAST, tl.int64), total, tl.full((), LEAST, tl.int64)
    if k < V:
        last_k = kth(logits_V, V, temperature, k, low, largest, BLOCK)
        mass_k = total * 0
    for start in range(0, V, BLOCK):
        y = scaled(tl.load(logits_V + start + i_B, mask=start + i_B < V, other=float("-inf")), temperature)
        key = key_of(y, start + i_B)
        first = tl.maximum(first, tl.max(tl.where(start + i_B < V, key, LEAST)))
        if k < V:
            mass_k += tl.sum(tl.where(key >= last_k, tl.exp(y - largest), 0.0))
    # ids at `high` or above are kept, ids below `least` are not: by top-k, min-p, and then by top-p
    least, high, between = key_of(low, tl.full((), 0x7FFFFFFF, tl.int32)), first, V
    while (m > 0) & (least < high):
        middle = (least & high) + ((least ^ high) >> 1)  # rounded down, without overflow
        likely = tl.exp(value_of(middle) - largest) >= m
        high = tl.where(likely, middle, high)
        least = tl.where(likely, least, middle + 1)
    least, high = tl.maximum(least, last_k), first
    while (p < 1) & (least < high) & (between > 1):
        middle = (least & high) + ((least ^ high) >> 1)
        mass, below, above = total * 0, tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for start in range(0, V, BLOCK):
            y = scaled(tl.load(logits_V + start + i_B, mask=start + i_B < V, other=float("-inf")), temperature)
            key = key_of(y, start + i_B)
            mass += tl.sum(tl.where(key > middle, tl.exp(y - largest), 0.0))
            below += tl.sum(((key >= least) & (key <= middle)).to(tl.int32))
            above += tl.sum(((key > middle) & (key <= high)).to(tl.int32))
        keeps = mass < limit(p, mass_k)  # an id of this key
        between = tl.where(keeps, below, above)
        high = tl.where(keeps, middle, high)
        least = tl.where(keeps, least, middle + 1)
    return least


@triton.jit
def _keep(
    logits_EV, slot_E, floats_SF, border_E, out_EV, stride, V,
    F: tl.constexpr, TRUNCATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row, v_B = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(floats_SF + tl.load(slot_E + row) * F)
    x = tl.load(logits_EV + row.to(tl.int64) * stride + v_B, mask=v_B < V, other=float("-inf"))
    y = scaled(x, tl.where(temperature > 0, temperature, 1.0))
    if TRUNCATED:
        kept = (key_of(y, v_B) >= tl.load(border_E + row)) | (
            y != y
        )  # a row with a NaN says so, whatever its border is
        y = tl.where(kept, y, float("-inf"))
    tl.store(out_EV + row.to(tl.int64) * V + v_B, y, mask=v_B < V)


@triton.jit(
    do_not_specialize=["seed_stride", "position_stride", "each"],
    do_not_specialize_on_alignment=["seed_E", "position_E"],
)
def _raced(
    score_NV,
    seed_E,
    position_E,
    out_NV,
    stride,
    seed_stride,
    position_stride,
    V,
    each,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row, v_B = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seed, position = tl.load(seed_E + row // each * seed_stride), tl.load(position_E + row // each * position_stride)
    x = tl.load(score_NV + row.to(tl.int64) * stride + v_B, mask=v_B < V, other=float("-inf"))
    tl.store(out_NV + row.to(tl.int64) * V + v_B, race(x, seed, position, v_B), mask=v_B < V)
