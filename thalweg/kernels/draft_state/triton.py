"""`ref.shift_hidden_states` and `ref.store_draft` in one launch each. Each number of a step's states is read once and
written once: about 30 kB a token of 7,168 in bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.draft_state.ref import DraftChain, DraftedTokens, DraftRows, TokenPlaces
from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.slot_columns import END, INT_COLUMNS, LENGTH, NUM_COMPUTED, NUM_DRAFTS

PART = constexpr(1024)  # numbers of a state that a program carries
BLOCK = constexpr(2048)  # that one looks at together


@triton.jit
def _carry(
    state_TW, rows, places, kept_SW, ends_PW, ints_SI, before_TW, stride_T, stride_P, T, W,
    PAGE: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0)
    first, slot = tl.load(rows.first_R + row), tl.load(rows.slot_R + row)
    if first < T:
        w_B = tl.program_id(1) * PART + tl.arange(0, PART)
        inside = w_B < W
        n = tl.load(rows.n_R + row)
        moved = tl.load(ints_SI + slot * INT_COLUMNS + NUM_COMPUTED) - tl.load(places.position_T + first)
        last = first + tl.maximum(tl.minimum(moved, n), 1) - 1
        before_B = tl.load(kept_SW + slot * W + w_B, mask=inside)
        for token in range(first, first + n):
            tl.store(before_TW + token * W + w_B, before_B, mask=inside)
            before_B = tl.load(state_TW + token * stride_T + w_B, mask=inside)
            tl.store(kept_SW + slot * W + w_B, before_B, mask=inside & (token == last))
            ends = (tl.load(places.position_T + token) % PAGE == PAGE - 1) & tl.load(places.real_T + token)
            page = tl.load(places.write_T + token) // PAGE
            tl.store(ends_PW + page * stride_P + w_B, before_B, mask=inside & ends)


def shift_hidden_states(
    state_TW: Tensor, rows: DraftRows, places: TokenPlaces, kept_SW: Tensor, ends_PW: Tensor, ints_SI: Tensor, page: int
) -> Tensor:
    """See `ref.shift_hidden_states`. A row's tokens are carried one after the other: for verifications, not for
    prompts.
    """
    tokens, width = state_TW.shape
    if state_TW.stride(1) != 1:
        state_TW = state_TW.contiguous()
    before_TW = torch.zeros(tokens, width, dtype=state_TW.dtype, device=state_TW.device)
    _carry[len(rows.slot_R), triton.cdiv(width, PART.value)](
        state_TW, rows, places, kept_SW, ends_PW, ints_SI, before_TW, state_TW.stride(0), ends_PW.stride(0), tokens,
        width, page, num_warps=4, **launch_options(ints_SI),
    )  # fmt: skip
    return before_TW


@triton.jit
def not_finite(x):
    """int32: where a number is infinite or none. Its difference to itself is then no number."""
    x = x.to(tl.float32)
    return (x - x != 0).to(tl.int32)


@triton.jit
def _conclude(
    drafted, new_EW, ints_EI, chain, tokens_SL, ints_SI, D, stride_D, stride, L, W, K: constexpr, PDL: constexpr
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    entry, slot, ahead = tl.load(drafted.entry_E + row), tl.load(chain.slot_E + row), tl.load(chain.ahead_E + row)
    there = (entry >= 0) & (entry < D)
    logit = tl.load(drafted.logits_ED + row * stride_D + entry, mask=there, other=float("inf"))
    token = entry
    if drafted.ids_D is not None:
        token = tl.load(drafted.ids_D + entry, mask=there, other=0)
    there &= (logit - logit == 0) & (token >= 0) & (token < drafted.vocab)
    token = tl.where(there, token, 0)
    length, end = tl.load(ints_EI + row * INT_COLUMNS + LENGTH), tl.load(ints_EI + row * INT_COLUMNS + END)
    bad, worse = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, W, BLOCK):
        w_B = start + tl.arange(0, BLOCK)
        bad |= not_finite(tl.load(chain.state_EW + row * W + w_B, mask=w_B < W, other=0.0))
        new_B = tl.load(new_EW + row * stride + w_B, mask=w_B < W, other=0.0)
        worse |= not_finite(new_B)
        tl.store(chain.state_EW + row * W + w_B, new_B, mask=w_B < W)
    is_valid = there & (tl.max(worse, 0) == 0) | (tl.max(bad, 0) > 0)
    is_valid &= (ahead == 0) | tl.load(chain.is_valid_E + row)
    tl.store(chain.is_valid_E + row, is_valid)
    tl.store(tokens_SL + slot * L + tl.where(end > 0, length, L - 1), token.to(tl.int32))
    tl.store(chain.drafts_EK + row * K + ahead, token, mask=ahead < K)
    tl.store(chain.ahead_E + row, ahead + 1)
    tl.store(ints_SI + slot * INT_COLUMNS + NUM_DRAFTS, ahead + 1)


def store_draft(
    drafted: DraftedTokens, state_EW: Tensor, ints_EI: Tensor, chain: DraftChain, tokens_SL: Tensor, ints_SI: Tensor
) -> None:
    """See `ref.store_draft`."""
    (rows, width), logits_ED = state_EW.shape, drafted.logits_ED
    assert state_EW.stride(1) == logits_ED.stride(1) == 1, "a head's states and logits lie number by number"
    _conclude[(rows,)](
        drafted, state_EW, ints_EI, chain, tokens_SL, ints_SI, logits_ED.shape[1], logits_ED.stride(0),
        state_EW.stride(0), tokens_SL.shape[1], width, chain.drafts_EK.shape[1], num_warps=8, **launch_options(ints_SI),
    )  # fmt: skip
