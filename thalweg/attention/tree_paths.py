"""Positions on the paths of a draft tree, and the columns of the context where they are stored."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.batch import TreeMask
from thalweg.core.tree import MAX_TREE_NODES


def paths_of_tree(tree: TreeMask, tokens: int) -> Tensor:
    """Columns of the last D positions of each of the step's first `tokens` tokens: int32 [tokens, D], own column first.

    D is the number of bits of a tree mask; at earlier positions column and position are equal. Does not synchronize.
    """
    column_T1, tree_mask_T1 = (x[:tokens].unsqueeze(1) for x in tree[:2])
    before_D = torch.arange(MAX_TREE_NODES + 1, device=column_T1.device)
    is_seen_TD = (tree_mask_T1 >> before_D) & 1
    seen_TD = is_seen_TD.cumsum(1)  # how many columns each token sees up to this one, going back
    # where no column of the mask is left all before are seen
    path_TD = column_T1 + seen_TD[:, -1:] - torch.nn.functional.pad(before_D + len(before_D), (0, 1))
    path_TD.scatter_(1, torch.where(is_seen_TD == 0, len(before_D), seen_TD - 1), column_T1 - before_D)
    return path_TD[:, :-1].to(torch.int32)


def path_columns(positions_TK: Tensor, positions_T: Tensor, paths_TD: Tensor | None) -> Tensor:
    """Columns of positions on each token's path: int64 [T, K].

    positions_T: of the tokens themselves. paths_TD: of `paths_of_tree`; None: columns are positions.
    """
    if paths_TD is None:
        return positions_TK
    back_TK = positions_T.unsqueeze(1) - positions_TK
    last = paths_TD.shape[1] - 1
    listed_TK = paths_TD.to(torch.int64).gather(1, back_TK.clamp(0, last))
    return torch.where((back_TK >= 0) & (back_TK <= last), listed_TK, positions_TK)
