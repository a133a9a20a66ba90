"""Edits of the logits in place: penalties, biases and minimum lengths in one launch, grammars in another.

Of a vocabulary of 129,280 a sequence has seen some thousand ids and a bias names some: one program a row edits those
and reads nothing else. Tokens are counted in a plane of integers of which only the places of the row's own tokens are
ever written or read, so that nothing of the size of the vocabulary is cleared: first these places become 0, then every
token of the output adds 1, then whichever token takes the count first makes the edit. Counts do not depend on the order
of additions, so neither does the result. Of nodes of a tree, what is before the root is counted in a launch of its own,
once for all of them, and where each id stands there first, which is who edits it; a node adds its path's drafts. Floor:
4 bytes a known token and a few sectors an id, which up to some 100,000 tokens is less than the time of a launch. A
forbidden id costs a write of 4 bytes: 517 KB a row, 0.17 µs on an H100.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin

BLOCK = 2048  # tokens at a time
PART = 4096  # ids of a program that forbids
NOWHERE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["query"])
def _adjust(
    logits_EV,
    count_EV,
    first_EV,
    behind_ED,
    slot_E,
    ints_EI,
    floats_SF,
    tokens_SL,
    stop_SK,
    bias_ids_SB,
    bias_SB,
    stride,
    V,
    L,
    query,
    banned,
    COLUMNS: tl.constexpr,
    F: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B: tl.constexpr,
    D: tl.constexpr,
    PENALISED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """D: drafts of a path at most, 0 where rows are no nodes of trees."""
    pdl_begin(PDL)
    row = tl.program_id(0)
    slot, ints = tl.load(slot_E + row), ints_EI + row * COLUMNS
    logits_V, length = logits_EV + row.to(tl.int64) * stride, tl.load(ints)
    if PENALISED:
        at = floats_SF + slot * F
        repetition, frequency, presence = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
        if (repetition != 1) | (frequency != 0) | (presence != 0):
            tokens_L = tokens_SL + slot * L
            if D > 0:
                tree = row // query
                counted = tree.to(tl.int64) * V
                known, behind_D = tl.load(ints_EI + tree * query * COLUMNS), behind_ED + row * D
                _penalise_node(
                    logits_V,
                    count_EV + counted,
                    first_EV + counted,
                    tokens_L,
                    known,
                    behind_D,
                    repetition,
                    frequency,
                    presence,
                    D,
                    BLOCK,
                )
            else:
                count_V = count_EV + row.to(tl.int64) * V
                _penalise(
                    logits_V, count_V, tokens_L, length, tl.load(ints + 4), repetition, frequency, presence, BLOCK
                )
    if BIASED:
        tl.debug_barrier()
        b_B, k_K = tl.arange(0, B), tl.arange(0, BLOCK_K)
        bias = tl.load(bias_SB + slot * B + b_B)
        named = logits_V + tl.load(bias_ids_SB + slot * B + b_B)
        tl.store(named, tl.load(named, mask=bias != 0, other=0.0) + bias, mask=bias != 0)
        tl.debug_barrier()
        if length < tl.load(ints + 5):
            stop = tl.load(stop_SK + slot * K + k_K, mask=k_K < K, other=-1)
            stops = logits_V + stop
            tl.store(stops, tl.load(stops, mask=stop >= 0, other=0.0) + banned, mask=stop >= 0)


@triton.jit
def _penalise(
    logits_V, count_V, tokens_L, length, prompt, repetition, frequency, presence, BLOCK: tl.constexpr
):  # fmt: skip
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
        count = tl.atomic_xchg(count_V + token, -1, mask=known, sem="relaxed", scope="cta")
        _edit(logits_V, token, count, known & (count >= 0), repetition, frequency, presence)


@triton.jit(do_not_specialize=["query"])
def _count(
    count_EV, first_EV, behind_ED, slot_E, ints_EI, tokens_SL, V, L, query, drafts,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tree's: how often each id stands in the output before the root, and where in all that is before it each stands
    first; of drafts that stand nowhere there 0 and NOWHERE.
    """
    pdl_begin(PDL)
    tree, i_B = tl.program_id(0), tl.arange(0, BLOCK)
    root = tree * query
    count_V, first_V = count_EV + tree.to(tl.int64) * V, first_EV + tree.to(tl.int64) * V
    tokens_L, behind = tokens_SL + tl.load(slot_E + root) * L, behind_ED + root.to(tl.int64) * drafts
    known, prompt = tl.load(ints_EI + root * COLUMNS), tl.load(ints_EI + root * COLUMNS + 4)
    nothing_B, nowhere_B = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], NOWHERE, tl.int32)
    for start in range(0, query * drafts, BLOCK):
        draft = tl.load(behind + start + i_B, mask=start + i_B < query * drafts, other=-1)
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
def _penalise_node(
    logits_V,
    count_V,
    first_V,
    tokens_L,
    known,
    behind_D,
    repetition,
    frequency,
    presence,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_B = tl.arange(0, BLOCK)
    for start in range(0, known, BLOCK):
        at = start + i_B
        token = tl.load(tokens_L + at, mask=at < known, other=0)
        mine = (at < known) & (tl.load(first_V + token, mask=at < known, other=-1) == at)
        count = tl.load(count_V + token, mask=mine, other=0)
        for d in range(D):
            count += (tl.load(behind_D + d) == token).to(tl.int32)
        _edit(logits_V, token, count, mine, repetition, frequency, presence)
    for d in range(D):  # ids that are before the root nowhere, each once
        token, count = tl.load(behind_D + d), tl.zeros([], tl.int32)
        mine = token >= 0
        for other in range(D):
            same = tl.load(behind_D + other) == token
            count += same.to(tl.int32)
            mine = mine & ((same == 0) | (other >= d))
        mine = mine & (tl.load(first_V + token, mask=mine, other=-1) == NOWHERE)
        _edit(logits_V, token, count, mine, repetition, frequency, presence)


@triton.jit
def _edit(logits_V, token, count, mine, repetition, frequency, presence):
    x = tl.load(logits_V + token, mask=mine, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    count = count.to(tl.float32)
    tl.store(logits_V + token, x - (count * frequency + tl.where(count > 0, presence, 0.0)), mask=mine)


@triton.jit
def _forbid(logits_EV, row_G, bits_GW, stride, V, W, BLOCK: tl.constexpr, PDL: tl.constexpr):
    pdl_begin(PDL)
    row, v_B = tl.load(row_G + tl.program_id(0)), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(bits_GW + tl.program_id(0) * W + v_B // 32, mask=v_B < V, other=-1)
    forbidden = ((word >> (v_B % 32)) & 1) == 0
    tl.store(logits_EV + row * stride + v_B, tl.full([BLOCK], float("-inf"), tl.float32), mask=forbidden & (v_B < V))


def apply_penalties(
    logits_EV: Tensor,
    slot_E: Tensor,
    ints_EI: Tensor,
    floats_SF: Tensor,
    tokens_SL: Tensor,
    stop_SK: Tensor,
    biases: tuple[Tensor, Tensor],
    penalised: bool,
    biased: bool,
    banned: float,
    behind_EQD: Tensor | None = None,
) -> None:
    """Repetition, frequency and presence penalty, then biases, then `banned` for stop ids before the minimum length; in
    place.

    logits float32, contiguous rows. slot_E int64; ints_EI int64: length, …, the prompt's in column 4, the minimum
    length in 5. floats_SF float32: the three penalties in columns 3 to 5. tokens_SL int32; stop_SK int64, -1 is none.
    biases: int64 and float32 [S, B], B a power of two, ids distinct where the bias is not 0. penalised, biased: whether
    any row is. behind_EQD: see `sampling.sample.Sampling.edit`; rows are then nodes.
    """
    (rows, vocab), (ids, values), options = logits_EV.shape, biases, launch_options(logits_EV)
    _, query, drafts = (rows, 1, 0) if behind_EQD is None else behind_EQD.shape
    behind_ED = None if behind_EQD is None else behind_EQD.contiguous()
    shape = rows // query, vocab if penalised else 1
    count = torch.empty(shape, dtype=torch.int32, device=logits_EV.device)
    first = torch.empty_like(count) if drafts else None
    if penalised and drafts:
        _count[(rows // query,)](
            count,
            first,
            behind_ED,
            slot_E,
            ints_EI,
            tokens_SL,
            vocab,
            tokens_SL.shape[1],
            query,
            drafts,
            ints_EI.shape[1],
            BLOCK,
            num_warps=8,
            **options,
        )
    _adjust[(rows,)](
        logits_EV,
        count,
        first,
        behind_ED,
        slot_E,
        ints_EI,
        floats_SF,
        tokens_SL,
        stop_SK,
        ids,
        values,
        logits_EV.stride(0),
        vocab,
        tokens_SL.shape[1],
        query,
        banned,
        ints_EI.shape[1],
        floats_SF.shape[1],
        stop_SK.shape[1],
        triton.next_power_of_2(stop_SK.shape[1]),
        ids.shape[1],
        drafts,
        penalised,
        biased,
        BLOCK,
        num_warps=8,
        **options,
    )


def apply_grammar_mask(logits_EV: Tensor, row_G: Tensor, bits_GW: Tensor) -> None:
    """-inf, in place, for every token whose bit is 0. row_G int64: the rows meant. bits_GW int32: a bit an id, the
    lowest first.
    """
    vocab = logits_EV.shape[1]
    _forbid[len(row_G), triton.cdiv(vocab, PART)](
        logits_EV,
        row_G,
        bits_GW,
        logits_EV.stride(0),
        vocab,
        bits_GW.shape[1],
        PART,
        num_warps=8,
        **launch_options(logits_EV),
    )
