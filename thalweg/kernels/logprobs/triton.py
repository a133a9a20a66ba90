"""log_softmax at some ids and at the most likely ones, without writing anything of the size of the vocabulary.

The first launch is `border.scan`, on the logits themselves; the second finds a value that the N-th largest group
maximum reaches, lists the ids at or above it, of their groups alone, and sorts the list. Where thousands of logits
equal the N-th it takes one after the other from the row instead. Floor: 4 · E · V bytes read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.topk_topp_threshold.triton import (
    GROUPS,
    LEAST,
    LIST,
    PART,
    RUN,
    RUNS,
    SCAN,
    SHORT,
    TILE,
    id_of,
    key_of,
    listed,
    narrow,
    overall,
    scan,
    value_of,
)


def logprobs(logits_NV: Tensor, tokens_N: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax at `tokens_N` (int64): float32 [N]; and of each row the `top` most likely ids, int64 [N, top], with
    theirs, float32. Equal ones by id.
    """
    rows, vocab = logits_NV.shape
    parts, top, options = triton.cdiv(vocab, PART), min(top, vocab), launch_options(logits_NV)

    def make(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits_NV.device)

    tops, sums, groups = make(torch.float32, parts), make(torch.float32, parts), make(torch.float32, parts * GROUPS)
    chosen, keys = make(torch.int32, parts * GROUPS), make(torch.int64, LIST)
    own, ids, values = make(torch.float32), make(torch.int64, top), make(torch.float32, top)
    if not rows:
        return own, ids, values
    scan[rows, parts](
        logits_NV,
        None,
        None,
        None,
        tops,
        sums,
        None,
        groups,
        logits_NV.stride(0),
        vocab,
        parts,
        0,
        0,
        0,
        0,
        True,
        PART,
        RUN,
        RUNS,
        **SCAN,
        **options,
    )
    _report[(rows,)](
        logits_NV,
        tokens_N,
        tops,
        sums,
        groups,
        chosen,
        keys,
        own,
        ids,
        values,
        logits_NV.stride(0),
        vocab,
        parts,
        top,
        GROUPS,
        RUN,
        RUNS,
        TILE,
        SHORT,
        LIST,
        PART,
        triton.next_power_of_2(parts),
        triton.next_power_of_2(parts * GROUPS),
        num_warps=8,
        **options,
    )
    return own, ids, values


@triton.jit(do_not_specialize=["top"])
def _report(
    logits_NV,
    token_N,
    top_NC,
    sum_NC,
    group_NG,
    chosen_NG,
    key_NL,
    own_N,
    id_NK,
    value_NK,
    stride,
    V,
    parts,
    top,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
    TILE: tl.constexpr,
    SHORT: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_begin(PDL)
    row, g_G = tl.program_id(0), tl.arange(0, BLOCK_G)
    logits_V = logits_NV + row.to(tl.int64) * stride
    largest, total = overall(top_NC, sum_NC, row, parts, BLOCK_C)
    rest = tl.log(total)  # subtracted by itself: added to a large value it would lose its digits
    tl.store(own_N + row, tl.load(logits_V + tl.load(token_N + row)) - largest - rest)
    if top > 0:
        groups = parts * GROUPS
        group_G = tl.load(group_NG + row * groups + g_G, mask=g_G < groups, other=float("-inf"))
        low = narrow(group_G, largest * 0 - float("inf"), top, float("inf"), largest)
        keys, ids, values = key_NL + row.to(tl.int64) * LIST, id_NK + row * top, value_NK + row * top
        found = listed(
            logits_V, group_G, low, 1.0, chosen_NG + row * groups, keys, V, groups, RUN, RUNS, TILE, LIST, BLOCK_G
        )
        if found <= SHORT:
            _show(keys, found, ids, values, top, largest, rest, SHORT)
        elif found <= LIST:
            _show(keys, found, ids, values, top, largest, rest, LIST)
        if (found > LIST) | (found < top):  # thousands are equal, or fewer are possible at all
            i_B = tl.arange(0, BLOCK)
            behind = tl.full((), -LEAST, tl.int64)
            for n in range(top):
                best = tl.full((), LEAST, tl.int64)
                for start in range(0, V, BLOCK):
                    v_B = start + i_B
                    key = key_of(tl.load(logits_V + v_B, mask=v_B < V, other=float("-inf")), v_B)
                    best = tl.maximum(best, tl.max(tl.where((key < behind) & (v_B < V), key, best)))
                tl.store(ids + n, id_of(best).to(tl.int64))
                tl.store(values + n, value_of(best) - largest - rest)
                behind = best


@triton.jit
def _show(keys, count, ids, values, top, largest, rest, BLOCK: tl.constexpr):
    rank = tl.arange(0, BLOCK)
    key = tl.sort(tl.load(keys + rank, mask=rank < count, other=LEAST), descending=True)
    shown = (rank < top) & (rank < count)
    tl.store(ids + rank, id_of(key).to(tl.int64), mask=shown)
    tl.store(values + rank, value_of(key) - largest - rest, mask=shown)
