"""Simulated acceptance, for benchmarks: a fixed mean number of drafts is accepted, whatever the model computes. The
text means nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.core.plan import SamplingNeeds
from thalweg.kernels.build_inputs.ref import LENGTH, NUM_COMPUTED, NUM_DRAFTS
from thalweg.sampling.random import mix
from thalweg.sampling.sample import Sampler, SamplerWrapper


class SimulatedAcceptance(SamplerWrapper):
    """Returns the drafts themselves as the target's tokens, so that a verification yields `length` tokens on average,
    if there are enough drafts.
    """

    def __init__(self, sampler: Sampler, length: float) -> None:
        super().__init__(sampler)
        self.mean_accepted = length - 1

    def sample_tokens(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds
    ) -> Tensor:
        known_N, vocab = slots.length[slot_N], logits_NV.shape[1]
        drafts_N, token_NK, any_NK = ahead(slots, slot_N, ints_NI)
        noise_N = mix(known_N * 2 + slot_N * 1000003) & 0xFFFF  # one of each row and step
        num_accepted_N = int(self.mean_accepted) + (noise_N < int((self.mean_accepted % 1) * 0x10000)).to(torch.int64)
        ahead_N = ints_NI[:, LENGTH] - known_N
        target_ids_N = self.sampler.sample_tokens(logits_NV, slots, slot_N, ints_NI, needs)
        # the token after the last accepted draft must not equal a draft
        hit_N = ((token_NK == target_ids_N.unsqueeze(1)) & any_NK).any(1)
        other_N = (token_NK.masked_fill(~any_NK, -1).amax(1) + 1) % vocab
        wrong_N = torch.where((ahead_N == num_accepted_N) & hit_N, other_N, target_ids_N)
        return torch.where(ahead_N < num_accepted_N, drafts_N, wrong_N)


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
        token_N = slots.tokens_SL[slot_N, ints_NI[:, LENGTH]].to(torch.int64)
        return Ahead(token_N, token_N.unsqueeze(1), torch.ones_like(token_N, dtype=torch.bool).unsqueeze(1))
    node_N = ints_NI[:, NUM_COMPUTED] - slots.num_computed[slot_N]
    number_K = torch.arange(1, slots.nodes_SN3.shape[1], device=slot_N.device)
    child_NK = (slots.nodes_SN3[slot_N, 1:, 0] == node_N.unsqueeze(1)) & (number_K <= ints_NI[:, NUM_DRAFTS, None])
    column_NK = (slots.length[slot_N].unsqueeze(1) + number_K - 1).clamp(max=slots.context)
    token_NK = slots.tokens_SL[slot_N.unsqueeze(1), column_NK].to(torch.int64)
    first_N1 = child_NK.to(torch.int8).argmax(1, keepdim=True)
    return Ahead(token_NK.gather(1, first_N1).squeeze(1), token_NK, child_NK)
