"""A token of each row after top-k, top-p and min-p, without a sort of the vocabulary and, but for rows of many likely
tokens, in one read of it.

What the three leave is a prefix of the row in the order (value descending, id ascending): `ref.apply_topk_topp`. Six
launches draw from it:

- `scan`, a part of a row: its largest value, Σ exp, the maxima of 64 groups of 64 ids. Greedy and untruncated rows
  have their token here and skip the rest.
- `_choose`, a row: a value that the threshold cannot lie below. For top-k the k-th largest group maximum is one, since
  the k largest are k values. For top-p it comes from the mass of the group maxima, or of what must be dropped. For
  min-p it is the definition. Where only some thousand ids lie above, it lists them, sorts them and does what the
  reference does.
- `_race`, a part, of rows of MANY likely ids: the best score among them, and the part's front (below).
- `_merge`, a row: its front out of its parts'.
- `_verify`, a part: how many ids, and how much mass, lie before each id of the row's front.
- `_finish`, a row: of MANY the first of its front that is kept; then `append_token`.

A front needs no threshold. If an id is dropped, all ids behind it are dropped. So after the id with the best score only
ids BEFORE it (in the order above) can matter: of these the best again, and so on up to the first id of all, which is
always kept. Fronts have about ln(1 / kept mass) ids. `_finish` walks through the row by itself where a front is cut off
(8 ids a part, 16 a row) before an id is kept, where a list overflows (thousands of equal logits), and for top-k above a
thousand together with top-p. That is as exact, and takes some hundred microseconds.

Floor: 4 · E · V bytes read once: 10.7 µs for 64 rows of 129,280 on an H100, 42.7 µs for 256. Parts of rows that
hold nothing above the threshold are not read again. All sums have a fixed order, and nothing depends on the number of
rows: a row's token is the same in every batch. The mass before the threshold is a sum in float32 (relative error below
1e-5), as in the reference: ids whose cumulative mass is nearer to top-p than that may be on either side of it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.build_inputs.ref import SlotTensors
from thalweg.kernels.launch import launch_options, max_registers
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.sample.triton import (
    SampledRows,
    SampledTokens,
    append_token,
    load_logits,
    noisy,
    scaled,
    temperature_of,
)
from thalweg.kernels.topk_topp_threshold.triton import (
    LEAST,
    LIST,
    PART,
    SHORT,
    id_at,
    id_of,
    kept_of_list,
    key_of,
    kth_key,
    list_likely,
    load_values,
    mass_limit,
    sampling_params,
    scan,
    value_of,
)

FRONT, RECORDS = constexpr(8), constexpr(16)  # ids of a part's and of a row's front
DRAWN, MANY, WALK, CHOSEN = map(constexpr, range(4))  # kinds of rows


class Fronts(NamedTuple):
    """Buffers between the launches. E rows, C parts, F and R ids of a part's and of a row's front."""

    # a value below which no kept id lies, largest value, Σ exp(value - largest), best score that no front shows
    bounds_E4: Tensor
    state_E4: Tensor  # int32: kind, token, ids in the row's front
    part_EC2F: Tensor  # scores and values of the parts' fronts
    part_id_ECF: Tensor  # int32
    part_len_EC: Tensor  # int32
    row_E2R: Tensor  # scores and values of the rows' fronts
    row_id_ER: Tensor  # int32
    mass_ECR: Tensor  # of a part before each id of its row's front
    count_ECR: Tensor  # int32: ids of a part before it


def sample_tokens(rows: SampledRows, slots: SlotTensors, out: SampledTokens) -> None:
    """Writes `out`, the tokens plane, and the first three columns of the slots' integers."""
    scanned, options, count = scan(rows), launch_options(rows.logits_EV), len(rows.logits_EV)
    parts, front, records = scanned.parts, FRONT.value, RECORDS.value
    floats = rows.logits_EV.new_empty
    ints = partial(floats, dtype=torch.int32)
    fronts = Fronts(
        floats(count, 4), ints(count, 4), floats(count, parts, 2, front), ints(count, parts, front), ints(count, parts),
        floats(count, 2, records), ints(count, records), floats(count, parts, records), ints(count, parts, records),
    )  # fmt: skip
    block = triton.next_power_of_2(parts)
    _choose[(count,)](rows, scanned, fronts, block, num_warps=8, **options)
    # so many registers let two and three programs of a part share a multiprocessor
    _race[count, parts](rows, scanned, fronts, num_warps=16, **max_registers(rows.logits_EV, 64), **options)
    _merge[(count,)](fronts, parts, block, num_warps=4, **options)
    _verify[count, parts](rows, scanned, fronts, num_warps=16, **max_registers(rows.logits_EV, 40), **options)
    _finish[(count,)](
        rows, scanned, fronts, slots, out, slots.tokens_SL.shape[1], slots.stop_SK.shape[1], block, num_warps=8,
        **options,
    )  # fmt: skip


@triton.jit
def _choose(rows, scanned, fronts, BLOCK_C: constexpr, PDL: constexpr):
    pdl_begin(PDL)
    row = tl.program_id(0)
    temperature, k, p, m, truncates = sampling_params(rows, row)
    kind = DRAWN
    if truncates:
        low, largest, total, found = list_likely(rows, scanned, row, temperature, k, p, m, BLOCK_C)
        kind = MANY
        if (k < rows.vocab) & (p < 1):
            kind = WALK
        if found <= SHORT:
            kind = CHOSEN
            _pick(rows, scanned, fronts, row, found, k, p, m, largest, total, SHORT)
        elif found <= LIST:
            kind = CHOSEN
            _pick(rows, scanned, fronts, row, found, k, p, m, largest, total, LIST)
        tl.store(fronts.bounds_E4 + row * 4, low)
        tl.store(fronts.bounds_E4 + row * 4 + 1, largest)
        tl.store(fronts.bounds_E4 + row * 4 + 2, total)
    tl.store(fronts.state_E4 + row * 4, kind)


@triton.jit
def _pick(rows, scanned, fronts, row, count, k, p, m, largest, total, BLOCK: constexpr):
    """Stores the token that the reference draws from a list that holds every id that may be kept."""
    key, kept = kept_of_list(scanned, row, count, rows.vocab, k, p, m, largest, total, BLOCK)
    v = id_of(key)
    score = tl.where(kept, noisy(value_of(key), rows, row, v), float("-inf"))
    _, i = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    # a row without a number must not lead out of the vocabulary
    token = tl.minimum(tl.max(tl.where(tl.arange(0, BLOCK) == i, v, 0)), rows.vocab - 1)
    tl.store(fronts.state_E4 + row * 4 + 1, token)


@triton.jit
def _race(rows, scanned, fronts, PDL: constexpr):
    """The front of a part: the best score, the best of the ids before that one, and so on. The length of a longer one
    is FRONT + 1: what is not shown is worse than the last that is.
    """
    pdl_begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(fronts.state_E4 + row * 4) == MANY:
        low, at = tl.load(fronts.bounds_E4 + row * 4), row * scanned.parts + part
        found = 0
        if tl.load(scanned.top_EC + at) >= low:
            i_B = tl.arange(0, PART)
            v_B = id_at(i_B, part, scanned.parts)
            y = scaled(load_logits(rows, row, v_B), temperature_of(rows, row))
            able = (y >= low) & (y > float("-inf"))
            score = tl.where(able, noisy(y, rows, row, v_B), float("-inf"))
            best, i = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
            while (best > float("-inf")) & (found < FRONT):
                value = tl.max(tl.where(i_B == i, y, float("-inf")))
                tl.store(fronts.part_EC2F + at * 2 * FRONT + found, best)
                tl.store(fronts.part_EC2F + (at * 2 + 1) * FRONT + found, value)
                tl.store(fronts.part_id_ECF + at * FRONT + found, id_at(i, part, scanned.parts))
                score = tl.where((y > value) | ((y == value) & (i_B < i)), score, float("-inf"))
                best, i = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
                found += 1
            found += (best > float("-inf")).to(tl.int32)
        tl.store(fronts.part_len_EC + at, found)


@triton.jit
def _merge(fronts, parts, BLOCK_C: constexpr, PDL: constexpr):
    pdl_begin(PDL)
    row = tl.program_id(0)
    if tl.load(fronts.state_E4 + row * 4) == MANY:
        i = tl.arange(0, BLOCK_C * FRONT)
        part, f = i // FRONT, i % FRONT
        at = row * parts + part
        length = tl.load(fronts.part_len_EC + at, mask=part < parts, other=0)
        shown = f < length
        score = tl.load(fronts.part_EC2F + at * 2 * FRONT + f, mask=shown, other=float("-inf"))
        value = tl.load(fronts.part_EC2F + (at * 2 + 1) * FRONT + f, mask=shown, other=float("-inf"))
        v = tl.load(fronts.part_id_ECF + at * FRONT + f, mask=shown, other=0)
        # of a front that is cut off, nothing hidden is better than the last one shown
        hidden = tl.max(tl.where((length > FRONT) & (f == FRONT - 1), score, float("-inf")))
        records = 0
        best, at_best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        while (best > float("-inf")) & (records < RECORDS):
            value_best = tl.max(tl.where(i == at_best, value, float("-inf")))
            v_best = tl.max(tl.where(i == at_best, v, 0))
            tl.store(fronts.row_E2R + row * 2 * RECORDS + records, best)
            tl.store(fronts.row_E2R + (row * 2 + 1) * RECORDS + records, value_best)
            tl.store(fronts.row_id_ER + row * RECORDS + records, v_best)
            score = tl.where((value > value_best) | ((value == value_best) & (v < v_best)), score, float("-inf"))
            best, at_best = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
            records += 1
        tl.store(fronts.state_E4 + row * 4 + 2, records)
        tl.store(fronts.bounds_E4 + row * 4 + 3, tl.maximum(hidden, best))


@triton.jit
def _both(mass, count, other_mass, other_count):
    return mass + other_mass, count + other_count


@triton.jit
def _verify(rows, scanned, fronts, PDL: constexpr):
    pdl_begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(fronts.state_E4 + row * 4) == MANY:
        at = (row * scanned.parts + part) * RECORDS
        records = tl.load(fronts.state_E4 + row * 4 + 2)
        values, ids = fronts.row_E2R + (row * 2 + 1) * RECORDS, fronts.row_id_ER + row * RECORDS
        if tl.load(scanned.top_EC + row * scanned.parts + part) >= tl.load(values):  # the front's values ascend
            v_B = id_at(tl.arange(0, PART), part, scanned.parts)
            y = scaled(load_logits(rows, row, v_B), temperature_of(rows, row))
            mass = tl.exp(y - tl.load(fronts.bounds_E4 + row * 4 + 1))
            for r in range(records):
                value, v = tl.load(values + r), tl.load(ids + r)
                before = (y > value) | ((y == value) & (v_B < v))
                total, count = tl.reduce((tl.where(before, mass, 0.0), before.to(tl.int32)), 0, _both)
                tl.store(fronts.mass_ECR + at + r, total)
                tl.store(fronts.count_ECR + at + r, count)
        else:
            r_R = tl.arange(0, RECORDS)
            tl.store(fronts.mass_ECR + at + r_R, tl.zeros([RECORDS], tl.float32))
            tl.store(fronts.count_ECR + at + r_R, tl.zeros([RECORDS], tl.int32))


@triton.jit
def _finish(rows, scanned, fronts, slots, out, L, K: constexpr, BLOCK_C: constexpr, PDL: constexpr):
    pdl_begin(PDL)
    row, parts = tl.program_id(0), scanned.parts
    kind = tl.load(fronts.state_E4 + row * 4)
    token = tl.load(fronts.state_E4 + row * 4 + 1)
    c_C, r_R = tl.arange(0, BLOCK_C), tl.arange(0, RECORDS)
    top_C = tl.load(scanned.top_EC + row * parts + c_C, mask=c_C < parts, other=float("-inf"))
    if kind == DRAWN:
        id_C = tl.load(scanned.id_EC + row * parts + c_C, mask=c_C < parts, other=0)
        token = tl.minimum(tl.min(tl.where(top_C == tl.max(top_C), id_C, 0x7FFFFFFF)), rows.vocab - 1)
    elif kind != CHOSEN:
        temperature, k, p, m, _ = sampling_params(rows, row)
        largest, total = tl.load(fronts.bounds_E4 + row * 4 + 1), tl.load(fronts.bounds_E4 + row * 4 + 2)
        walk = True
        if kind == MANY:
            at = (row * parts + c_C[:, None]) * RECORDS + r_R[None, :]
            shown = r_R < tl.load(fronts.state_E4 + row * 4 + 2)
            inside = (c_C < parts)[:, None] & shown[None, :]
            mass_R = tl.sum(tl.load(fronts.mass_ECR + at, mask=inside, other=0.0), 0)
            count_R = tl.sum(tl.load(fronts.count_ECR + at, mask=inside, other=0), 0)
            score_R = tl.load(fronts.row_E2R + row * 2 * RECORDS + r_R, mask=shown, other=float("-inf"))
            value_R = tl.load(fronts.row_E2R + (row * 2 + 1) * RECORDS + r_R, mask=shown, other=float("-inf"))
            kept_R = shown & (count_R < k) & (mass_R < mass_limit(p, total)) & (tl.exp(value_R - largest) >= m)
            kept_R = kept_R | (shown & (count_R == 0))
            best, r = tl.max(tl.where(kept_R, score_R, float("-inf")), 0, return_indices=True)
            token = tl.load(fronts.row_id_ER + row * RECORDS + r)
            walk = (best <= tl.load(fronts.bounds_E4 + row * 4 + 3)) | (best == float("-inf"))
        if walk:
            token = _walk(rows, row, temperature, k, p, m, tl.load(fronts.bounds_E4 + row * 4), largest, total)
    token = tl.where(tl.max(top_C) < float("inf"), token, -1)  # see `Scan.top_EC`
    append_token(row, token.to(tl.int64), rows, slots, out, L, K)


@triton.jit
def _walk(rows, row, temperature, k, p, m, low, largest, total):
    """The front of a row one by one, by one program, up to the first id that is kept. Top-p of what top-k leaves needs
    the mass of all that, so the last of the k is searched before.
    """
    V = rows.vocab
    last_k = tl.full((), LEAST, tl.int64)
    if (k < V) & (p < 1):
        last_k = kth_key(rows, row, temperature, k, low, largest)
        total = 0.0
        for start in range(0, V, PART):
            _, y, key = load_values(rows, row, start, temperature)
            total += tl.sum(tl.where(key >= last_k, tl.exp(y - largest), 0.0))
    behind, token = last_k - 1, 0
    walking = 64  # ids of a front, of which there are about ln(1 / kept mass): more are none
    while walking > 0:
        best = largest * 0 - float("inf")
        for start in range(0, V, PART):
            v_B, y, key = load_values(rows, row, start, temperature)
            able = (key > behind) & (tl.exp(y - largest) >= m)
            top, i = tl.max(tl.where(able, noisy(y, rows, row, v_B), float("-inf")), 0, return_indices=True)
            token = tl.where(top > best, start + i, token)
            best = tl.maximum(top, best)
        behind = key_of(scaled(load_logits(rows, row, token), temperature), token)
        count, mass = 0, 0.0
        for start in range(0, V, PART):
            _, y, key = load_values(rows, row, start, temperature)
            count += tl.sum((key > behind).to(tl.int32))
            mass += tl.sum(tl.where(key > behind, tl.exp(y - largest), 0.0))
        kept = (count < k) & (mass < mass_limit(p, total)) | (count == 0)
        walking = tl.where(kept, 0, walking - 1)
    return token
