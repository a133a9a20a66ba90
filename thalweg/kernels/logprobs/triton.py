"""log_softmax at some ids and at the most likely ones, without writing anything of the size of the vocabulary.

The first launch is `scan`, on the logits as they are. The second finds a value that the N-th largest group maximum
reaches, lists the ids at or above it, of their groups alone, and sorts the list. Where thousands of logits equal the
N-th, it takes one after the other from the row instead. Floor: 4 · E · V bytes read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.sample.triton import SampledRows, load_logits
from thalweg.kernels.topk_topp_threshold.triton import (
    LEAST,
    LIST,
    PART,
    SHORT,
    id_of,
    key_of,
    list_ids,
    load_scan,
    raise_bound,
    scan,
    sorted_list,
    value_of,
)


def logprobs(logits_NV: Tensor, tokens_N: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """log_softmax at `tokens_N` (int64): float32 [N]; and of each row the `top` most likely ids, int64 [N, top], with
    theirs, float32. Equal ones by id.
    """
    (count, vocab), device = logits_NV.shape, logits_NV.device
    own_N, value_NK = (torch.empty(count, *shape, device=device) for shape in ((), (min(top, vocab),)))
    id_NK = torch.empty_like(value_NK, dtype=torch.int64)
    if count:
        rows = SampledRows(logits_NV, logits_NV.stride(0), vocab)
        scanned = scan(rows, is_raw=True)
        _report[(count,)](
            rows, scanned, tokens_N, own_N, id_NK, value_NK, value_NK.shape[1], triton.next_power_of_2(scanned.parts),
            num_warps=8, **launch_options(logits_NV),
        )  # fmt: skip
    return own_N, id_NK, value_NK


@triton.jit(do_not_specialize=["top"])
def _report(rows, scanned, token_N, own_N, id_NK, value_NK, top, BLOCK_C: constexpr, PDL: constexpr):
    pdl_begin(PDL)
    row, V = tl.program_id(0), rows.vocab
    group_G, largest, total = load_scan(scanned, row, BLOCK_C)
    rest = tl.log(total)  # subtracted by itself: added to a large value it would lose its digits
    token = tl.load(token_N + row)
    tl.store(own_N + row, tl.load(rows.logits_EV + row.to(tl.int64) * rows.stride + token) - largest - rest)
    if top > 0:
        low = raise_bound(group_G, largest * 0 - float("inf"), top, float("inf"), largest)
        ids, values = id_NK + row * top, value_NK + row * top
        found = list_ids(rows, scanned, row, group_G, low, 1.0)
        if found <= SHORT:
            _show(scanned, row, found, ids, values, top, largest, rest, SHORT)
        elif found <= LIST:
            _show(scanned, row, found, ids, values, top, largest, rest, LIST)
        if (found > LIST) | (found < top):  # thousands are equal, or fewer are possible at all
            behind = tl.full((), -LEAST, tl.int64)
            for n in range(top):
                best = tl.full((), LEAST, tl.int64)
                for start in range(0, V, PART):
                    v_B = start + tl.arange(0, PART)
                    key = key_of(load_logits(rows, row, v_B), v_B)
                    best = tl.maximum(best, tl.max(tl.where((key < behind) & (v_B < V), key, best)))
                tl.store(ids + n, id_of(best).to(tl.int64))
                tl.store(values + n, value_of(best) - largest - rest)
                behind = best


@triton.jit
def _show(scanned, row, count, ids, values, top, largest, rest, BLOCK: constexpr):
    rank, key = tl.arange(0, BLOCK), sorted_list(scanned, row, count, BLOCK)
    shown = (rank < top) & (rank < count)
    tl.store(ids + rank, id_of(key).to(tl.int64), mask=shown)
    tl.store(values + rank, value_of(key) - largest - rest, mask=shown)
