"""The ids of a row above a border, found without a sort of the vocabulary: what `truncate`, `temper` and `logprobs`
share.

`scan` reads the row once, a part of it a program, and leaves the maxima of groups of 64 ids. The k largest group maxima
are k values, so the k-th largest is a value that the border cannot lie below (`narrow`); the groups that reach it, and
nothing else, are read again, and their ids at or above it listed (`listed`) under keys whose order is (value, then the
smaller id).
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.sample.triton import marked, race, scaled

PART = 4096  # ids a program
RUN, RUNS = 8, 8  # ids of a run and runs of a group, far apart from each other: what is likely often stands together
GROUPS = PART // (RUN * RUNS)  # of a part
TILE = 64  # groups of which one program lists ids at a time
# with so few registers three programs share a multiprocessor, which hides their waiting
SCAN = {"num_warps": 16, "maxnreg": 40}
LIST = 2048  # ids that a row may list, sorted by one program
SHORT = 256  # most rows list fewer: a sort of a fifth of the time
LEAST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below every key


@triton.jit
def id_at(i, part, parts, BLOCK: tl.constexpr, RUNS: tl.constexpr):
    """The i-th id of a part: it holds RUNS stretches of the vocabulary, and of each of them a group holds a run. They
    ascend.
    """
    return (i // (BLOCK // RUNS) * parts + part) * (BLOCK // RUNS) + i % (BLOCK // RUNS)


@triton.jit
def asked(row, slot_E, floats_SF, ints_EI, F: tl.constexpr, COLUMNS: tl.constexpr, TOP_K: tl.constexpr):
    """→ temperature, top_k, top_p, min_p of a row."""
    at = floats_SF + tl.load(slot_E + row) * F
    return tl.load(at), tl.load(ints_EI + row * COLUMNS + TOP_K), tl.load(at + 1), tl.load(at + 2)


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
def scan(
    logits_EV,
    slot_E,
    floats_SF,
    ints_EI,
    top_EC,
    sum_EC,
    id_EC,
    group_EG,
    stride,
    V,
    parts,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEED: tl.constexpr,
    TOP_K: tl.constexpr,
    RAW: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """RAW: the logits themselves, whatever the row wishes; else a row with a NaN has a largest value of +inf, and no
    other has.
    """
    pdl_begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    v_B = id_at(tl.arange(0, BLOCK), part, parts, BLOCK, RUNS)
    y = tl.load(logits_EV + row.to(tl.int64) * stride + v_B, mask=v_B < V, other=float("-inf"))
    at = row * parts + part
    if RAW:
        _store_groups(y, top_EC, sum_EC, group_EG, at, BLOCK, RUN, RUNS)
    else:
        temperature, k, p, m = asked(row, slot_E, floats_SF, ints_EI, F, COLUMNS, TOP_K)
        if (temperature > 0) & ((k < V) | (p < 1) | (m > 0)):
            _store_groups(marked(scaled(y, temperature)), top_EC, sum_EC, group_EG, at, BLOCK, RUN, RUNS)
        else:
            if temperature > 0:
                seed, length = tl.load(ints_EI + row * COLUMNS + SEED), tl.load(ints_EI + row * COLUMNS)
                y = race(scaled(y, temperature), seed, length, v_B)
            top, i = tl.max(marked(y), 0, return_indices=True, return_indices_tie_break_left=True)
            tl.store(top_EC + at, top)
            tl.store(id_EC + at, id_at(i, part, parts, BLOCK, RUNS))


@triton.jit
def _store_groups(y, top_EC, sum_EC, group_EG, at, BLOCK: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr):
    GROUPS: tl.constexpr = BLOCK // (RUN * RUNS)
    group_G = tl.max(tl.max(tl.reshape(y, [RUNS, GROUPS, RUN]), 2), 0)
    top = tl.max(group_G)
    tl.store(group_EG + at * GROUPS + tl.arange(0, GROUPS), group_G)
    tl.store(top_EC + at, top)
    tl.store(sum_EC + at, tl.sum(tl.exp(y - tl.where(top == float("-inf"), 0.0, top))))


@triton.jit
def overall(top_EC, sum_EC, row, parts, BLOCK_C: tl.constexpr):
    """→ largest value of a row, Σ exp(value - largest)."""
    c_C = tl.arange(0, BLOCK_C)
    top_C = tl.load(top_EC + row * parts + c_C, mask=c_C < parts, other=float("-inf"))
    sum_C = tl.load(sum_EC + row * parts + c_C, mask=c_C < parts, other=0.0)
    largest = tl.max(top_C)
    return largest, tl.sum(tl.where(top_C > float("-inf"), sum_C * tl.exp(top_C - largest), 0.0))


@triton.jit
def narrow(group_G, low, k, enough, largest):
    """A larger value than `low`, where there is one, that k group maxima reach, or ones of mass `enough`: the border
    cannot lie below it either. By bisection, until few group maxima lie between what is known to do and what is known
    not to.
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
def listed(
    logits_V, group_G, low, temperature, chosen_G, keys, V, groups,
    RUN: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr, LIST: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Writes the keys of the ids at or above `low`, of the groups that reach it. → how many there are; more than LIST
    are not all written.
    """
    reach_G = (group_G >= low) & (group_G > float("-inf"))
    count_G = reach_G.to(tl.int32)
    tl.store(chosen_G + tl.cumsum(count_G, 0) - 1, tl.arange(0, BLOCK_G), mask=reach_G)
    chosen = tl.sum(count_G)
    tl.debug_barrier()  # threads read what others have stored
    i = tl.arange(0, TILE * RUN * RUNS)
    found, first = 0, 0
    while (first < chosen) & (found <= LIST):
        n = first + i // (RUN * RUNS)
        g = tl.load(chosen_G + n, mask=n < chosen, other=0)
        v = (i // RUN % RUNS * groups + g) * RUN + i % RUN
        y = scaled(tl.load(logits_V + v, mask=(n < chosen) & (v < V), other=float("-inf")), temperature)
        above = (y >= low) & (y > float("-inf"))
        count = above.to(tl.int32)
        place = found + tl.cumsum(count, 0) - 1
        tl.store(keys + place, key_of(y, v), mask=above & (place < LIST))
        found += tl.sum(count)
        first += TILE
    tl.debug_barrier()
    return found


@triton.jit
def limit(p, total):
    """The mass before an id from which on top-p drops it."""
    return tl.where(p < 1, p * total, float("inf"))


@triton.jit
def least_of(group_G, V, k, p, m, largest, total):
    """A value that the border does not lie below. Together with top-p, top-k's is the only one: all of its mass
    counts.
    """
    low = largest * 0 - float("inf")
    enough = low * 0 + float("inf")
    if (p < 1) & (k >= V):
        # what is dropped, 1 - p at least but for one id, is at most V ids of the border's mass
        low = largest + (tl.log((1 - p) * total / (V + 1)) - 0.001)
        enough = p * total * 1.00001
    if (m > 0) & ((k >= V) | (p >= 1)):
        low = tl.maximum(low, largest + (tl.log(m) - 0.001))
    return narrow(group_G, low, k, enough, largest)


@triton.jit
def kth(logits_V, V, temperature, k, least, largest, BLOCK: tl.constexpr):
    """The key of the k-th id of a row, whose value is `least` at least, by bisection; ends early at any key with k ids
    up to it.
    """
    i_B = tl.arange(0, BLOCK)
    low, high = key_of(least, tl.full((), 0x7FFFFFFF, tl.int32)), key_of(largest, tl.zeros([], tl.int32))
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # rounded up, without overflow
        count = tl.zeros([], tl.int32)
        for start in range(0, V, BLOCK):
            y = scaled(tl.load(logits_V + start + i_B, mask=start + i_B < V, other=float("-inf")), temperature)
            count += tl.sum(((key_of(y, start + i_B) >= middle) & (start + i_B < V)).to(tl.int32))
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
    return low
