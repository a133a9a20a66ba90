"""Edits of the logits in place: penalties, biases and minimum lengths in one launch, grammars in another.

Of a vocabulary of 129,280 a sequence has some thousand ids, and a bias names some. One program a row edits those and
reads nothing else. Tokens are counted in a plane of integers, of which only the places of the row's own tokens are ever
written or read, so nothing of the size of the vocabulary is cleared. First these places become 0. Then every token of
the output adds 1. Then the token that takes the count first makes the edit. Counts do not depend on the order of
additions, so neither does the result.

For nodes of a tree, a launch of its own counts what is before the root, once for all of them, and notes where each id
comes first: that place makes the edit. A node adds its path's drafts.

Floor: 4 bytes a known token and a few sectors an id, which up to some 100,000 tokens is less than the time of a launch.
A forbidden id costs a write of 4 bytes: 517 KB a row, 0.17 µs on an H100.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.build_inputs.ref import SlotTensors
from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.sample.triton import SampledRows
from thalweg.kernels.slot_columns import (
    FLOAT_COLUMNS,
    FREQUENCY,
    INT_COLUMNS,
    LENGTH,
    MIN_LEN,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
)

BLOCK = constexpr(2048)  # tokens at a time
PART = constexpr(4096)  # ids of a program that forbids
NOWHERE = constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["query"])
def _adjust(
    rows, slots, count_EV, first_EV, path_ED, bias_ids_SB, bias_SB, L, query, banned,
    K: constexpr, B: constexpr, D: constexpr, PENALISED: constexpr, BIASED: constexpr, PDL: constexpr,
):  # fmt: skip
    """D: drafts of a path at most, 0 where rows are no nodes of trees."""
    pdl_begin(PDL)
    row = tl.program_id(0)
    slot, ints = tl.load(rows.slot_E + row), rows.ints_EI + row * INT_COLUMNS
    logits_V, length = rows.logits_EV + row.to(tl.int64) * rows.stride, tl.load(ints)
    if PENALISED:
        at = rows.floats_SF + slot * FLOAT_COLUMNS
        penalties = tl.load(at + REPETITION), tl.load(at + FREQUENCY), tl.load(at + PRESENCE)
        if (penalties[0] != 1) | (penalties[1] != 0) | (penalties[2] != 0):
            tokens_L = slots.tokens_SL + slot * L
            if D > 0:
                tree = row // query
                counted = tree.to(tl.int64) * rows.vocab
                known = tl.load(rows.ints_EI + tree * query * INT_COLUMNS)
                _penalise_node(
                    logits_V, count_EV + counted, first_EV + counted, tokens_L, known, path_ED + row * D, penalties, D
                )
            else:
                count_V = count_EV + row.to(tl.int64) * rows.vocab
                _penalise(logits_V, count_V, tokens_L, length, tl.load(ints + PROMPT_LEN), penalties)
    if BIASED:
        tl.debug_barrier()
        b_B, k_K = tl.arange(0, B), tl.arange(0, triton.next_power_of_2(K))
        bias = tl.load(bias_SB + slot * B + b_B)
        named = logits_V + tl.load(bias_ids_SB + slot * B + b_B)
        tl.store(named, tl.load(named, mask=bias != 0, other=0.0) + bias, mask=bias != 0)
        tl.debug_barrier()
        if length < tl.load(ints + MIN_LEN):
            stop = tl.load(slots.stop_SK + slot * K + k_K, mask=k_K < K, other=-1)
            stops = logits_V + stop
            tl.store(stops, tl.load(stops, mask=stop >= 0, other=0.0) + banned, mask=stop >= 0)


@triton.jit
def _penalise(logits_V, count_V, tokens_L, length, prompt, penalties):
    i_B = tl.arange(0, BLOCK)
    for start in range(0, length, BLOCK):
        token = tl.load(tokens_L + start + i_B, mask=start + i_B < length, other=0)
        tl.store(count_V + token, tl.zeros([BLOCK], tl.int32), mask=start + i_B < length)
    tl.debug_barrier()
    for start in range(prompt // BLOCK * BLOCK, length, BLOCK):
        output = (start + i_B >= prompt) & (start + i_B < length)
        token = tl.load(tokens_L + start + i_B, mask=output, other=0)
        tl.atomic_add(count_V + token, 1, mask=output, sem="relaxed", scope="cta")
    tl.debug_barrier()
    for start in range(0, length, BLOCK):
        known = start + i_B < length
        token = tl.load(tokens_L + start + i_B, mask=known, other=0)
        if tl.target_info.is_hip():  # its compiler cannot exchange; -1 has all bits
            count = tl.atomic_or(count_V + token, -1, mask=known, sem="relaxed", scope="cta")
        else:
            count = tl.atomic_xchg(count_V + token, -1, mask=known, sem="relaxed", scope="cta")
        _edit(logits_V, token, count, known & (count >= 0), penalties)


@triton.jit(do_not_specialize=["query"])
def _count(rows, slots, count_EV, first_EV, path_ED, L, query, drafts, PDL: constexpr):
    """A tree's: how often each id stands in the output before the root, and where in all that is before it each stands
    first; of drafts that stand nowhere there 0 and NOWHERE.
    """
    pdl_begin(PDL)
    tree, i_B = tl.program_id(0), tl.arange(0, BLOCK)
    root = tree * query
    count_V, first_V = count_EV + tree.to(tl.int64) * rows.vocab, first_EV + tree.to(tl.int64) * rows.vocab
    tokens_L, path = slots.tokens_SL + tl.load(rows.slot_E + root) * L, path_ED + root.to(tl.int64) * drafts
    ints = rows.ints_EI + root * INT_COLUMNS
    known, prompt = tl.load(ints + LENGTH), tl.load(ints + PROMPT_LEN)
    nothing_B, nowhere_B = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], NOWHERE, tl.int32)
    for start in range(0, query * drafts, BLOCK):
        draft = tl.load(path + start + i_B, mask=start + i_B < query * drafts, other=-1)
        tl.store(count_V + draft, nothing_B, mask=draft >= 0)
        tl.store(first_V + draft, nowhere_B, mask=draft >= 0)
    for start in range(0, known, BLOCK):
        token = tl.load(tokens_L + start + i_B, mask=start + i_B < known, other=0)
        tl.store(count_V + token, nothing_B, mask=start + i_B < known)
        tl.store(first_V + token, nowhere_B, mask=start + i_B < known)
    tl.debug_barrier()
    for start in range(0, known, BLOCK):
        at = start + i_B
        token = tl.load(tokens_L + at, mask=at < known, other=0)
        tl.atomic_min(first_V + token, at, mask=at < known, sem="relaxed", scope="cta")
        tl.atomic_add(count_V + token, 1, mask=(at < known) & (at >= prompt), sem="relaxed", scope="cta")


@triton.jit
def _penalise_node(logits_V, count_V, first_V, tokens_L, known, path_D, penalties, D: constexpr):
    i_B = tl.arange(0, BLOCK)
    for start in range(0, known, BLOCK):
        at = start + i_B
        token = tl.load(tokens_L + at, mask=at < known, other=0)
        mine = (at < known) & (tl.load(first_V + token, mask=at < known, other=-1) == at)
        count = tl.load(count_V + token, mask=mine, other=0)
        for d in range(D):
            count += (tl.load(path_D + d) == token).to(tl.int32)
        _edit(logits_V, token, count, mine, penalties)
    for d in range(D):  # ids that are nowhere before the root, each once
        token, count = tl.load(path_D + d), tl.zeros([], tl.int32)
        mine = token >= 0
        for other in range(D):
            same = tl.load(path_D + other) == token
            count += same.to(tl.int32)
            mine = mine & ((same == 0) | (other >= d))
        mine = mine & (tl.load(first_V + token, mask=mine, other=-1) == NOWHERE)
        _edit(logits_V, token, count, mine, penalties)


@triton.jit
def _edit(logits_V, token, count, mine, penalties):
    repetition, frequency, presence = penalties
    x = tl.load(logits_V + token, mask=mine, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    count = count.to(tl.float32)
    tl.store(logits_V + token, x - (count * frequency + tl.where(count > 0, presence, 0.0)), mask=mine)


@triton.jit
def _forbid(logits_EV, row_G, bits_GW, stride, V, W, PDL: constexpr):
    pdl_begin(PDL)
    row, v_B = tl.load(row_G + tl.program_id(0)), tl.program_id(1) * PART + tl.arange(0, PART)
    word = tl.load(bits_GW + tl.program_id(0) * W + v_B // 32, mask=v_B < V, other=-1)
    forbidden = ((word >> (v_B % 32)) & 1) == 0
    tl.store(logits_EV + row * stride + v_B, tl.full([PART], float("-inf"), tl.float32), mask=forbidden & (v_B < V))


def apply_penalties(
    rows: SampledRows,
    slots: SlotTensors,
    biases: tuple[Tensor, Tensor],
    penalised: bool,
    biased: bool,
    banned: float,
    path_EQD: Tensor | None = None,
) -> None:
    """Repetition, frequency and presence penalty, then biases, then `banned` for stop ids before the minimum length; in
    place.

    biases: ids int64 and values float32 [S, B], B a power of two, ids distinct where the value is not 0. penalised,
    biased: whether any row is. path_EQD: see `sampling.sample.Sampler.edit_logits`; rows are then nodes.
    """
    count, options, L = len(rows.logits_EV), launch_options(rows.logits_EV), slots.tokens_SL.shape[1]
    _, query, drafts = (count, 1, 0) if path_EQD is None else path_EQD.shape
    path_ED = None if path_EQD is None else path_EQD.contiguous()
    shape = count // query, rows.vocab if penalised else 1
    count_EV = torch.empty(shape, dtype=torch.int32, device=rows.logits_EV.device)
    first_EV = torch.empty_like(count_EV) if drafts else None
    if penalised and drafts:
        _count[(count // query,)](rows, slots, count_EV, first_EV, path_ED, L, query, drafts, num_warps=8, **options)
    _adjust[(count,)](
        rows, slots, count_EV, first_EV, path_ED, *biases, L, query, banned, slots.stop_SK.shape[1],
        biases[0].shape[1], drafts, penalised, biased, num_warps=8, **options,
    )  # fmt: skip


def apply_grammar_mask(logits_EV: Tensor, row_G: Tensor, bits_GW: Tensor) -> None:
    """-inf, in place, for every token whose bit is 0. row_G int64: the rows meant. bits_GW int32: a bit an id, the
    lowest first.
    """
    vocab = logits_EV.shape[1]
    _forbid[len(row_G), triton.cdiv(vocab, PART.value)](
        logits_EV, row_G, bits_GW, logits_EV.stride(0), vocab, bits_GW.shape[1], num_warps=8,
        **launch_options(logits_EV),
    )  # fmt: skip
