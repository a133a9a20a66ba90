"""How a drafter that has a distribution of the next token makes a draft of it: in the way that the rule of acceptance
wants.

Letters: E rows, V vocabulary of the target, K drafts of a row at most, S slots.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from thalweg.batch.slots import Field, Slots
from thalweg.core.plan import SamplingNeeds
from thalweg.sampling.distribution import REFERENCE_DISTRIBUTION, SamplingDistribution
from thalweg.sampling.random import seed_for
from thalweg.sampling.sample import REFERENCE, Sampler

PROBABILITIES = "draft_probabilities"  # of the slots: what each draft was drawn from
DRAFT = 1  # seeds the noise of drafts, where it must not be the target's


class DraftSampling(Protocol):
    """Draws drafts of rows of which some sample; where none does, a draft is the most likely token. `distribution` is
    for drafters that need several drafts of a row.
    """

    @property
    def distribution(self) -> SamplingDistribution: ...

    def fields(self) -> tuple[Field, ...]:
        """What it keeps of each slot."""

    def draw(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        """int64 [E]: a draft of the token that stands `ahead` tokens behind the known ones of each slot, the most
        likely one for who is greedy; of logits that are no numbers it may be below 0. logits_EV float32: the drafter's,
        -inf for tokens that it does not know. ints_EI: the slots' integers as if all before it were known; ahead may be
        int64 [E]. truncated: see `SamplingNeeds`.
        """


class CoupledDraftSampling:
    """Drafts are drawn with the target's own Gumbel noise, so both draw the same token as often as two draws can that
    do not know each other's distribution (`sampling.drafts`). sampler: draws the target's tokens.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.distribution = sampler, sampler.distribution

    def fields(self) -> tuple[Field, ...]:
        return ()

    def draw(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        return self.sampler.draw(logits_EV, slots, slot_E, ints_EI, SamplingNeeds(random=True, truncated=truncated))


COUPLED = CoupledDraftSampling(REFERENCE)


class IndependentDraftSampling:
    """Drafts are drawn with noise of their own, by temperature and truncation as the target is, and what they were
    drawn from is kept. width: K.
    """

    def __init__(self, width: int, vocab: int, distribution: SamplingDistribution = REFERENCE_DISTRIBUTION) -> None:
        self.width, self.vocab, self.distribution = width, vocab, distribution

    def fields(self) -> tuple[Field, ...]:
        return (Field(PROBABILITIES, (self.width, self.vocab), torch.float32),)

    def draw(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        greedy_E = slots.floats_SF[:, 0].index_select(0, slot_E) == 0
        q_EV = self.distribution.apply_temperature(logits_EV, slots, slot_E, ints_EI, truncated).softmax(-1)
        kept_NV = slots.extra[PROBABILITIES].view(-1, self.vocab)
        kept_NV.index_copy_(0, slot_E * self.width + ahead, q_EV)
        perturbed_EV = self.distribution.add_gumbel_noise(q_EV.log_(), seed_for(ints_EI[:, 3], DRAFT), ints_EI[:, 0])
        return torch.where(greedy_E, logits_EV.argmax(-1), perturbed_EV.argmax(-1))
