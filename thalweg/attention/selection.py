"""Sparse attention (DSA): which context tokens a query attends to, by the indexer's scores or another rule."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Selection(Protocol):
    """Selects `topk` candidates of each query: float32 scores [N, S], -inf for no candidate → int64 [N, topk].

    With fewer candidates than topk the caller masks the rest.
    """

    def __call__(self, scores_NS: Tensor, topk: int) -> Tensor: ...


def select_top_k(scores_NS: Tensor, topk: int) -> Tensor:
    """The model's own rule: the highest scores, in any order."""
    return scores_NS.topk(topk, -1, sorted=False).indices


class RandomSelection:
    """Uniformly random candidates: the accuracy that is left without the indexer (`thalweg eval`)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator: torch.Generator | None = None  # on the device of the scores

    def __call__(self, scores_NS: Tensor, topk: int) -> Tensor:
        if self.generator is None:
            self.generator = torch.Generator(scores_NS.device).manual_seed(self.seed)
        draws = torch.rand(scores_NS.shape, generator=self.generator, device=scores_NS.device)
        return select_top_k(draws.masked_fill_(scores_NS == -torch.inf, -torch.inf), topk)


class SelectedContext(NamedTuple):
    """The selected context of a group, tile by tile."""

    positions: tuple[Tensor, ...]  # int64 [N, K]
    biases: tuple[Tensor, ...]  # float32 [N, K], -inf for a filler


SelectedContexts = tuple[SelectedContext | None, ...]  # of each group; None is the whole context
