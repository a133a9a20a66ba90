"""`ref` in Triton: the best children in two launches, the next level and the tree in one each, where torch takes some
sixty a level.

Floor of the best children: 4 · T · D bytes read once, 0.7 µs for the four nodes of a level of DeepSeek's vocabulary on
an H100; all else is launches. Of equal scores the first wins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.build_inputs.ref import SlotTensors
from thalweg.kernels.build_tree.ref import BuiltTree, LevelInputs, TreeCandidates, TreeLevel, first_candidate
from thalweg.kernels.draft_state.triton import not_finite
from thalweg.kernels.launch import launch_options
from thalweg.kernels.pdl import pdl_begin
from thalweg.kernels.slot_columns import END, INT_COLUMNS, LENGTH, NUM_COMPUTED, NUM_DRAFTS

PART = constexpr(4096)  # entries of a row that a program looks at
BLOCK = constexpr(2048)  # numbers of a state that one looks at together
LEAST = constexpr(-3.4028234663852886e38)  # the score of an impossible candidate


class _Parts(NamedTuple):
    """The best B entries, the largest logit and Σ exp of each of P parts of the logits of T tokens."""

    top_TPB: Tensor
    id_TPB: Tensor
    most_TP: Tensor
    sum_TP: Tensor


@triton.jit
def _best_of_parts(logits_TD, parts, stride, D, B, PDL: constexpr):
    pdl_begin(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = token * tl.num_programs(1) + part
    d_B = part * PART + tl.arange(0, PART)
    x_B = tl.load(logits_TD + token * stride + d_B, mask=d_B < D, other=float("-inf"))
    most = tl.max(x_B, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(parts.most_TP + place, base)
    tl.store(parts.sum_TP + place, tl.sum(tl.exp(x_B - base), 0))  # what is no number stays so
    x_B = tl.where(d_B < D, tl.where(x_B == x_B, tl.maximum(x_B, LEAST), LEAST), float("-inf"))
    for b in range(B):
        top, at = tl.max(x_B, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(parts.top_TPB + place * B + b, top)
        tl.store(parts.id_TPB + place * B + b, part * PART + at)
        x_B = tl.where(d_B == part * PART + at, float("-inf"), x_B)


@triton.jit
def _best(parts, ids_D, score_TB, token_TB, P, B, BLOCK_P: constexpr, BLOCK_C: constexpr, PDL: constexpr):
    pdl_begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    p_B, c_B = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
    most_B = tl.load(parts.most_TP + token * P + p_B, mask=p_B < P, other=LEAST)
    sum_B = tl.load(parts.sum_TP + token * P + p_B, mask=p_B < P, other=0.0)
    most = tl.max(most_B, 0)
    whole = most + tl.log(tl.sum(sum_B * tl.exp(most_B - most), 0))
    top_B = tl.load(parts.top_TPB + token * P * B + c_B, mask=c_B < P * B, other=float("-inf"))
    for b in range(B):
        top, at = tl.max(top_B, 0, return_indices=True, return_indices_tie_break_left=True)
        score = tl.where(top > LEAST, top - whole, float("-inf"))
        id = tl.load(parts.id_TPB + token * P * B + at).to(tl.int64)
        if ids_D is not None:
            id = tl.load(ids_D + id)
        tl.store(score_TB + token * B + b, tl.where(score == score, score, float("-inf")))
        tl.store(token_TB + token * B + b, id)
        top_B = tl.where(c_B == at, float("-inf"), top_B)


def top_children(logits_TD: Tensor, branches: int, ids_D: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `ref.top_children`. logits_TD float32."""
    (tokens, entries), options = logits_TD.shape, launch_options(logits_TD)
    count = triton.cdiv(entries, PART.value)
    new, best = logits_TD.new_empty, (tokens, count, branches)
    parts = _Parts(new(best), new(best, dtype=torch.int32), new(tokens, count), new(tokens, count))
    score_TB, token_TB = new(tokens, branches), new(tokens, branches, dtype=torch.int64)
    _best_of_parts[tokens, count](logits_TD, parts, logits_TD.stride(0), entries, branches, num_warps=8, **options)
    _best[(tokens,)](
        parts, ids_D, score_TB, token_TB, count, branches, triton.next_power_of_2(count),
        triton.next_power_of_2(count * branches), num_warps=2, **options,
    )  # fmt: skip
    return score_TB, token_TB


@triton.jit(do_not_specialize=["M", "C", "first", "depth"])
def _advance(
    score_TB, token_TB, level, slot_E, ints_EI, table_SP, made, following, placed, M, B, C, first, depth, P, stride,
    PAGE: constexpr, BLOCK: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0)
    c_B = tl.arange(0, BLOCK)
    inside, m_B, own = c_B < M * B, row * M + c_B // B, row * M * B
    score_B = tl.load(score_TB + own + c_B, mask=inside, other=float("-inf"))
    score_B += tl.load(level.score_EM + m_B, mask=inside, other=0.0)
    place_B = row * C + first + c_B
    tl.store(made.score_EC + place_B, score_B, mask=inside)
    tl.store(made.token_EC + place_B, tl.load(token_TB + own + c_B, mask=inside), mask=inside)
    tl.store(made.parent_EC + place_B, tl.load(level.number_EM + m_B, mask=inside), mask=inside)
    slot = tl.load(slot_E + row)
    at, end = tl.load(ints_EI + row * stride + NUM_COMPUTED), tl.load(ints_EI + row * stride + END)
    left_B = tl.where(inside, tl.maximum(score_B, LEAST), float("-inf"))
    for b in range(B):
        top, c = tl.max(left_B, 0, return_indices=True, return_indices_tie_break_left=True)
        left_B = tl.where(c_B == c, float("-inf"), left_B)
        m, here = row * M + c // B, row * B + b
        ahead = tl.load(level.ahead_EM + m) * 0 + (1 + depth * B + b)
        further = ahead - tl.load(level.ahead_EM + m)
        parent_mask = tl.where(depth > 0, tl.load(level.mask_EM + m), -1)
        mask = (parent_mask << further) | 1
        column = at + ahead
        real = (column < end).to(tl.int64)
        column *= real
        page = tl.load(table_SP + slot * P + column // PAGE).to(tl.int64)
        tl.store(following.number_EM + here, (first + c + 1).to(tl.int64))
        tl.store(following.ahead_EM + here, ahead)
        tl.store(following.mask_EM + here, mask)
        tl.store(following.score_EM + here, tl.where(top > LEAST, top, float("-inf")))
        tl.store(placed.ids_T + here, tl.load(token_TB + own + c) * real)
        tl.store(placed.positions_T + here, (at + depth + 1) * real)
        tl.store(placed.columns_T + here, column)
        tl.store(placed.tree_mask_T + here, mask)
        tl.store(placed.write_T + here, (page * PAGE + column % PAGE) * real)
        tl.store(placed.real_T + here, real > 0)
        tl.store(placed.from_T + here, m.to(tl.int64))


def expand_level(
    score_TB: Tensor, token_TB: Tensor, level: TreeLevel, depth: int, slot_E: Tensor, ints_EI: Tensor, table_SP: Tensor,
    page: int, made: TreeCandidates
) -> tuple[TreeLevel, LevelInputs]:  # fmt: skip
    """See `ref.expand_level`."""
    (many, nodes), branches = level.number_EM.shape, score_TB.shape[1]
    new, shape, kinds = slot_E.new_empty, (many, branches), [torch.int64] * 5 + [torch.bool, torch.int64]
    following = TreeLevel(new(shape), new(shape), new(shape), new(shape, dtype=torch.float32))
    placed = LevelInputs(*(new(many * branches, dtype=kind) for kind in kinds))
    _advance[(many,)](
        score_TB, token_TB, level, slot_E, ints_EI, table_SP, made, following, placed, nodes, branches,
        made.score_EC.shape[1], first_candidate(depth, branches), depth, table_SP.shape[1], ints_EI.stride(0), page,
        triton.next_power_of_2(nodes * branches), num_warps=1, **launch_options(slot_E),
    )  # fmt: skip
    return following, placed


@triton.jit(do_not_specialize=["C", "K", "deepest"])
def _settle(
    made, state_TW, given_EW, slot_E, ints_EI, fields, rank_EC, out, B, C, K, L, SPAN, W, stride, deepest,
    NODES: constexpr, BLOCK_C: constexpr, PDL: constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    c_B = tl.arange(0, BLOCK_C)
    inside, own = c_B < C, row * C
    score_B = tl.maximum(tl.load(made.score_EC + own + c_B, mask=inside, other=float("-inf")), LEAST)
    rank_B = tl.zeros([BLOCK_C], tl.int32)
    for c in range(C):
        score = tl.maximum(tl.load(made.score_EC + own + c), LEAST)
        rank_B += ((score > score_B) | ((score == score_B) & (c < c_B))).to(tl.int32)
    tl.store(rank_EC + own + c_B, rank_B, mask=inside)
    tl.debug_barrier()  # others' ranks are read
    kept = inside & (rank_B < K)
    number_B = tl.where(kept, rank_B + 1, 0).to(tl.int64)
    ancestor_B = tl.load(made.parent_EC + own + c_B, mask=kept, other=0)
    parent_B = tl.zeros([BLOCK_C], tl.int64)
    mask_B = ((parent_B - 1) << number_B) | 1
    for up in range(deepest):
        there = ancestor_B > 0
        node_B = tl.load(rank_EC + own + ancestor_B - 1, mask=there, other=0).to(tl.int64) + 1
        parent_B = tl.where(there & (up == 0), node_B, parent_B)
        seen_B = (ancestor_B * 0 + 1) << tl.where(there, number_B - node_B, 0)
        mask_B = tl.where(there, mask_B | seen_B, mask_B)
        ancestor_B = tl.load(made.parent_EC + own + ancestor_B - 1, mask=there, other=0)
    slot = tl.load(slot_E + row)
    length = tl.load(ints_EI + row * stride + LENGTH)
    token_B = tl.load(made.token_EC + own + c_B, mask=kept, other=0)
    node = fields.nodes_SN3 + (slot * NODES + number_B) * 3
    depth_B = tl.where(c_B < B, 1, 2 + (c_B - B) // (B * B)).to(tl.int64)
    tl.store(node, parent_B, mask=kept)
    tl.store(node + 1, depth_B, mask=kept)
    tl.store(node + 2, mask_B, mask=kept)
    tl.store(fields.tokens_SL + slot * L + tl.minimum(length + number_B - 1, L - 1), token_B.to(tl.int32), mask=kept)
    tl.store(out.token_EK + row * K + number_B - 1, token_B, mask=kept)
    tl.store(out.parent_EK + row * K + number_B - 1, parent_B, mask=kept)
    tl.store(fields.ints_SI + slot * INT_COLUMNS + NUM_DRAFTS, slot * 0 + K)
    first_B = inside & (c_B % B == 0)  # children: of a node that is possible the best is, if its logits were numbers
    node_B = tl.load(made.parent_EC + own + c_B, mask=first_B, other=0)
    of_B = tl.load(made.score_EC + own + node_B - 1, mask=first_B & (node_B > 0), other=0.0)
    lost = tl.sum((first_B & (score_B <= LEAST) & (of_B > LEAST)).to(tl.int32), 0)
    worse, bad = _any_not_finite(state_TW + row * SPAN, SPAN), _any_not_finite(given_EW + row * W, W)
    tl.store(out.is_valid_E + row, (~worse & (lost == 0)) | bad)


@triton.jit
def _any_not_finite(x_W, W):
    found = tl.zeros([BLOCK], tl.int32)
    for start in range(0, W, BLOCK):
        w_B = start + tl.arange(0, BLOCK)
        found |= not_finite(tl.load(x_W + w_B, mask=w_B < W, other=0.0))
    return tl.max(found, 0) > 0


def store_best_tree(
    made: TreeCandidates,
    branches: int,
    state_TW: Tensor,
    given_EW: Tensor,
    slot_E: Tensor,
    ints_EI: Tensor,
    fields: SlotTensors,
    out: BuiltTree,
) -> None:
    """See `ref.store_best_tree`."""
    (many, count), device = made.score_EC.shape, slot_E.device
    nodes, deepest = out.token_EK.shape[1], 1 + (count // branches - 1) // branches
    assert fields.nodes_SN3 is not None, "trees have nodes"
    rank = torch.empty(many, count, dtype=torch.int32, device=device)
    state_TW, given_EW = state_TW.contiguous(), given_EW.contiguous()
    _settle[(many,)](
        made, state_TW, given_EW, slot_E, ints_EI, fields, rank, out, branches, count, nodes, fields.tokens_SL.shape[1],
        state_TW.numel() // many, given_EW.shape[1], ints_EI.stride(0), deepest, fields.nodes_SN3.shape[1],
        triton.next_power_of_2(count), num_warps=4, **launch_options(slot_E),
    )  # fmt: skip
