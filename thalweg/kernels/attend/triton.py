"""Parts of attention kernels over pages: online softmax, splits of a context, merging of partial results by their LSE.

Merging is small: at batch 1, 16 heads of 512 dims in 16 splits are 256 KiB in the second-level cache, and a launch is
the floor.

Letters: T query tokens, H heads, s splits. LSE: log-sum-exp, natural logarithm, float32; -inf where nothing was seen.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.attend.args import ContextChunk
from thalweg.kernels.launch import SMS, launch_config

PAGE = 64
MAX_SPLITS = 32
LONG = 1 << 15  # tokens
DETERMINISTIC_SPLITS = 32
LOG2E = 1.4426950408889634
LN2 = constexpr(0.6931471805599453)
PATH = constexpr(64)  # positions of a token whose columns are listed: the bits of a tree mask, see `batch.TreeMask`


class TileConfig(NamedTuple):
    """Tile and launch configuration of an attention kernel."""

    rows: int  # of M
    keys: int
    warps: int
    stages: int

    def options(self, tensor: Tensor) -> dict[str, int | bool]:
        """Keyword arguments of a launch on this tensor's device."""
        return launch_config(tensor, self.warps, self.stages)


def waves(programs: int, context: int) -> int:
    """The number of splits that finishes first: whole waves of one program a multiprocessor, each of its pages and the
    time of two more for start and merge.

    A context beyond LONG counts as LONG. The best number for thousands of pages gains 6 % at most and may need many
    more splits, and a graph that is captured for the longest context pays for them at every short one.
    """
    return _waves(programs, -(-min(context, LONG) // PAGE))


@cache
def _waves(programs: int, pages: int) -> int:
    return min(
        range(1, min(pages, MAX_SPLITS) + 1),
        key=lambda splits: -(-programs * splits // SMS) * (-(-pages // splits) + 2 + (splits > 1)),
    )


@triton.jit
def wait_for_previous(PDL: constexpr):
    """Waits for the results of the kernel before, and lets the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def empty_softmax(M: constexpr, DIM: constexpr):
    """The state of an online softmax of M rows: maximum, sum of weights, weighted sum of values."""
    top, total = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    return top, total, tl.zeros((M, DIM), tl.float32)


@triton.jit
def weigh(scores, strength, top):
    """One tile of an online softmax in powers of two: weights of the tile, factor of earlier sums, new maximum.

    scores: -inf where a key is not seen. strength: the scale of each row's scores. Masked tiles use the same
    arithmetic.
    """
    higher = tl.maximum(top, tl.max(scores, 1) * strength)
    base = tl.where(higher == -float("inf"), 0.0, higher)  # a row that has seen nothing yet
    return tl.exp2(scores * strength[:, None] - base[:, None]), tl.exp2(top - base), higher


@triton.jit
def add_values(scores, value, strength, top, total, sums):
    """Adds a tile of keys to an online softmax: → its new maximum, sum of weights, weighted sum."""
    weights, factor, top = weigh(scores, strength, top)
    total = total * factor + tl.sum(weights, 1)
    return top, total, tl.dot(weights.to(value.dtype), value, sums * factor[:, None], input_precision="ieee")


@triton.jit
def add_block(scores, values, row, column, dtype: constexpr, strength, top, total, sums):
    """`add_values` of a block of a descriptor, which is loaded when the weights are known."""
    weights, factor, top = weigh(scores, strength, top)
    total = total * factor + tl.sum(weights, 1)
    value = values.load([row, column]).to(dtype)
    return top, total, tl.dot(weights.to(dtype), value, sums * factor[:, None], input_precision="ieee")


@triton.jit
def store_states(out, lse, at, real, value_scale, top, total, sums, DIM: constexpr):
    """Stores the weighted mean of the values of row `at`, times their scale, and its LSE unless that is None. A row
    that has seen nothing gets 0 and -inf.
    """
    sums *= (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    if value_scale is not None:
        sums *= tl.load(value_scale)
    if lse is not None:
        tl.store(lse + at, tl.where(total > 0.0, top * LN2 + tl.log(total), -float("inf")), mask=real)
    to = out + at[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(to, sums.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def zero_tokens(out, begin, end, head, heads, DIM: constexpr, M: constexpr):
    """Zeroes tokens begin to end of one head, shared among the programs of axis 0."""
    lane, dim = tl.arange(0, M), tl.arange(0, DIM)
    for block in range(begin + tl.program_id(0) * M, end, tl.num_programs(0) * M):
        at = ((block + lane).to(tl.int64) * heads + head)[:, None] * DIM + dim[None, :]
        tl.store(out + at, tl.zeros((M, DIM), out.dtype.element_ty), mask=(block + lane < end)[:, None])


@triton.jit
def pages_of_split(split, splits, pages, FIXED: constexpr):
    """First page, step and number of pages of a split. Either every `splits`-th page, so that the first is known before
    the length is; or at least FIXED consecutive pages, so that few splits have work.
    """
    if FIXED:
        own = tl.maximum(tl.cdiv(pages, splits), FIXED)
        first, step, count = split * own, 1, tl.minimum(own, pages - split * own)
    else:
        first, step, count = split, splits, tl.cdiv(pages - split, splits)
    return first, step, count


@triton.jit
def first_page(table, rows, first_token, table_row, split, QUERY: constexpr):
    """→ the page table of a token's row, and the first page of a split that is not of consecutive pages. rows: those
    of the tokens; None is token // QUERY.
    """
    row = (first_token // QUERY if rows is None else tl.load(rows + first_token)).to(tl.int64)
    row_pages = table + row * table_row
    return row_pages, tl.load(row_pages + tl.minimum(split, table_row - 1)).to(tl.int32)


@triton.jit
def page_after(row_pages, first, step, count, tile, TILES: constexpr):
    """The page of the tile after this one, of TILES a page. Kernels read it one tile ahead, so that their loop never
    waits for it.
    """
    following = tl.minimum((tile + 1) // TILES, count - 1)
    return tl.load(row_pages + first + following * step).to(tl.int32)


@triton.jit
def mask_scores(scores, key, position, tree_mask, token_mask):
    """-inf for keys that their row does not see. tree_mask: None without trees; token_mask: of each row."""
    seen = key[None, :] <= position[:, None]
    if tree_mask is not None:
        seen &= is_seen(token_mask, position[:, None] - key[None, :])
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def is_seen(tree_mask, before):
    """Whether rows see the column that is `before` columns before their own. tree_mask: see `batch.TreeMask`; its
    highest bit is always set.
    """
    return ((tree_mask[:, None] >> tl.minimum(tl.maximum(before, 0), 63).to(tl.int64)) & 1) != 0


@triton.jit
def path_rows(paths, pages, token, position, keys):
    """int64: the plane rows of context positions of a token at `position`. paths: see `args.DecodeRows`. Keys after the
    token in its page are not seen, so any row serves.
    """
    back = position - keys
    listed = (back >= 0) & (back < PATH)
    column = tl.where(listed, tl.load(paths + token * PATH + back, mask=listed, other=0), keys)
    return tl.load(pages + column // 64).to(tl.int64) * 64 + column % 64


@triton.jit
def largest_of(q):
    """The largest magnitude of each row. Queries are divided by it to fit float16: one instruction converts e4m3 keys
    to float16, several to bfloat16.
    """
    return tl.maximum(tl.max(tl.abs(q.to(tl.float32)), 1), 1e-20)


@triton.jit
def merge_splits(partial, lse, pair, splits, DIM: constexpr, SPLITS: constexpr):
    """The splits of one token and head merged: [DIM] float32. Few splits are read together with their LSE, and an empty
    one is dropped; of many splits most are empty and are not read.
    """
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIM)
    own = tl.load(lse + pair * splits + split, mask=split < splits, other=-float("inf"))
    at = partial + (pair * splits + split[:, None]) * DIM + dim[None, :]
    is_read = split < splits if SPLITS <= 16 else own > -float("inf")
    parts = tl.load(at, mask=is_read[:, None], other=0.0).to(tl.float32)
    top = tl.max(own, 0)
    weights = tl.exp(own - tl.where(top == -float("inf"), 0.0, top))
    weights /= tl.maximum(tl.sum(weights, 0), 1e-30)
    return tl.sum(tl.where(weights[:, None] > 0.0, parts * weights[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["splits"])
def _merge(partial, lse, out, out_lse, splits, DIM: constexpr, SPLITS: constexpr, PDL: constexpr):
    """Program i: token and head i."""
    wait_for_previous(PDL)
    pair = tl.program_id(0).to(tl.int64)
    joined = merge_splits(partial, lse, pair, splits, DIM, SPLITS)
    tl.store(out + pair * DIM + tl.arange(0, DIM), joined.to(out.dtype.element_ty))
    if out_lse is not None:
        split = tl.arange(0, SPLITS)
        own = tl.load(lse + pair * splits + split, mask=split < splits, other=-float("inf"))
        top = tl.max(own, 0)
        base = tl.where(top == -float("inf"), 0.0, top)
        tl.store(out_lse + pair, base + tl.log(tl.sum(tl.exp(own - base), 0)))


def merge_with_lse(partial: Tensor, lse_THs: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """`merge`, with the LSE of each token and head: → ([T, H, dim], [T, H])."""
    if partial.shape[2] == 1:
        return partial[:, :, 0], lse_THs[:, :, 0]
    lse_TH = lse_THs.new_empty(lse_THs.shape[:2])
    return merge(partial, lse_THs, dtype, lse_TH), lse_TH


def merge(
    partial: Tensor, lse_THs: Tensor, dtype: torch.dtype = torch.bfloat16, out_lse: Tensor | None = None
) -> Tensor:
    """Merges the splits of `decode`: → [T, H, dim]. Launches nothing for one split. out_lse [T, H] gets the LSE of
    several.
    """
    tokens, heads, splits, dim = partial.shape
    if splits == 1:
        return partial[:, :, 0]
    out = torch.empty(tokens, heads, dim, dtype=dtype, device=partial.device)
    _merge[(tokens * heads,)](
        partial, lse_THs, out, out_lse, splits, DIM=dim, SPLITS=triton.next_power_of_2(splits),
        **launch_config(out, 4),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["lse_head", "other_lse_head"], do_not_specialize_on_alignment=["lse", "other_lse"])
def _merge_state(
    out, lse, other, other_lse, heads,
    out_token, out_head, lse_token, lse_head, other_token, other_head, other_lse_token, other_lse_head,
    DIM: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program i: token and head i."""
    wait_for_previous(PDL)
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
    """Merges attention to two disjoint parts of a context into the first pair, in one launch; see `ref.merge_states`.

    LSE: float32 [T, H]. Any strides. An output whose LSE is -inf does not count, but must be finite.
    """
    tokens, heads, dim = out_THv.shape
    _merge_state[(tokens * heads,)](
        out_THv, lse_TH, other_THv, other_lse_TH, heads, *out_THv.stride()[:2], *lse_TH.stride(),
        *other_THv.stride()[:2],
        *other_lse_TH.stride(), DIM=dim, **launch_config(out_THv, 1),
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["tokens", "rows", "table_row"], do_not_specialize_on_alignment=["table", "starts", "firsts"]
)
def _gather(
    first, second, table, starts, firsts, out, first_scale, second_scale, tokens, rows, table_row,
    A: constexpr, B: constexpr, SECOND: constexpr, STRIDE: constexpr, N: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (b, i): N tokens of row i; row `rows` zeroes what lies after all rows, shared among the programs of axis
    0.
    """
    wait_for_previous(PDL)
    row, a, b = tl.program_id(1), tl.arange(0, A)[None, :], A + tl.arange(0, B)[None, :]
    begin = tl.load(starts + row)
    if row == rows:
        for block in range(begin + tl.program_id(0) * N, tokens, tl.num_programs(0) * N):
            beyond = block + tl.arange(0, N)
            nothing = out + beyond.to(tl.int64)[:, None] * (A + B)
            tl.store(nothing + a, tl.zeros((N, A), out.dtype.element_ty), mask=(beyond < tokens)[:, None])
            tl.store(nothing + b, tl.zeros((N, B), out.dtype.element_ty), mask=(beyond < tokens)[:, None])
        return
    end = tl.load(starts + row + 1)
    token = begin + tl.program_id(0) * N + tl.arange(0, N)
    real = (token < end)[:, None]
    position = tl.program_id(0) * N + tl.arange(0, N)
    position += tl.load(firsts + row)
    page = tl.load(table + row.to(tl.int64) * table_row + position // 64, mask=token < end, other=0).to(tl.int64)
    source = (page * 64 + position % 64)[:, None] * STRIDE
    target = out + token.to(tl.int64)[:, None] * (A + B)
    x = tl.load(first + source + a, mask=real, other=0.0)
    y = tl.load(second + source + (SECOND - A + b), mask=real, other=0.0)
    if first_scale is not None:
        x, y = x.to(tl.float32) * tl.load(first_scale), y.to(tl.float32) * tl.load(second_scale)
    tl.store(target + a, x.to(out.dtype.element_ty), mask=real)
    tl.store(target + b, y.to(out.dtype.element_ty), mask=real)


def gather_rows(
    planes: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    table_RL: Tensor,
    chunk: ContextChunk,
    columns: tuple[int, int, int, int],
    at_once: int,
    is_padded: bool,
) -> Tensor:
    """Cached tokens of ragged rows, contiguous and dequantized: → bfloat16 [tokens, columns of both planes].

    planes: two planes, then their scales or None. columns: how many of the first plane and of the second, both powers
    of two; where the second's begin; how many a plane has. at_once: tokens of a program. is_padded: zeroes what follows
    the last row.
    """
    first, second, *scales = planes
    dtype = first.dtype if scales[0] is None else torch.bfloat16
    device = table_RL.device  # planes may be in host memory
    out = torch.empty(chunk.tokens, columns[0] + columns[1], dtype=dtype, device=device)
    rows = len(chunk.starts_R1) - 1
    _gather[triton.cdiv(chunk.max_tokens, at_once), rows + is_padded](
        first, second, table_RL, chunk.starts_R1, chunk.first_R, out, *scales, chunk.tokens, rows, table_RL.stride(0),
        *columns, at_once, **launch_config(out, 4),
    )  # fmt: skip
    return out
