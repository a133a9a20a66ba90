"""The next token of each row, and what it does to its slot, in two launches: what `sampling.sample` says, where nothing
but temperature is asked.

First every block finds the best entry of its part of a row: of the logits where the temperature is 0, else of the
exponential race, whose coins are computed on the way (`sampling.random`). Then one block a row takes the best of the
parts, appends it and ends the slot at a stop id or its end. Floor: 4 · E · V bytes read once, 0.17 µs a row of 129,280
on an H100. Of equal entries the lowest id wins. A row that has a NaN has no token: -1 is drawn, and ends its slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin

PART = 4096  # entries a block


@triton.jit
def _mix(x):
    """SplitMix64's finaliser (Steele, Lea, Flood 2014, figure 15)."""
    x ^= x >> 30
    x *= 0xBF58476D1CE4E5B9
    x ^= x >> 27
    x *= 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def scaled(x, temperature):
    """x / temperature, rounded as IEEE does by one correction of the product with the reciprocal (Markstein);
    infinities stay.
    """
    one = temperature * 0 + 1.0
    inverse = tl.div_rn(one, temperature)
    y = x * inverse
    divisor, inverse = tl.zeros_like(x) + temperature, tl.zeros_like(x) + inverse
    return tl.where(tl.abs(y) < float("inf"), tl.fma(tl.fma(-y, divisor, x), inverse, y), y)


@triton.jit
def race(y, seed, length, v_B):
    """The exponential race's scores of these token ids: y minus the logarithm of a coin that (seed, length, id) decide
    alone. The coin is -log1p(-u), by its series where u is small: exact to 6e-7.
    """
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix(_mix(seed.to(tl.uint64, bitcast=True) * golden + length.to(tl.uint64, bitcast=True)) + golden)
    bits = _mix(key + v_B.to(tl.uint64) * golden) >> 32
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    coin = tl.where(u < 0.0625, series, -tl.extra.cuda.libdevice.fast_logf(1 - u))
    return y - tl.extra.cuda.libdevice.fast_logf(coin)


@triton.jit
def marked(y):
    """Scores with +inf for what is no number and for nothing else: a maximum, which would pass by a NaN, finds it."""
    return tl.where(y == y, tl.minimum(y, 3.4028234663852886e38), float("inf"))


@triton.jit
def settle(
    row, token, slot_E, ints_EI, stop_SK, tokens_SL, state_SI, token_E, done_E, live_E, context, L,
    COLUMNS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Appends the row's token (int64) to its slot and ends that at a stop id or its end, or where the token is none
    (-1), for which 0 is appended; of a slot that had ended nothing changes.
    """
    k_B = tl.arange(0, BLOCK_K)
    slot = tl.load(slot_E + row)
    length, end = tl.load(ints_EI + row * COLUMNS), tl.load(ints_EI + row * COLUMNS + 2)
    live = (end > 0).to(tl.int64)
    new = length + live
    stops = tl.load(stop_SK + slot * K + k_B, mask=k_B < K, other=-1)
    going = (new < end) & (tl.sum((stops == token).to(tl.int32)) == 0) & (token >= 0)
    tl.store(tokens_SL + slot * L + tl.where(live > 0, length, context), tl.maximum(token, 0).to(tl.int32))
    tl.store(state_SI + slot * COLUMNS, new)
    tl.store(state_SI + slot * COLUMNS + 1, new - 1)
    tl.store(state_SI + slot * COLUMNS + 2, tl.where(going, end, 0))
    tl.store(token_E + row, token)
    tl.store(done_E + row, going == 0)
    tl.store(live_E + row, live > 0)


@triton.jit
def _best_of_parts(
    logits_EV,
    floats_SF,
    slot_E,
    ints_EI,
    top_EC,
    id_EC,
    stride,
    V,
    F: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEED: tl.constexpr,
    RANDOM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    v_B = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_EV + row.to(tl.int64) * stride + v_B, mask=v_B < V, other=float("-inf"))
    if RANDOM:
        temperature = tl.load(floats_SF + tl.load(slot_E + row) * F)
        if temperature > 0:
            seed, length = tl.load(ints_EI + row * COLUMNS + SEED), tl.load(ints_EI + row * COLUMNS)
            x = race(scaled(x, temperature), seed, length, v_B)
    top, at = tl.max(marked(x), 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(top_EC + row * tl.num_programs(1) + part, top)
    tl.store(id_EC + row * tl.num_programs(1) + part, part * BLOCK + at)


@triton.jit
def _settle(
    top_EC, id_EC, slot_E, ints_EI, stop_SK, tokens_SL, state_SI, token_E, done_E, live_E, context, L, parts,
    COLUMNS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0)
    c_B = tl.arange(0, BLOCK_C)
    top = tl.load(top_EC + row * parts + c_B, mask=c_B < parts, other=float("-inf"))
    best, part = tl.max(top, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.where(best < float("inf"), tl.load(id_EC + row * parts + part), -1).to(tl.int64)
    settle(
        row,
        token,
        slot_E,
        ints_EI,
        stop_SK,
        tokens_SL,
        state_SI,
        token_E,
        done_E,
        live_E,
        context,
        L,
        COLUMNS,
        K,
        BLOCK_K,
    )


def draw(
    logits_EV: Tensor,
    slot_E: Tensor,
    ints_EI: Tensor,
    ints_SI: Tensor,
    floats_SF: Tensor,
    stop_SK: Tensor,
    tokens_SL: Tensor,
    context: int,
    seed: int,
    random: bool,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Writes token int64 [E], done bool [E], live bool [E] into `out`, as `sampling.sample.Sampled` has them;
    tokens_SL; and the first three columns of ints_SI.

    logits float32. slot_E int64: the rows' slots; ints_EI int64: their integers as the step found them (length, at,
    end, … the seed in column `seed`). floats_SF float32: the temperature in column 0. random: whether any row samples.
    """
    rows, vocab = logits_EV.shape
    device, parts = logits_EV.device, triton.cdiv(vocab, PART)
    top = torch.empty(rows, parts, dtype=torch.float32, device=device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=device)
    _best_of_parts[rows, parts](
        logits_EV,
        floats_SF,
        slot_E,
        ints_EI,
        top,
        ids,
        logits_EV.stride(0),
        vocab,
        floats_SF.shape[1],
        ints_EI.shape[1],
        seed,
        random,
        PART,
        num_warps=8,
        **launch_options(logits_EV),
    )
    _settle[(rows,)](
        top, ids, slot_E, ints_EI, stop_SK, tokens_SL, ints_SI, *out, context, tokens_SL.shape[1], parts,
        ints_EI.shape[1], stop_SK.shape[1], triton.next_power_of_2(stop_SK.shape[1]), triton.next_power_of_2(parts),
        num_warps=1, **launch_options(logits_EV),
    )  # fmt: skip
