"""Logits by temperature, -inf for what top-k, top-p and min-p remove, without a sort of the vocabulary; and logits plus
Gumbel noise. For acceptance rules that need the distribution itself, where `topk_topp` and `sample` need one token.

- `scan`, a part of a row: its largest value, Σ exp, the maxima of groups of ids (`topk_topp_threshold`).
- `_border`, a row: the key of the last id that is kept. What is kept is a prefix of the order (value descending, id
  ascending), so one key says it. Where only some thousand ids may be kept, these are listed and sorted. Else the key is
  found by bisection, with a sum over the row at each of some thirty steps, by one program.
- `_keep`, a part: the result.

Floor: 12 · E · V bytes, the logits read twice and the result written once: 32 µs for 64 rows of 129,280 on an H100. All
sums have a fixed order, and nothing depends on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.sample.triton import SampledRows, load_logits, scaled, temperature_of, with_noise
from thalweg.kernels.topk_topp_threshold.triton import (
    LEAST,
    LIST,
    PART,
    SHORT,
    kept_of_list,
    key_of,
    kth_key,
    list_likely,
    load_values,
    mass_limit,
    sampling_params,
    scan,
    value_of,
)


def apply_temperature(rows: SampledRows, is_truncated: bool) -> Tensor:
    """float32 [E, V], see `ref.apply_temperature`. is_truncated: whether any row is."""
    (count, vocab), options, device = rows.logits_EV.shape, launch_options(rows.logits_EV), rows.logits_EV.device
    parts = triton.cdiv(vocab, PART.value)
    out_EV, last_E = torch.empty(count, vocab, device=device), None
    if is_truncated:
        last_E = torch.empty(count, dtype=torch.int64, device=device)
        _border[(count,)](rows, scan(rows), last_E, triton.next_power_of_2(parts), num_warps=8, **options)
    _keep[count, parts](rows, last_E, out_EV, num_warps=8, **options)
    return out_EV


def add_gumbel_noise(score_NV: Tensor, seed_E: Tensor, position_E: Tensor) -> Tensor:
    """float32 [N, V]: the scores plus the noise of (seed, position, id), see `sampling.random.exponential`. score
    float32, rows of stride 1, equally many of each seed, one behind the other. seed, position int64, which may be
    columns.
    """
    rows, vocab = score_NV.shape
    out_NV = torch.empty(rows, vocab, device=score_NV.device)
    _raced[rows, triton.cdiv(vocab, PART.value)](
        score_NV, seed_E, position_E, out_NV, score_NV.stride(0), seed_E.stride(0), position_E.stride(0), vocab,
        rows // len(seed_E), num_warps=8, **launch_options(score_NV),
    )  # fmt: skip
    return out_NV


@triton.jit
def _border(rows, scanned, last_E, BLOCK_C: constexpr, PDL: constexpr):
    pdl_begin(PDL)
    row, V = tl.program_id(0), rows.vocab
    temperature, k, p, m, truncates = sampling_params(rows, row)
    last = tl.full((), LEAST, tl.int64)
    if truncates:
        low, largest, total, found = list_likely(rows, scanned, row, temperature, k, p, m, BLOCK_C)
        if found <= SHORT:
            last = _last_of_list(scanned, row, found, V, k, p, m, largest, total, SHORT)
        elif found <= LIST:
            last = _last_of_list(scanned, row, found, V, k, p, m, largest, total, LIST)
        else:
            last = _search(rows, row, temperature, k, p, m, low, largest, total)
    tl.store(last_E + row, last)


@triton.jit
def _last_of_list(scanned, row, count, V, k, p, m, largest, total, BLOCK: constexpr):
    key, kept = kept_of_list(scanned, row, count, V, k, p, m, largest, total, BLOCK)
    return tl.min(tl.where(kept, key, -LEAST))


@triton.jit
def _search(rows, row, temperature, k, p, m, low, largest, total):
    """A key that the kept ids reach, and no other id. `low`: see `list_likely`."""
    V = rows.vocab
    last_k, mass_k, first = tl.full((), LEAST, tl.int64), total, tl.full((), LEAST, tl.int64)
    if k < V:
        last_k = kth_key(rows, row, temperature, k, low, largest)
        mass_k = total * 0
    for start in range(0, V, PART):
        v_B, y, key = load_values(rows, row, start, temperature)
        first = tl.maximum(first, tl.max(tl.where(v_B < V, key, LEAST)))
        if k < V:
            mass_k += tl.sum(tl.where(key >= last_k, tl.exp(y - largest), 0.0))
    # ids at `high` or above are kept, ids below `least` are not: by top-k, min-p, and then by top-p
    least, high, between = key_of(low, tl.full((), 0x7FFFFFFF, tl.int32)), first, V
    while (m > 0) & (least < high):
        middle = (least & high) + ((least ^ high) >> 1)  # rounded down, without overflow
        likely = tl.exp(value_of(middle) - largest) >= m
        high = tl.where(likely, middle, high)
        least = tl.where(likely, least, middle + 1)
    least, high = tl.maximum(least, last_k), first
    while (p < 1) & (least < high) & (between > 1):
        middle = (least & high) + ((least ^ high) >> 1)
        mass, below, above = total * 0, tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        for start in range(0, V, PART):
            _, y, key = load_values(rows, row, start, temperature)
            mass += tl.sum(tl.where(key > middle, tl.exp(y - largest), 0.0))
            below += tl.sum(((key >= least) & (key <= middle)).to(tl.int32))
            above += tl.sum(((key > middle) & (key <= high)).to(tl.int32))
        keeps = mass < mass_limit(p, mass_k)  # an id of this key
        between = tl.where(keeps, below, above)
        high = tl.where(keeps, middle, high)
        least = tl.where(keeps, least, middle + 1)
    return least


@triton.jit
def _keep(rows, last_E, out_EV, PDL: constexpr):
    pdl_begin(PDL)
    row, v_B = tl.program_id(0), tl.program_id(1) * PART + tl.arange(0, PART)
    temperature = temperature_of(rows, row)
    y = scaled(load_logits(rows, row, v_B), tl.where(temperature > 0, temperature, 1.0))
    if last_E is not None:
        kept = (key_of(y, v_B) >= tl.load(last_E + row)) | (y != y)  # a NaN stays, whatever is kept
        y = tl.where(kept, y, float("-inf"))
    tl.store(out_EV + row.to(tl.int64) * rows.vocab + v_B, y, mask=v_B < rows.vocab)


@triton.jit(
    do_not_specialize=["seed_stride", "position_stride", "each"],
    do_not_specialize_on_alignment=["seed_E", "position_E"],
)
def _raced(score_NV, seed_E, position_E, out_NV, stride, seed_stride, position_stride, V, each, PDL: constexpr):
    pdl_begin(PDL)
    row, v_B = tl.program_id(0), tl.program_id(1) * PART + tl.arange(0, PART)
    seed, position = tl.load(seed_E + row // each * seed_stride), tl.load(position_E + row // each * position_stride)
    x = tl.load(score_NV + row.to(tl.int64) * stride + v_B, mask=v_B < V, other=float("-inf"))
    tl.store(out_NV + row.to(tl.int64) * V + v_B, with_noise(x, seed, position, v_B), mask=v_B < V)
