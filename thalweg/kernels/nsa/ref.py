"""Reference of native sparse attention (arXiv 2502.11089) over pages, as fla-core 0.6.0 defines it: blocks of 64 tokens
are pooled by their mean, and all three branches read the same keys and values. A block is a page.

A token at position t, in block c:
- Compression: attention to the pooled blocks whose last token is at most t; 0 where there is none.
- Selection: attention to the tokens up to t of `topk` blocks. First c, c - 1 and 0, in this order; then by the weight
  of the block in compression, which the query heads of a key head average. Of equal blocks the first is chosen.
- Window: attention to the last `window` tokens, its own among them.

The result is the sum of the three, each times its gate.

Letters: T query tokens, t those of one row, H query heads, K key heads, G query heads of a key head, d key dims, v
value dims, P pages of 64, L columns of the page table, B blocks of a context, S its tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.kernels.attend.args import QueryRows

PAGE = 64  # tokens of a page, and of a block
FORCED = 2.0  # least score of a block that is always chosen; weights are at most 1


class NsaPlanes(NamedTuple):
    """The keys and values of a layer, and their means over each full page."""

    key_PSKd: Tensor  # [P, 64, K, d]
    value_PSKv: Tensor
    pooled_key_PKd: Tensor  # of a page that is not full: anything finite
    pooled_value_PKv: Tensor


class NsaConfig(NamedTuple):
    """The facts of a model that the kernels need."""

    topk: int  # blocks that a token selects, at least 1
    window: int  # tokens; 0: no window
    scale: float  # of scores


def write(key_TKd: Tensor, value_TKv: Tensor, write_T: Tensor, planes: NsaPlanes) -> None:
    """Stores keys and values, and pools each page whose last token is among them.

    write_T: int64, rows of the planes. The tokens of a row are side by side, in the order of their positions. A page is
    pooled again when its last token is stored again, so rejected drafts leave nothing behind.
    """
    full = write_T[write_T % PAGE == PAGE - 1] // PAGE
    for new, plane, pooled in ((key_TKd, *planes[::2]), (value_TKv, *planes[1::2])):
        plane.flatten(0, 1)[write_T] = new
        pooled[full] = plane[full].float().mean(1).to(pooled.dtype)


def attend(
    query_THd: Tensor, gates_TH3: Tensor, planes: NsaPlanes, rows: QueryRows, config: NsaConfig, max_kv_len: int
) -> Tensor:
    """Sparse attention of tokens whose keys are stored: → [T, H, v], in the queries' dtype.

    gates_TH3: of compression, selection and window, after their sigmoid. max_kv_len: upper bound of the contexts.
    """
    out_THv = query_THd.new_empty(*query_THd.shape[:2], planes.value_PSKv.shape[3])
    table_RL = rows.table_RL[:, : -(-max_kv_len // PAGE)].long()
    for row in set(rows.rows_T.tolist()):
        own = rows.rows_T == row
        context = NsaPlanes(*(plane[table_RL[row]].float() for plane in planes))
        out_tHv = _attend_row(query_THd[own].float(), gates_TH3[own].float(), context, rows.positions_T[own], config)
        out_THv[own] = out_tHv.to(out_THv.dtype)
    return out_THv


def _attend_row(
    query_tHd: Tensor, gates_tH3: Tensor, context: NsaPlanes, positions_t: Tensor, config: NsaConfig
) -> Tensor:
    key_SKd, value_SKv = (x.flatten(0, 1) for x in context[:2])
    tokens, heads, dim = query_tHd.shape
    query_tKGd = query_tHd.view(tokens, -1, heads // key_SKd.shape[1], dim) * config.scale
    position = positions_t[:, None]
    token_S = torch.arange(len(key_SKd), device=position.device)
    block_B = torch.arange(len(context.key_PSKd), device=position.device)
    is_seen = token_S <= position
    is_full = (block_B + 1) * PAGE - 1 <= position
    weights_tKGB = _weights(query_tKGd, context.pooled_key_PKd, is_full[:, None])
    is_chosen = _choose(weights_tKGB.mean(2), position // PAGE, config.topk)
    is_selected = is_chosen.repeat_interleave(PAGE, 2) & is_seen[:, None]
    is_near = (is_seen & (token_S > position - config.window))[:, None]
    branches = (
        (weights_tKGB, context.pooled_value_PKv),
        (_weights(query_tKGd, key_SKd, is_selected), value_SKv),
        (_weights(query_tKGd, key_SKd, is_near), value_SKv),
    )
    outs = [torch.einsum("tkgs,skv->tkgv", weights, value).flatten(1, 2) for weights, value in branches]
    return torch.stack(outs, 2).mul_(gates_tH3[..., None]).sum(2)


def _weights(query_tKGd: Tensor, key_SKd: Tensor, is_seen_tKS: Tensor) -> Tensor:
    """→ [t, K, G, S]; 0 where nothing is seen."""
    scores = torch.einsum("tkgd,skd->tkgs", query_tKGd, key_SKd)
    return scores.masked_fill_(~is_seen_tKS[:, :, None], -torch.inf).softmax(-1).nan_to_num_(0.0)


def _choose(weights_tKB: Tensor, own_t1: Tensor, topk: int) -> Tensor:
    """Which blocks are selected: → bool [t, K, B]. Of fewer than topk all are, and some later ones."""
    block_B = torch.arange(weights_tKB.shape[2], device=own_t1.device)
    is_forced, is_later = (block_B == 0) | (block_B >= own_t1 - 1), block_B > own_t1
    forced = FORCED + (block_B >= own_t1 - 1).float() + (block_B >= own_t1)
    scores = torch.where(is_forced[:, None], forced[:, None], weights_tKB).masked_fill(is_later[:, None], -1.0)
    first = scores.sort(dim=2, descending=True, stable=True).indices[..., :topk]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(2, first, True)
