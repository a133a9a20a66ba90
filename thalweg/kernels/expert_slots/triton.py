"""See `ref.py`: one launch each, where torch takes sixteen and seven. A launch is the floor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.expert_slots import ref
from thalweg.kernels.launch import launch_config
from thalweg.kernels.pdl import pdl_launch, pdl_wait

FIRST, SECOND = (constexpr(mixer) for mixer in ref.MIXERS)
AT_ONCE = 512  # choices of a program


@triton.jit(do_not_specialize=["tokens"])
def _choose_slots(
    slot_TK, ids_TK, slot_EC, count_E, load_E, tokens, experts, last,
    K: constexpr, BLOCK_K: constexpr, BLOCK_T: constexpr, COPIES: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program i: BLOCK_T tokens."""
    token, k = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    at, live = token.to(tl.int64)[:, None] * K + k[None, :], (token < tokens)[:, None] & (k < K)[None, :]
    pdl_wait(PDL)
    pdl_launch(PDL)
    ids = tl.load(ids_TK + at, mask=live, other=0).to(tl.int64)
    if load_E is not None:
        tl.atomic_add(load_E + tl.minimum(ids, last), tl.full([BLOCK_T, BLOCK_K], 1, tl.int64), mask=live)
    is_expert = live & (ids < experts)
    ids = tl.where(is_expert, ids, 0)
    place = ids * COPIES
    if COPIES > 1:
        mixed = tl.sum(tl.where((k < K)[None, :], (ids + 1) * FIRST & 0xFFFFFFFF, 0), 1)
        place += (mixed[:, None] * SECOND >> 16 & 0xFFFF) % tl.load(count_E + ids)
    slot = tl.where(is_expert, tl.load(slot_EC + place), -1)
    tl.store(slot_TK + at, slot.to(tl.int32), mask=live)


def choose(ids_TK: Tensor, slot_EC: Tensor, count_E: Tensor, load_E: Tensor | None = None) -> Tensor:
    """See `ref.choose`. ids: int32 or int64, contiguous."""
    assert ids_TK.is_contiguous() and slot_EC.is_contiguous()
    tokens, choices = ids_TK.shape
    slot_TK = torch.empty(tokens, choices, dtype=torch.int32, device=ids_TK.device)
    block_k = triton.next_power_of_2(choices)
    block_t = max(AT_ONCE // block_k, 1)
    if tokens:
        _choose_slots[(triton.cdiv(tokens, block_t),)](
            slot_TK, ids_TK, slot_EC, count_E, load_E, tokens, len(count_E), 0 if load_E is None else len(load_E) - 1,
            choices, block_k, block_t, slot_EC.shape[1], **launch_config(slot_TK, 4),
        )  # fmt: skip
    return slot_TK


@triton.jit(do_not_specialize=["count", "first"])
def _local_slots(own_P, slot_P, count, first, slots, BLOCK: constexpr, PDL: constexpr):
    """Program i: BLOCK slots."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_launch(PDL)
    own = tl.load(slot_P + at, mask=at < count, other=0) - first
    tl.store(own_P + at, tl.where((own >= 0) & (own < slots), own, slots), mask=at < count)


def local_slots(slot_NK: Tensor, first: int, slots: int) -> Tensor:
    """See `ref.local_slots`. slot: int32, contiguous."""
    own_NK = torch.empty_like(slot_NK)
    if count := slot_NK.numel():
        _local_slots[(triton.cdiv(count, AT_ONCE),)](
            own_NK, slot_NK, count, first, slots, AT_ONCE, **launch_config(slot_NK, 4)
        )  # fmt: skip
    return own_NK
