"""The next token of each row, and what it does to its slot, in two launches: what `sampling.sample` says, where nothing but temperature is asked.

First every block finds the best entry of its part of a row: of the logits where the temperature is 0, else of the exponential race,
whose coins are computed on the way (`sampling.random`). Then one block a row takes the best of the parts, appends it and ends the slot at a
stop id or its end. Floor: 4 · E · V bytes read once, 0.17 µs a row of 129,280 on an H100. Of equal entries the lowest id wins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def _best_of_parts(
    logits_EV, floats_SF, slot_E, ints_EI, top_EC, id_EC, stride, V,
    F: tl.constexpr, COLUMNS: tl.constexpr, SEED: tl.constexpr, RANDOM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0), tl.program_id(1)
    v_B = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_EV + row.to(tl.int64) * stride + v_B, mask=v_B < V, other=float("-inf"))
    if RANDOM:
        temperature = tl.load(floats_SF + tl.load(slot_E + row) * F)
        if temperature > 0:
            golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
            seed = tl.load(ints_EI + row * COLUMNS + SEED).to(tl.uint64, bitcast=True)
            length = tl.load(ints_EI + row * COLUMNS).to(tl.uint64, bitcast=True)
            key = _mix(_mix(seed * golden + length) + golden)
            bits = _mix(key + v_B.to(tl.uint64) * golden) >> 32
            uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
            x = x / temperature - tl.log(-tl.extra.cuda.libdevice.log1p(-uniform))
    top, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(top_EC + row * tl.num_programs(1) + part, top)
    tl.store(id_EC + row * tl.num_programs(1) + part, part * BLOCK + at)


@triton.jit
def _settle(
    top_EC, id_EC, slot_E, ints_EI, stop_SK, tokens_SL, state_SI, token_E, done_E, live_E, context, L, parts,
    COLUMNS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    c_B, k_B = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    top = tl.load(top_EC + row * parts + c_B, mask=c_B < parts, other=float("-inf"))
    _, part = tl.max(top, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(id_EC + row * parts + part).to(tl.int64)
    slot = tl.load(slot_E + row)
    length, end = tl.load(ints_EI + row * COLUMNS), tl.load(ints_EI + row * COLUMNS + 2)
    live = (end > 0).to(tl.int64)
    new = length + live
    stops = tl.load(stop_SK + slot * K + k_B, mask=k_B < K, other=-1)
    going = (new < end) & (tl.sum((stops == token).to(tl.int32)) == 0)
    tl.store(tokens_SL + slot * L + tl.where(live > 0, length, context), token.to(tl.int32))
    tl.store(state_SI + slot * COLUMNS, new)
    tl.store(state_SI + slot * COLUMNS + 1, new - 1)
    tl.store(state_SI + slot * COLUMNS + 2, tl.where(going, end, 0))
    tl.store(token_E + row, token)
    tl.store(done_E + row, going == 0)
    tl.store(live_E + row, live > 0)


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
    """Writes token int64 [E], done bool [E], live bool [E] into `out`, as `sampling.sample.Sampled` has them; tokens_SL; and the first three
    columns of ints_SI.

    logits float32. slot_E int64: the rows' slots; ints_EI int64: their integers as the step found them (length, at, end, … the seed in
    column `seed`). floats_SF float32: the temperature in column 0. random: whether any row samples.
    """
    rows, vocab = logits_EV.shape
    device, parts = logits_EV.device, triton.cdiv(vocab, PART)
    top = torch.empty(rows, parts, dtype=torch.float32, device=device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=device)
    _best_of_parts[rows, parts](
        logits_EV, floats_SF, slot_E, ints_EI, top, ids, logits_EV.stride(0), vocab, floats_SF.shape[1], ints_EI.shape[1],
        seed, random, PART, True, num_warps=8, launch_pdl=True,
    )  # fmt: skip
    _settle[(rows,)](
        top, ids, slot_E, ints_EI, stop_SK, tokens_SL, ints_SI, *out, context, tokens_SL.shape[1], parts,
        ints_EI.shape[1], stop_SK.shape[1], triton.next_power_of_2(stop_SK.shape[1]), triton.next_power_of_2(parts), True,
        num_warps=1, launch_pdl=True,
    )  # fmt: skip
