"""The context that the steps of a draft share (`batch.DraftSelection`): the selection of the first one, and the drafts
since.

Letters: T tokens of the step, K selected positions, N tokens of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.attention.context import AttentionMetadata
from thalweg.attention.selection import SelectedContexts
from thalweg.attention.tree_paths import path_columns, paths_of_tree
from thalweg.batch.batch import Batch
from thalweg.batch.draft_selection import DraftSelection

NONE = (1 << 31) - 1  # a position after all others


def shared_positions(shared: DraftSelection, positions_T: Tensor) -> Tensor:
    """Positions on the path of each token: int32 [T, K], rising, -1 after the last. Where there is no room for the
    drafts since the root, the lowest positions are left out. Does not synchronize.
    """
    first_TK, root_T1 = shared.positions_TK, shared.root_T.unsqueeze(1)
    known_T1 = (first_TK >= 0).sum(1, keepdim=True)
    drafted_T1 = (positions_T.unsqueeze(1) - root_T1).clamp(min=0)
    place_K = torch.arange(first_TK.shape[1], device=first_TK.device)
    place_TK = place_K + (known_T1 + drafted_T1 - len(place_K)).clamp(min=0)
    number_TK = place_TK - known_T1  # among the drafts
    drafts_TK = torch.where(number_TK < drafted_T1, root_T1 + 1 + number_TK, -1)
    selected_TK = first_TK.gather(1, place_TK.clamp(max=len(place_K) - 1))
    return torch.where(number_TK < 0, selected_TK, drafts_TK).to(torch.int32)


def shared_columns(shared: DraftSelection, batch: Batch) -> Tensor:
    """`shared_positions` as columns of the context: int64 [T, K], -1 after the last."""
    positions_TK = shared_positions(shared, batch.positions_T).to(torch.int64)
    if batch.tree is None:
        return positions_TK
    paths_TD = paths_of_tree(batch.tree, len(batch.positions_T))
    columns_TK = path_columns(positions_TK.clamp(min=0), batch.positions_T, paths_TD)
    return columns_TK.masked_fill(positions_TK < 0, -1)


def shared_contexts(shared: DraftSelection, metadata: AttentionMetadata) -> SelectedContexts:
    """`shared_columns` as every group takes them."""
    return metadata.contexts(shared_columns(shared, metadata.batch))


def store_contexts(shared: DraftSelection, metadata: AttentionMetadata, selected: SelectedContexts) -> None:
    """Stores the selection of a draft's first step, all of whose rows select."""
    parts = list[Tensor]()
    for group, context in zip(metadata.groups, selected, strict=True):
        if context is None:  # padding of a rank that shares the tokens, which sees one
            tokens = group.rows * group.query
            parts.append(torch.full((tokens, 1), NONE, dtype=torch.int64, device=shared.root_T.device))
            continue
        tiles = (p.masked_fill(bias == -torch.inf, NONE) for p, bias in zip(*context, strict=True))
        parts.append(group.join_tiles(list(tiles)))
    width = max(part.shape[1] for part in parts)
    same = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=NONE) for part in parts]
    positions_TK = torch.cat(same).sort(1).values
    shared.store(positions_TK.masked_fill(positions_TK == NONE, -1), metadata.batch.positions_T)
