"""Which context tokens a query attends to under DSA: the indexer's choice, or another one put in its place."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Selection(Protocol):
    """Chooses `topk` of each row's candidates: scores float32 [N, S], -inf where there is no candidate → int64 [N,
    topk].

    When a row has fewer candidates than topk, the rest of its choice is masked by the caller.
    """

    def __call__(self, scores_NS: Tensor, topk: int) -> Tensor: ...


def best(scores_NS: Tensor, topk: int) -> Tensor:
    """The model's own: the highest scores. Ties are arbitrary, the order too."""
    return scores_NS.topk(topk, -1, sorted=False).indices


class RandomChoice:
    """A uniformly random choice among the candidates: what accuracy is left without the indexer (`thalweg eval`)."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __call__(self, scores_NS: Tensor, topk: int) -> Tensor:
        device = scores_NS.device
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        draws = torch.rand(scores_NS.shape, generator=self.generators[device], device=device)
        return best(draws.masked_fill_(scores_NS == -torch.inf, -torch.inf), topk)


class Choice(NamedTuple):
    """The chosen context of a group, tile by tile: positions int64 [N, K] and their bias float32 [N, K]: -inf for what
    only fills up.
    """

    positions: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]


Choices = tuple[Choice | None, ...]  # of each group; None: its whole context
