"""Simulated acceptance, for benchmarks: a fixed mean number of drafts is accepted, whatever the model computes. The
text means nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.core.plan import SamplingNeeds
from thalweg.sampling.random import mix
from thalweg.sampling.sample import Sampler, SamplerWrapper


class SimulatedAcceptance(SamplerWrapper):
    """`Sampling` that draws the drafts themselves, so many that a verification brings `length` tokens on average, if
    there are enough.
    """

    def __init__(self, sampler: Sampler, length: float) -> None:
        super().__init__(sampler)
        self.right = length - 1

    def draw(self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds) -> Tensor:
        known_N, vocab = slots.length[slot_N], logits_NV.shape[1]
        drafts_N, token_NK, any_NK = ahead(slots, slot_N, ints_NI)
        noise_N = mix(known_N * 2 + slot_N * 1000003) & 0xFFFF  # one of each row and step
        right_N = int(self.right) + (noise_N < int((self.right % 1) * 0x10000)).to(torch.int64)
        ahead_N = ints_NI[:, 0] - known_N
        drawn_N = self.sampler.draw(logits_NV, slots, slot_N, ints_NI, needs)
        # behind the last that is right, what is drawn must not happen to be a draft
        hit_N = ((token_NK == drawn_N.unsqueeze(1)) & any_NK).any(1)
        other_N = (token_NK.masked_fill(~any_NK, -1).amax(1) + 1) % vocab
        wrong_N = torch.where((ahead_N == right_N) & hit_N, other_N, drawn_N)
        return torch.where(ahead_N < right_N, drafts_N, wrong_N)


class Ahead(NamedTuple):
    """The drafts behind each position. first_N int64: the first of them, or only one; any_NK: which tokens int64 [N, K]
    are others, too.
    """

    first_N: Tensor
    token_NK: Tensor
    any_NK: Tensor


def ahead(slots: Slots, slot_N: Tensor, ints_NI: Tensor) -> Ahead:
    """Of a chain there is one; behind the leaf of a tree the first is no draft."""
    if not slots.tree.is_tree:
        token_N = slots.tokens_SL[slot_N, ints_NI[:, 0]].to(torch.int64)
        return Ahead(token_N, token_N.unsqueeze(1), torch.ones_like(token_N, dtype=torch.bool).unsqueeze(1))
    node_N = ints_NI[:, 1] - slots.at[slot_N]
    number_K = torch.arange(1, slots.nodes_SN3.shape[1], device=slot_N.device)
    child_NK = (slots.nodes_SN3[slot_N, 1:, 0] == node_N.unsqueeze(1)) & (number_K <= ints_NI[:, 7:8])
    column_NK = (slots.length[slot_N].unsqueeze(1) + number_K - 1).clamp(max=slots.context)
    token_NK = slots.tokens_SL[slot_N.unsqueeze(1), column_NK].to(torch.int64)
    first_N1 = child_NK.to(torch.int8).argmax(1, keepdim=True)
    return Ahead(token_NK.gather(1, first_N1).squeeze(1), token_NK, child_NK)
