"""Drafts that are accepted by decree, for measuring speed with weights that mean nothing: what comes out is not the model's."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.core.grammar import Masks
from thalweg.core.plan import Needs
from thalweg.sampling.random import mix
from thalweg.sampling.sample import Logprobs, Sampled, Sampling


class Imposed:
    """`Sampling` that draws the drafts themselves, so many that a verification brings `length` tokens on average, if there are enough."""

    def __init__(self, sampling: Sampling, length: float) -> None:
        self.sampling, self.right = sampling, length - 1

    def edit(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, needs: Needs, reach: int, masks: Masks | None
    ) -> None:  # fmt: skip
        self.sampling.edit(logits_EV, slots, slot_E, ints_EI, needs, reach, masks)

    def draw(self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: Needs) -> Tensor:
        known_N, vocab = slots.length[slot_N], logits_NV.shape[1]
        drafts_N = slots.tokens_SL[slot_N, ints_NI[:, 0]].to(torch.int64)
        coin_N = mix(known_N * 2 + slot_N * 1000003) & 0xFFFF  # one of each row and step
        right_N = int(self.right) + (coin_N < int((self.right % 1) * 0x10000)).to(torch.int64)
        ahead_N = ints_NI[:, 0] - known_N
        drawn_N = self.sampling.draw(logits_NV, slots, slot_N, ints_NI, needs)
        other_N = (drafts_N + 1) % vocab  # behind the last that is right, what is drawn must not happen to be the draft
        wrong_N = torch.where((ahead_N == right_N) & (drawn_N == drafts_N), other_N, drawn_N)
        return torch.where(ahead_N < right_N, drafts_N, wrong_N)

    def choose(self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, needs: Needs) -> Sampled:
        return self.sampling.choose(logits_EV, slots, slot_E, ints_EI, needs)

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, top: int) -> Logprobs:
        return self.sampling.logprobs(logits_NV, tokens_N, top)
