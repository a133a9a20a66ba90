"""What ref.py says, in a launch each: of the state of a step each number is read once and written once, about 30 kB a
token of 7,168 in bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.draft_state.ref import DraftChain, DraftedTokens, DraftRows, TokenPlaces
from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin

PART = 1024  # numbers of a state that a program carries
BLOCK = 2048  # that one looks at together


@triton.jit
def _carry(
    state_TW,
    slot_R,
    n_R,
    first_R,
    position_T,
    write_T,
    real_T,
    kept_SW,
    ends_PW,
    ints_SI,
    before_TW,
    stride_T,
    stride_P,
    T,
    W,
    PAGE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0)
    first, slot = tl.load(first_R + row), tl.load(slot_R + row)
    if first < T:
        w_B = tl.program_id(1) * PART + tl.arange(0, PART)
        inside = w_B < W
        n = tl.load(n_R + row)
        moved = tl.load(ints_SI + slot * COLUMNS + 1) - tl.load(position_T + first)
        last = first + tl.maximum(tl.minimum(moved, n), 1) - 1
        before_B = tl.load(kept_SW + slot * W + w_B, mask=inside)
        for token in range(first, first + n):
            tl.store(before_TW + token * W + w_B, before_B, mask=inside)
            before_B = tl.load(state_TW + token * stride_T + w_B, mask=inside)
            tl.store(kept_SW + slot * W + w_B, before_B, mask=inside & (token == last))
            ends = (tl.load(position_T + token) % PAGE == PAGE - 1) & tl.load(real_T + token)
            page = tl.load(write_T + token) // PAGE
            tl.store(ends_PW + page * stride_P + w_B, before_B, mask=inside & ends)


def shift_hidden_states(
    state_TW: Tensor, rows: DraftRows, places: TokenPlaces, kept_SW: Tensor, ends_PW: Tensor, ints_SI: Tensor, page: int
) -> Tensor:
    """See `ref.shift_hidden_states`. A row's tokens are carried one behind the other: for verifications, not for
    prompts.
    """
    tokens, width = state_TW.shape
    if state_TW.stride(1) != 1:
        state_TW = state_TW.contiguous()
    before_TW = torch.zeros(tokens, width, dtype=state_TW.dtype, device=state_TW.device)
    _carry[len(rows.slot_R), triton.cdiv(width, PART)](
        state_TW,
        *rows,
        *places,
        kept_SW,
        ends_PW,
        ints_SI,
        before_TW,
        state_TW.stride(0),
        ends_PW.stride(0),
        tokens,
        width,
        page,
        ints_SI.shape[1],
        PART,
        num_warps=4,
        **launch_options(ints_SI),
    )
    return before_TW


@triton.jit
def _conclude(
    entry_E,
    logits_ED,
    ids_D,
    new_EW,
    ints_EI,
    slot_E,
    ahead_E,
    state_EW,
    drafts_EK,
    sound_E,
    tokens_SL,
    ints_SI,
    D,
    V,
    stride_D,
    stride,
    L,
    W,
    NAMED: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    entry, slot, ahead = tl.load(entry_E + row), tl.load(slot_E + row), tl.load(ahead_E + row)
    there = (entry >= 0) & (entry < D)
    logit = tl.load(logits_ED + row * stride_D + entry, mask=there, other=float("inf"))
    token = entry
    if NAMED:
        token = tl.load(ids_D + entry, mask=there, other=0)
    there &= (logit - logit == 0) & (token >= 0) & (token < V)
    token = tl.where(there, token, 0)
    length, end = tl.load(ints_EI + row * COLUMNS), tl.load(ints_EI + row * COLUMNS + 2)
    bad, worse = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, W, BLOCK):
        w_B = start + tl.arange(0, BLOCK)
        old_B = tl.load(state_EW + row * W + w_B, mask=w_B < W, other=0.0).to(tl.float32)
        new_B = tl.load(new_EW + row * stride + w_B, mask=w_B < W, other=0.0)
        # of what is infinite or no number the difference to itself is no number
        bad |= (old_B - old_B != 0).to(tl.int32)
        wide_B = new_B.to(tl.float32)
        worse |= (wide_B - wide_B != 0).to(tl.int32)
        tl.store(state_EW + row * W + w_B, new_B, mask=w_B < W)
    sound = there & (tl.max(worse, 0) == 0) | (tl.max(bad, 0) > 0)
    sound &= (ahead == 0) | tl.load(sound_E + row)
    tl.store(sound_E + row, sound)
    tl.store(tokens_SL + slot * L + tl.where(end > 0, length, L - 1), token.to(tl.int32))
    tl.store(drafts_EK + row * K + ahead, token, mask=ahead < K)
    tl.store(ahead_E + row, ahead + 1)
    tl.store(ints_SI + slot * COLUMNS + 7, ahead + 1)


def store_draft(
    drawn: DraftedTokens, state_EW: Tensor, ints_EI: Tensor, chain: DraftChain, tokens_SL: Tensor, ints_SI: Tensor
) -> None:
    """See `ref.store_draft`."""
    rows, width = state_EW.shape
    entry_E, logits_ED, ids_D, vocab = drawn
    assert state_EW.stride(1) == logits_ED.stride(1) == 1, "a head's states and logits lie number by number"
    _conclude[(rows,)](
        entry_E,
        logits_ED,
        entry_E if ids_D is None else ids_D,
        state_EW,
        ints_EI,
        *chain,
        tokens_SL,
        ints_SI,
        logits_ED.shape[1],
        vocab,
        logits_ED.stride(0),
        state_EW.stride(0),
        tokens_SL.shape[1],
        width,
        ids_D is not None,
        chain.drafts_EK.shape[1],
        ints_SI.shape[1],
        BLOCK,
        num_warps=8,
        **launch_options(ints_SI),
    )
