"""The ids of a row above a threshold, without a sort of the vocabulary: what `topk_topp`, `temperature` and `logprobs`
share.

`scan` reads the row once, a part of it a program, and leaves the maxima of groups of 64 ids. The k largest group maxima
are k values, so the threshold is at least the k-th largest (`raise_bound`). Only the groups that reach it are read
again, and their ids at or above it are listed (`list_ids`) under keys whose order is (value, then the smaller id).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.launch import launch_options, max_registers
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.sample.triton import SampledRows, load_logits, nan_to_inf, noisy, scaled
from thalweg.kernels.slot_columns import FLOAT_COLUMNS, INT_COLUMNS, MIN_P, TOP_K, TOP_P

PART = constexpr(4096)  # ids of a program
# ids of a run, and runs of a group, which lie far from each other: likely ids are often neighbours
RUN, RUNS = constexpr(8), constexpr(8)
GROUPS = PART // (RUN * RUNS)  # of a part
TILE = constexpr(64)  # groups of which one program lists ids at a time
LIST = constexpr(2048)  # ids that a row may list, sorted by one program
SHORT = constexpr(256)  # most rows list fewer: a sort of a fifth of the time
LEAST = constexpr(-0x7FFFFFFFFFFFFFFF)  # below every key


class Scan(NamedTuple):
    """Result of a scan of E rows in C parts with G groups, and buffers for its readers."""

    parts: int
    top_EC: Tensor  # largest value; +inf where a row to be sampled has a NaN
    sum_EC: Tensor  # Σ exp(value - largest)
    id_EC: Tensor | None  # the token of a row that is not truncated
    group_EG: Tensor  # largest value of each group
    chosen_EG: Tensor  # int32: the groups that hold listed ids
    key_EN: Tensor  # int64: the keys of listed ids


def scan(rows: SampledRows, is_raw: bool = False) -> Scan:
    """Values are the logits by temperature, or the logits as they are. Rows that are not truncated get their token."""
    count, parts, new = len(rows.logits_EV), triton.cdiv(rows.vocab, PART.value), rows.logits_EV.new_empty
    groups = parts * GROUPS.value
    scanned = Scan(
        parts, new(count, parts), new(count, parts), None if is_raw else new(count, parts, dtype=torch.int32),
        new(count, groups), new(count, groups, dtype=torch.int32), new(count, LIST.value, dtype=torch.int64),
    )  # fmt: skip
    # with so few registers three programs share a multiprocessor, which hides their waiting
    options = max_registers(rows.logits_EV, 40) | launch_options(rows.logits_EV)
    _scan[count, parts](rows, scanned, num_warps=16, **options)
    return scanned


@triton.jit
def id_at(i, part, parts):
    """The i-th id of a part: it holds RUNS stretches of the vocabulary, and of each of them a group holds a run. They
    ascend.
    """
    return (i // (PART // RUNS) * parts + part) * (PART // RUNS) + i % (PART // RUNS)


@triton.jit
def sampling_params(rows, row):
    """→ temperature, top_k, top_p, min_p of a row, and whether they remove ids."""
    at = rows.floats_SF + tl.load(rows.slot_E + row) * FLOAT_COLUMNS
    temperature, p, m = tl.load(at), tl.load(at + TOP_P), tl.load(at + MIN_P)
    k = tl.load(rows.ints_EI + row * INT_COLUMNS + TOP_K)
    return temperature, k, p, m, (temperature > 0) & ((k < rows.vocab) | (p < 1) | (m > 0))


@triton.jit
def key_of(y, v_B):
    """int64 whose order is (value, then the smaller id): the bits of a float, with those of a negative one flipped, are
    ordered as it is.
    """
    bits = tl.where(y == 0, 0.0, y).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - v_B).to(tl.int64)


@triton.jit
def value_of(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _scan(rows, scanned, PDL: constexpr):
    pdl_begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    v_B = id_at(tl.arange(0, PART), part, scanned.parts)
    y = load_logits(rows, row, v_B)
    at = row * scanned.parts + part
    if scanned.id_EC is None:
        _store_groups(y, scanned, at)
    else:
        temperature, _, _, _, truncates = sampling_params(rows, row)
        if truncates:
            _store_groups(nan_to_inf(scaled(y, temperature)), scanned, at)
        else:
            if temperature > 0:
                y = noisy(scaled(y, temperature), rows, row, v_B)
            top, i = tl.max(nan_to_inf(y), 0, return_indices=True, return_indices_tie_break_left=True)
            tl.store(scanned.top_EC + at, top)
            tl.store(scanned.id_EC + at, id_at(i, part, scanned.parts))


@triton.jit
def _store_groups(y, scanned, at):
    group_G = tl.max(tl.max(tl.reshape(y, [RUNS, GROUPS, RUN]), 2), 0)
    top = tl.max(group_G)
    tl.store(scanned.group_EG + at * GROUPS + tl.arange(0, GROUPS), group_G)
    tl.store(scanned.top_EC + at, top)
    tl.store(scanned.sum_EC + at, tl.sum(tl.exp(y - tl.where(top == float("-inf"), 0.0, top))))


@triton.jit
def load_scan(scanned, row, BLOCK_C: constexpr):
    """→ the group maxima of a row, its largest value, Σ exp(value - largest)."""
    c_C, g_G = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_C * GROUPS)
    parts, groups = scanned.parts, scanned.parts * GROUPS
    group_G = tl.load(scanned.group_EG + row * groups + g_G, mask=g_G < groups, other=float("-inf"))
    top_C = tl.load(scanned.top_EC + row * parts + c_C, mask=c_C < parts, other=float("-inf"))
    sum_C = tl.load(scanned.sum_EC + row * parts + c_C, mask=c_C < parts, other=0.0)
    largest = tl.max(top_C)
    return group_G, largest, tl.sum(tl.where(top_C > float("-inf"), sum_C * tl.exp(top_C - largest), 0.0))


@triton.jit
def raise_bound(group_G, low, k, enough, largest):
    """A value above `low`, where there is one, that k group maxima reach, or group maxima of the mass `enough`: the
    threshold is at least this. By bisection, until few group maxima are undecided.
    """
    possible_G = group_G > float("-inf")
    mass_G = tl.exp(group_G - largest)
    lowest = tl.min(tl.where(possible_G, group_G, largest))
    if (lowest > low) & ((tl.sum(possible_G.to(tl.int32)) >= k) | (tl.sum(mass_G) >= enough)):
        low = lowest
    between = tl.where(low > float("-inf"), tl.sum((possible_G & (group_G >= low)).to(tl.int32)), 0)
    high, above, rounds = largest, 0, 0
    while (between > 8 + above // 16) & (rounds < 24):
        middle = low + (high - low) * 0.5
        reach_G = group_G >= middle
        found, mass = tl.sum(reach_G.to(tl.int32)), 0.0
        if enough < float("inf"):
            mass = tl.sum(tl.where(reach_G, mass_G, 0.0))
        holds = (found >= k) | (mass >= enough)
        between = tl.where(holds, found, above + between) - tl.where(holds, above, found)
        above = tl.where(holds, above, found)
        low = tl.where(holds, middle, low)
        high = tl.where(holds, high, middle)
        rounds += 1
    return low


@triton.jit
def list_ids(rows, scanned, row, group_G, low, temperature):
    """Writes the keys of the ids at or above `low`, of the groups that reach it. → how many there are; more than LIST
    are not all written.
    """
    chosen_G = scanned.chosen_EG + row * (scanned.parts * GROUPS)
    keys, logits_V = scanned.key_EN + row.to(tl.int64) * LIST, rows.logits_EV + row.to(tl.int64) * rows.stride
    reach_G = (group_G >= low) & (group_G > float("-inf"))
    count_G = reach_G.to(tl.int32)
    tl.store(chosen_G + tl.cumsum(count_G, 0) - 1, tl.arange(0, group_G.shape[0]), mask=reach_G)
    chosen = tl.sum(count_G)
    tl.debug_barrier()  # threads read what others have stored
    i = tl.arange(0, TILE * RUN * RUNS)
    found, first = 0, 0
    while (first < chosen) & (found <= LIST):
        n = first + i // (RUN * RUNS)
        g = tl.load(chosen_G + n, mask=n < chosen, other=0)
        v = (i // RUN % RUNS * (scanned.parts * GROUPS) + g) * RUN + i % RUN
        x = tl.load(logits_V + v, mask=(n < chosen) & (v < rows.vocab), other=float("-inf"))
        y = scaled(x, temperature)
        above = (y >= low) & (y > float("-inf"))
        count = above.to(tl.int32)
        place = found + tl.cumsum(count, 0) - 1
        tl.store(keys + place, key_of(y, v), mask=above & (place < LIST))
        found += tl.sum(count)
        first += TILE
    tl.debug_barrier()
    return found


@triton.jit
def list_likely(rows, scanned, row, temperature, k, p, m, BLOCK_C: constexpr):
    """Lists every id of a row that may be kept, if there is room. → a value that the threshold does not lie below,
    the largest value, Σ exp(value - largest), how many ids are listed: more than LIST if there is no list.
    """
    group_G, largest, total = load_scan(scanned, row, BLOCK_C)
    low = _lower_bound(group_G, rows.vocab, k, p, m, largest, total)
    groups = scanned.parts * GROUPS
    reach = tl.sum(((group_G >= low) & (group_G > float("-inf"))).to(tl.int32))
    found = tl.full((), LIST + 1, tl.int32)
    # so many groups reach it when three quarters of a list do, if ids fall into groups at random
    if (reach < groups * (1 - tl.exp(-0.75 * LIST / groups))) | (rows.vocab <= LIST):
        found = list_ids(rows, scanned, row, group_G, low, temperature)
    return low, largest, total, found


@triton.jit
def sorted_list(scanned, row, count, BLOCK: constexpr):
    """The keys of a row's list, the largest first."""
    rank = tl.arange(0, BLOCK)
    keys = scanned.key_EN + row.to(tl.int64) * LIST
    return tl.sort(tl.load(keys + rank, mask=rank < count, other=LEAST), descending=True)


@triton.jit
def kept_of_list(scanned, row, count, V, k, p, m, largest, total, BLOCK: constexpr):
    """→ the sorted keys of a list that holds every id that may be kept, and which of them are."""
    rank, key = tl.arange(0, BLOCK), sorted_list(scanned, row, count, BLOCK)
    alive = (rank < count) & (rank < k)
    mass = tl.where(alive, tl.exp(value_of(key) - largest), 0.0)
    if k < V:
        total = tl.sum(mass)
    before = tl.cumsum(mass, 0) - mass
    return key, alive & ((rank == 0) | ((before < mass_limit(p, total)) & (mass >= m)))


@triton.jit
def mass_limit(p, total):
    """The mass before an id from which on top-p drops it."""
    return tl.where(p < 1, p * total, float("inf"))


@triton.jit
def _lower_bound(group_G, V, k, p, m, largest, total):
    """A value that the threshold does not lie below. Top-p together with top-k has none of its own: all of top-k's mass
    counts.
    """
    low = largest * 0 - float("inf")
    enough = low * 0 + float("inf")
    if (p < 1) & (k >= V):
        # what is dropped, 1 - p at least but for one id, is at most V ids of the threshold's mass
        low = largest + (tl.log((1 - p) * total / (V + 1)) - 0.001)
        enough = p * total * 1.00001
    if (m > 0) & ((k >= V) | (p >= 1)):
        low = tl.maximum(low, largest + (tl.log(m) - 0.001))
    return raise_bound(group_G, low, k, enough, largest)


@triton.jit
def load_values(rows, row, start, temperature):
    """→ PART ids of a row from `start` on, their values, and their keys."""
    v_B = start + tl.arange(0, PART)
    y = scaled(load_logits(rows, row, v_B), temperature)
    return v_B, y, key_of(y, v_B)


@triton.jit
def kth_key(rows, row, temperature, k, least, largest):
    """The key of the k-th id of a row, whose value is `least` at least, by bisection; ends early at any key with k ids
    up to it.
    """
    low, high = key_of(least, tl.full((), 0x7FFFFFFF, tl.int32)), key_of(largest, tl.zeros([], tl.int32))
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        count = tl.zeros([], tl.int32)
        for start in range(0, rows.vocab, PART):
            v_B, _, key = load_values(rows, row, start, temperature)
            count += tl.sum(((key >= middle) & (v_B < rows.vocab)).to(tl.int32))
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
    return low
