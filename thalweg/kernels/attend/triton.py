"""What both attentions on pages are made of: the running softmax, how a context is split, and the joining of parts by
their log-sum-exp.

Joining is small: at batch 1, 16 heads of 512 dims in 16 splits are 256 KiB in the second-level cache, and a launch is
the floor.

Letters: T query tokens, H heads, s splits. LSE: natural logarithm, float32; -inf where nothing was seen.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.launch import launch_options

PAGE = 64
SMS = 132  # of an H100 or H200; a wrong number costs speed only
MAX_SPLITS = 32
LONG = 1 << 15  # tokens
DETERMINISTIC_SPLITS = 32
LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)
PATH = tl.constexpr(64)  # positions of a token whose columns are told: as many as its mask has bits, see `batch.Tree`


class TileConfig(NamedTuple):
    """Rows of M and keys of a program, warps, stages of its loads, and registers of a thread where two programs are to
    share a multiprocessor.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


def waves(programs: int, context: int) -> int:
    """Splits that end soonest: whole waves of one program a multiprocessor, each of its pages and some two pages of
    start and merge. A bound beyond LONG counts as that: with thousands of pages the best waves are ahead by 6 % at
    most, and may have many times the splits, which a graph that is recorded for the longest context would pay for at
    every short one.
    """
    return _waves(programs, -(-min(context, LONG) // PAGE))


@cache
def _waves(programs: int, pages: int) -> int:
    """Each layer of a step asks."""
    return min(
        range(1, min(pages, MAX_SPLITS) + 1),
        key=lambda splits: -(-programs * splits // SMS) * (-(-pages // splits) + 2 + (splits > 1)),
    )


@triton.jit
def weigh(scores, strength, top):
    """One tile of the running softmax: weights of the tile, factor of what was summed before, new maximum, all in
    powers of two. scores: -inf where a key is not seen; strength: what each row's scores are multiplied by. The same
    arithmetic masked or not.
    """
    higher = tl.maximum(top, tl.max(scores, 1) * strength)
    base = tl.where(higher == -float("inf"), 0.0, higher)  # a row that has seen nothing yet
    return tl.exp2(scores * strength[:, None] - base[:, None]), tl.exp2(top - base), higher


@triton.jit
def cleared(out, begin, end, head, heads, DIM: tl.constexpr, M: tl.constexpr):
    """Zeroes tokens begin … end of one head, shared among the programs of axis 0."""
    lane, dim = tl.arange(0, M), tl.arange(0, DIM)
    for block in range(begin + tl.program_id(0) * M, end, tl.num_programs(0) * M):
        at = ((block + lane).to(tl.int64) * heads + head)[:, None] * DIM + dim[None, :]
        tl.store(out + at, tl.zeros((M, DIM), out.dtype.element_ty), mask=(block + lane < end)[:, None])


@triton.jit
def share_of(split, splits, pages, FIXED: tl.constexpr):
    """First page, step and number of pages of a split: every `splits`-th page, so that the first is known before the
    length is; or neighbours, at least FIXED, so that few splits have work.
    """
    if FIXED:
        own = tl.maximum(tl.cdiv(pages, splits), FIXED)
        first, step, count = split * own, 1, tl.minimum(own, pages - split * own)
    else:
        first, step, count = split, splits, tl.cdiv(pages - split, splits)
    return first, step, count


@triton.jit
def is_seen(tree_mask, before):
    """Whether rows see the columns so many places before their own. tree_mask: see `batch.TreeMask`; its highest bit is
    always set.
    """
    return ((tree_mask[:, None] >> tl.minimum(tl.maximum(before, 0), 63).to(tl.int64)) & 1) != 0


@triton.jit
def places(paths, pages, token, position, keys):
    """int64: the rows of a plane in which these positions of a token's context stand, `position` being its own. paths:
    see `decode`. What lies behind the token in its page is not seen, and any row will do.
    """
    back = position - keys
    told = (back >= 0) & (back < PATH)
    column = tl.where(told, tl.load(paths + token * PATH + back, mask=told, other=0), keys)
    return tl.load(pages + column // 64).to(tl.int64) * 64 + column % 64


@triton.jit
def largest_of(q):
    """Of each row. Keys of one byte are multiplied in float16, to which e4m3 turns in one instruction (to bfloat16 in
    several); queries are divided by this so that they fit.
    """
    return tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), 1e-20)


@triton.jit
def merged(partial, lse, pair, splits, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """The splits of one token and head joined: [DIM] float32. A few are fetched beside their LSE, and what a split that
    saw nothing has is dropped; of many, most are empty and not fetched at all.
    """
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    own = tl.load(lse + pair * splits + split, mask=split < splits, other=-float("inf"))
    at = partial + (pair * splits + split[:, None]) * DIM + dim[None, :]
    fetched = split < splits if SPLITS <= 16 else own > -float("inf")
    parts = tl.load(at, mask=fetched[:, None], other=0.0).to(tl.float32)
    top = tl.max(own, 0)
    weights = tl.exp(own - tl.where(top == -float("inf"), 0.0, top))
    weights /= tl.maximum(tl.sum(weights, 0), 1e-30)
    return tl.sum(tl.where(weights[:, None] > 0.0, parts * weights[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["splits"])
def _merge(partial, lse, out, splits, DIM: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Program i: token and head i."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    joined = merged(partial, lse, pair, splits, DIM, SPLITS)
    tl.store(out + pair * DIM + tl.arange(0, DIM), joined.to(out.dtype.element_ty))


def merge(partial: Tensor, lse_THs: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The splits of `decode` joined: → [T, H, dim]. With one split nothing is launched."""
    tokens, heads, splits, dim = partial.shape
    if splits == 1:
        return partial[:, :, 0]
    out = torch.empty(tokens, heads, dim, dtype=dtype, device=partial.device)
    _merge[(tokens * heads,)](
        partial, lse_THs, out, splits, DIM=dim, SPLITS=triton.next_power_of_2(splits),
        num_warps=4, **launch_options(out),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["lse_head", "other_lse_head"], do_not_specialize_on_alignment=["lse", "other_lse"])
def _merge_state(
    out, lse, other, other_lse, heads,
    out_token, out_head, lse_token, lse_head, other_token, other_head, other_lse_token, other_lse_head,
    DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: token and head i."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token, head, dim = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads, tl.arange(0, DIM)
    mine_at = lse + token * lse_token + head * lse_head
    mine, theirs = tl.load(mine_at), tl.load(other_lse + token * other_lse_token + head * other_lse_head)
    top = tl.maximum(mine, theirs)
    base = tl.where(top == -float("inf"), 0.0, top)
    mine, theirs = tl.exp(mine - base), tl.exp(theirs - base)
    both = mine + theirs
    at = out + token * out_token + head * out_head + dim
    a = tl.load(at).to(tl.float32)
    b = tl.load(other + token * other_token + head * other_head + dim).to(tl.float32)
    tl.store(at, ((a * mine + b * theirs) / tl.maximum(both, 1e-30)).to(out.dtype.element_ty))
    tl.store(mine_at, tl.where(both > 0.0, base + tl.log(both), -float("inf")))


def merge_state_(out_THv: Tensor, lse_TH: Tensor, other_THv: Tensor, other_lse_TH: Tensor) -> None:
    """Attention to two disjoint parts of a context joined, into the first pair. LSE: float32 [T, H]; strides of all may
    be any. An output beside an LSE of -inf counts for nothing, but must be finite.
    """
    tokens, heads, dim = out_THv.shape
    _merge_state[(tokens * heads,)](
        out_THv, lse_TH, other_THv, other_lse_TH, heads, *out_THv.stride()[:2], *lse_TH.stride(), *other_THv.stride()[:2],
        *other_lse_TH.stride(), DIM=dim, num_warps=1, **launch_options(out_THv),
    )  # fmt: skip
