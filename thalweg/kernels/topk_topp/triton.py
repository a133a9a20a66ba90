"""A token of each row after top-k, top-p and min-p, without a sort of the vocabulary and, but for rows of many likely
tokens, in one read of it.

What the three leave is a prefix of the row in the order (value descending, id ascending): `ref.truncate`. Six launches
draw from it:

    scan      a part of a row: its largest value, Σ exp, the maxima of 64 groups of 64 ids. Rows that only want the arg
              max or an untruncated draw have it here and are skipped below _choose   a row: a value that the border
              cannot lie below. The k largest group maxima are k values, so the k-th largest is one such value for
              top-k; top-p's comes from the mass of the group maxima, or of what must be dropped; min-p's is its
              definition. Where only some thousand ids lie above, it lists them (their groups are read, nothing else),
              sorts them and does what the reference does _race     a part, of rows of MANY likely ids: the exponential
              race among them, and of it the part's front (below) _merge    a row: its front out of its parts' _verify
              a part: how many ids, and how much mass, lie before each of the row's front _finish   a row: of MANY the
              first of its front that is kept; then `draw.settle`

A front needs no border: an id that is dropped says that all ids behind it are dropped, so after the winner of the race
only ids BEFORE it (in the order above) can matter, of these the best again, and so on up to the first id of all, which
is always kept. Fronts have about ln(1 / kept mass) ids. Where one is cut off (8 ids a part, 16 a row) before an id is
kept, where a list overflows (thousands of equal logits), and for top-k above a thousand together with top-p, `_finish`
walks through the row by itself: as exact, and some hundred microseconds.

Floor: 4 · E · V bytes read once: 10.7 µs for 64 rows of 129,280 on an H100, 42.7 µs for 256. Parts of rows that hold
nothing above the border are not read again. All sums have a fixed order, and nothing depends on the number of rows: a
row's token is the same in every batch. The mass before the border is a sum in float32 (relative error below 1e-5), as
it is in the reference: ids whose cumulative mass is nearer to top-p than that may be on either side of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.sample.triton import race, scaled, settle
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
    id_at,
    id_of,
    key_of,
    kth,
    least_of,
    limit,
    listed,
    overall,
    scan,
    value_of,
)

# so many registers let two and three programs of a part share a multiprocessor
RACE, VERIFY = ({"num_warps": 16, "maxnreg": most} for most in (64, 40))
FRONT, RECORDS = 8, 16  # ids of a part's and a row's front
DRAWN, MANY, WALK, CHOSEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


class SamplingColumns(NamedTuple):
    """slot_E int64: the rows' slots. floats_SF float32: temperature, top_p, min_p, … of each slot. ints_EI int64: the
    rows' integers, length first; the columns of the seed and of top_k.
    """

    slot_E: Tensor
    floats_SF: Tensor
    ints_EI: Tensor
    seed: int
    top_k: int


class Room(NamedTuple):
    """What passes between the launches; letters: E rows, C parts, G groups, N places of a list, F and R ids of a part's
    and a row's front.

    bounds_E4: a value below which no kept id lies, largest value, Σ exp(value - largest), score of the best id that the
    fronts do not show. state_E4 int32: which kind of row, its token, ids in its front. chosen_EG: groups that hold
    listed ids. Fronts are (score, value) and id.
    """

    top_EC: Tensor
    sum_EC: Tensor
    id_EC: Tensor
    group_EG: Tensor
    chosen_EG: Tensor
    key_EN: Tensor
    bounds_E4: Tensor
    state_E4: Tensor
    front_EC2F: Tensor
    front_id_ECF: Tensor
    front_len_EC: Tensor
    record_E2R: Tensor
    record_id_ER: Tensor
    mass_ECR: Tensor
    count_ECR: Tensor


def room(rows: int, vocab: int, device: torch.device) -> Room:
    parts = triton.cdiv(vocab, PART)

    def make(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    f, i = torch.float32, torch.int32
    return Room(
        make(f, parts), make(f, parts), make(i, parts), make(f, parts * GROUPS), make(i, parts * GROUPS), make(torch.int64, LIST),
        make(f, 4), make(i, 4), make(f, parts, 2, FRONT), make(i, parts, FRONT), make(i, parts), make(f, 2, RECORDS), make(i, RECORDS),
        make(f, parts, RECORDS), make(i, parts, RECORDS),
    )  # fmt: skip


def draw(
    logits_EV: Tensor,
    wishes: SamplingColumns,
    ints_SI: Tensor,
    stop_SK: Tensor,
    tokens_SL: Tensor,
    context: int,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Writes token int64 [E], done bool [E], live bool [E] into `out`, as `sampling.sample.Sampled` has them;
    tokens_SL; and the first three columns of ints_SI. logits float32, contiguous rows, unchanged.
    """
    rows, vocab = logits_EV.shape
    parts, r, options = triton.cdiv(vocab, PART), room(rows, vocab, logits_EV.device), launch_options(logits_EV)
    slot, floats, ints, seed, top_k = wishes
    asks, shapes = (logits_EV, slot, floats, ints), (floats.shape[1], ints.shape[1], seed, top_k)
    stride, block_C = logits_EV.stride(0), triton.next_power_of_2(parts)
    fronts, records = (r.front_EC2F, r.front_id_ECF, r.front_len_EC), (r.record_E2R, r.record_id_ER)
    scan[rows, parts](
        *asks, r.top_EC, r.sum_EC, r.id_EC, r.group_EG, stride, vocab, parts, *shapes, False, PART, RUN, RUNS, **SCAN, **options
    )  # fmt: skip
    _choose[(rows,)](
        *asks, r.top_EC, r.sum_EC, r.group_EG, r.chosen_EG, r.key_EN, r.bounds_E4, r.state_E4, stride, vocab, parts, *shapes, GROUPS, RUN, RUNS,
        TILE, SHORT, LIST, block_C, triton.next_power_of_2(parts * GROUPS), num_warps=8, **options,
    )  # fmt: skip
    _race[rows, parts](
        *asks, r.top_EC, r.bounds_E4, r.state_E4, *fronts, stride, vocab, parts, *shapes, PART, RUNS, FRONT, **RACE, **options
    )  # fmt: skip
    _merge[(rows,)](r.bounds_E4, r.state_E4, *fronts, *records, parts, FRONT, RECORDS, block_C, num_warps=4, **options)
    _verify[rows, parts](
        *asks, r.top_EC, r.bounds_E4, r.state_E4, *records, r.mass_ECR, r.count_ECR, stride, vocab, parts, *shapes, PART, RUNS, RECORDS,
        **VERIFY, **options,
    )  # fmt: skip
    _finish[(rows,)](
        *asks, r.top_EC, r.id_EC, r.bounds_E4, r.state_E4, *records, r.mass_ECR, r.count_ECR, stop_SK, tokens_SL, ints_SI, *out, stride, vocab,
        parts, context, tokens_SL.shape[1], *shapes, stop_SK.shape[1], triton.next_power_of_2(stop_SK.shape[1]), PART, RECORDS, block_C,
        num_warps=8, **options,
    )  # fmt: skip


@triton.jit
def _choose(
    logits_EV, slot_E, floats_SF, ints_EI, top_EC, sum_EC, group_EG, chosen_EG, key_EN, bounds_E4, state_E4, stride, V, parts,
    F: tl.constexpr, COLUMNS: tl.constexpr, SEED: tl.constexpr, TOP_K: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr,
    RUNS: tl.constexpr, TILE: tl.constexpr, SHORT: tl.constexpr, LIST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row, g_G = tl.program_id(0), tl.arange(0, BLOCK_G)
    temperature, k, p, m = asked(row, slot_E, floats_SF, ints_EI, F, COLUMNS, TOP_K)
    kind = DRAWN
    if (temperature > 0) & ((k < V) | (p < 1) | (m > 0)):
        groups = parts * GROUPS
        group_G = tl.load(group_EG + row * groups + g_G, mask=g_G < groups, other=float("-inf"))
        largest, total = overall(top_EC, sum_EC, row, parts, BLOCK_C)
        low = least_of(group_G, V, k, p, m, largest, total)
        reach = tl.sum(((group_G >= low) & (group_G > float("-inf"))).to(tl.int32))
        kind = MANY
        if (k < V) & (p < 1):
            kind = WALK
        # so many groups reach it when three quarters of a list do, if ids fall into groups at random
        if (reach < groups * (1 - tl.exp(-0.75 * LIST / groups))) | (V <= LIST):
            logits_V, keys = logits_EV + row.to(tl.int64) * stride, key_EN + row.to(tl.int64) * LIST
            chosen_G = chosen_EG + row * groups
            found = listed(
                logits_V, group_G, low, temperature, chosen_G, keys, V, groups, RUN, RUNS, TILE, LIST, BLOCK_G
            )
            seed, length = tl.load(ints_EI + row * COLUMNS + SEED), tl.load(ints_EI + row * COLUMNS)
            if found <= SHORT:
                kind = CHOSEN
                token = _pick(keys, found, V, k, p, m, seed, length, largest, total, SHORT)
                tl.store(state_E4 + row * 4 + 1, token)
            elif found <= LIST:
                kind = CHOSEN
                token = _pick(keys, found, V, k, p, m, seed, length, largest, total, LIST)
                tl.store(state_E4 + row * 4 + 1, token)
        tl.store(bounds_E4 + row * 4, low)
        tl.store(bounds_E4 + row * 4 + 1, largest)
        tl.store(bounds_E4 + row * 4 + 2, total)
    tl.store(state_E4 + row * 4, kind)


@triton.jit
def _pick(keys, count, V, k, p, m, seed, length, largest, total, BLOCK: tl.constexpr):
    """The reference on a list that holds every id that may be kept."""
    rank = tl.arange(0, BLOCK)
    key = tl.sort(tl.load(keys + rank, mask=rank < count, other=LEAST), descending=True)
    y, v = value_of(key), id_of(key)
    alive = (rank < count) & (rank < k)
    mass = tl.where(alive, tl.exp(y - largest), 0.0)
    if k < V:
        total = tl.sum(mass)
    before = tl.cumsum(mass, 0) - mass
    kept = alive & ((rank == 0) | ((before < limit(p, total)) & (mass >= m)))
    score = tl.where(kept, race(y, seed, length, v), float("-inf"))
    _, i = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    # a row without a number must not lead out of the vocabulary
    return tl.minimum(tl.max(tl.where(rank == i, v, 0)), V - 1)


@triton.jit
def _race(
    logits_EV, slot_E, floats_SF, ints_EI, top_EC, bounds_E4, state_E4, front_EC2F, front_id_ECF, front_len_EC, stride, V, parts,
    F: tl.constexpr, COLUMNS: tl.constexpr, SEED: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr,
    FRONT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The front of a part: the best score, the best of the ids before that one, and so on. A longer one than FRONT is
    said to have FRONT + 1: what is not shown is worse than the last that is.
    """
    pdl_begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(state_E4 + row * 4) == MANY:
        low, at = tl.load(bounds_E4 + row * 4), row * parts + part
        found = 0
        if tl.load(top_EC + at) >= low:
            i_B = tl.arange(0, BLOCK)
            v_B = id_at(i_B, part, parts, BLOCK, RUNS)
            x = tl.load(logits_EV + row.to(tl.int64) * stride + v_B, mask=v_B < V, other=float("-inf"))
            temperature = tl.load(floats_SF + tl.load(slot_E + row) * F)
            y = scaled(x, temperature)
            seed, length = tl.load(ints_EI + row * COLUMNS + SEED), tl.load(ints_EI + row * COLUMNS)
            able = (y >= low) & (y > float("-inf"))
            score = tl.where(able, race(y, seed, length, v_B), float("-inf"))
            best, i = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
            while (best > float("-inf")) & (found < FRONT):
                value = tl.max(tl.where(i_B == i, y, float("-inf")))
                tl.store(front_EC2F + at * 2 * FRONT + found, best)
                tl.store(front_EC2F + (at * 2 + 1) * FRONT + found, value)
                tl.store(front_id_ECF + at * FRONT + found, id_at(i, part, parts, BLOCK, RUNS))
                score = tl.where((y > value) | ((y == value) & (i_B < i)), score, float("-inf"))
                best, i = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
                found += 1
            found += (best > float("-inf")).to(tl.int32)
        tl.store(front_len_EC + at, found)


@triton.jit
def _merge(
    bounds_E4, state_E4, front_EC2F, front_id_ECF, front_len_EC, record_E2R, record_id_ER, parts,
    FRONT: tl.constexpr, RECORDS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0)
    if tl.load(state_E4 + row * 4) == MANY:
        i = tl.arange(0, BLOCK_C * FRONT)
        part, f = i // FRONT, i % FRONT
        at = row * parts + part
        length = tl.load(front_len_EC + at, mask=part < parts, other=0)
        shown = f < length
        score = tl.load(front_EC2F + at * 2 * FRONT + f, mask=shown, other=float("-inf"))
        value = tl.load(front_EC2F + (at * 2 + 1) * FRONT + f, mask=shown, other=float("-inf"))
        v = tl.load(front_id_ECF + at * FRONT + f, mask=shown, other=0)
        # of a front that is cut off, nothing hidden is better than the last one shown
        hidden = tl.max(tl.where((length > FRONT) & (f == FRONT - 1), score, float("-inf")))
        records = 0
        best, at_best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        while (best > float("-inf")) & (records < RECORDS):
            value_best = tl.max(tl.where(i == at_best, value, float("-inf")))
            v_best = tl.max(tl.where(i == at_best, v, 0))
            tl.store(record_E2R + row * 2 * RECORDS + records, best)
            tl.store(record_E2R + (row * 2 + 1) * RECORDS + records, value_best)
            tl.store(record_id_ER + row * RECORDS + records, v_best)
            score = tl.where((value > value_best) | ((value == value_best) & (v < v_best)), score, float("-inf"))
            best, at_best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
            records += 1
        tl.store(state_E4 + row * 4 + 2, records)
        tl.store(bounds_E4 + row * 4 + 3, tl.maximum(hidden, best))


@triton.jit
def _both(mass, count, other_mass, other_count):
    return mass + other_mass, count + other_count


@triton.jit
def _verify(
    logits_EV, slot_E, floats_SF, ints_EI, top_EC, bounds_E4, state_E4, record_E2R, record_id_ER, mass_ECR, count_ECR, stride, V, parts,
    F: tl.constexpr, COLUMNS: tl.constexpr, SEED: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr,
    RECORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(state_E4 + row * 4) == MANY:
        at = (row * parts + part) * RECORDS
        records = tl.load(state_E4 + row * 4 + 2)
        values, ids = record_E2R + (row * 2 + 1) * RECORDS, record_id_ER + row * RECORDS
        if tl.load(top_EC + row * parts + part) >= tl.load(values):  # the front's values ascend
            v_B = id_at(tl.arange(0, BLOCK), part, parts, BLOCK, RUNS)
            x = tl.load(logits_EV + row.to(tl.int64) * stride + v_B, mask=v_B < V, other=float("-inf"))
            y = scaled(x, tl.load(floats_SF + tl.load(slot_E + row) * F))
            mass = tl.exp(y - tl.load(bounds_E4 + row * 4 + 1))
            for r in range(records):
                value, v = tl.load(values + r), tl.load(ids + r)
                before = (y > value) | ((y == value) & (v_B < v))
                total, count = tl.reduce((tl.where(before, mass, 0.0), before.to(tl.int32)), 0, _both)
                tl.store(mass_ECR + at + r, total)
                tl.store(count_ECR + at + r, count)
        else:
            r_R = tl.arange(0, RECORDS)
            tl.store(mass_ECR + at + r_R, tl.zeros([RECORDS], tl.float32))
            tl.store(count_ECR + at + r_R, tl.zeros([RECORDS], tl.int32))


@triton.jit
def _finish(
    logits_EV, slot_E, floats_SF, ints_EI, top_EC, id_EC, bounds_E4, state_E4, record_E2R, record_id_ER, mass_ECR, count_ECR,
    stop_SK, tokens_SL, state_SI, token_E, done_E, live_E, stride, V, parts, context, L,
    F: tl.constexpr, COLUMNS: tl.constexpr, SEED: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr, RECORDS: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0)
    kind = tl.load(state_E4 + row * 4)
    token = tl.load(state_E4 + row * 4 + 1)
    c_C, r_R = tl.arange(0, BLOCK_C), tl.arange(0, RECORDS)
    top_C = tl.load(top_EC + row * parts + c_C, mask=c_C < parts, other=float("-inf"))
    if kind == DRAWN:
        id_C = tl.load(id_EC + row * parts + c_C, mask=c_C < parts, other=0)
        token = tl.minimum(tl.min(tl.where(top_C == tl.max(top_C), id_C, 0x7FFFFFFF)), V - 1)
    elif kind != CHOSEN:
        temperature, k, p, m = asked(row, slot_E, floats_SF, ints_EI, F, COLUMNS, TOP_K)
        largest, total = tl.load(bounds_E4 + row * 4 + 1), tl.load(bounds_E4 + row * 4 + 2)
        walk = True
        if kind == MANY:
            at = (row * parts + c_C[:, None]) * RECORDS + r_R[None, :]
            shown = r_R < tl.load(state_E4 + row * 4 + 2)
            inside = (c_C < parts)[:, None] & shown[None, :]
            mass_R = tl.sum(tl.load(mass_ECR + at, mask=inside, other=0.0), 0)
            count_R = tl.sum(tl.load(count_ECR + at, mask=inside, other=0), 0)
            score_R = tl.load(record_E2R + row * 2 * RECORDS + r_R, mask=shown, other=float("-inf"))
            value_R = tl.load(record_E2R + (row * 2 + 1) * RECORDS + r_R, mask=shown, other=float("-inf"))
            kept_R = shown & (count_R < k) & (mass_R < limit(p, total)) & (tl.exp(value_R - largest) >= m)
            kept_R = kept_R | (shown & (count_R == 0))
            best, r = tl.max(tl.where(kept_R, score_R, float("-inf")), 0, return_indices=True)
            token = tl.load(record_id_ER + row * RECORDS + r)
            walk = (best <= tl.load(bounds_E4 + row * 4 + 3)) | (best == float("-inf"))
        if walk:
            seed, length = tl.load(ints_EI + row * COLUMNS + SEED), tl.load(ints_EI + row * COLUMNS)
            logits_V = logits_EV + row.to(tl.int64) * stride
            low = tl.load(bounds_E4 + row * 4)
            token = _walk(logits_V, V, temperature, k, p, m, seed, length, low, largest, total, BLOCK)
    token = tl.where(tl.max(top_C) < float("inf"), token, -1)  # see `scan`
    settle(
        row, token.to(tl.int64), slot_E, ints_EI, stop_SK, tokens_SL, state_SI, token_E, done_E, live_E, context, L, COLUMNS, K, BLOCK_K
    )  # fmt: skip


@triton.jit
def _walk(logits_V, V, temperature, k, p, m, seed, length, low, largest, total, BLOCK: tl.constexpr):
    """The front of a row one by one, by one program, up to the first id that is kept. Top-p of what top-k leaves needs
    the mass of all that, so the last of the k is searched before.
    """
    i_B = tl.arange(0, BLOCK)
    last_k = tl.full((), LEAST, tl.int64)
    if (k < V) & (p < 1):
        last_k = kth(logits_V, V, temperature, k, low, largest, BLOCK)
        total = 0.0
        for start in range(0, V, BLOCK):
            y = scaled(tl.load(logits_V + start + i_B, mask=start + i_B < V, other=float("-inf")), temperature)
            total += tl.sum(tl.where(key_of(y, start + i_B) >= last_k, tl.exp(y - largest), 0.0))
    behind, token = last_k - 1, 0
    walking = 64  # ids of a front, of which there are about ln(1 / kept mass): more are none
    while walking > 0:
        best = largest * 0 - float("inf")
        for start in range(0, V, BLOCK):
            v_B = start + i_B
            x = tl.load(logits_V + v_B, mask=v_B < V, other=float("-inf"))
            y = scaled(x, temperature)
            able = (key_of(y, v_B) > behind) & (tl.exp(y - largest) >= m)
            top, i = tl.max(tl.where(able, race(y, seed, length, v_B), float("-inf")), 0, return_indices=True)
            token = tl.where(top > best, start + i, token)
            best = tl.maximum(top, best)
        behind = key_of(scaled(tl.load(logits_V + token), temperature), token)
        count, mass = 0, 0.0
        for start in range(0, V, BLOCK):
            y = scaled(tl.load(logits_V + start + i_B, mask=start + i_B < V, other=float("-inf")), temperature)
            before = key_of(y, start + i_B) > behind
            count += tl.sum(before.to(tl.int32))
            mass += tl.sum(tl.where(before, tl.exp(y - largest), 0.0))
        kept = (count < k) & (mass < limit(p, total)) | (count == 0)
        walking = tl.where(kept, 0, walking - 1)
    return token
