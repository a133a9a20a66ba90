"""Samples drafts from a drafter's distribution of the next token, as the acceptance rule needs them.

Letters: E rows, V vocabulary of the target, K drafts of a row at most, S slots.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from thalweg.batch.slots import Field, Slots
from thalweg.core.plan import SamplingNeeds
from thalweg.kernels.build_inputs.ref import LENGTH, SEED
from thalweg.sampling.distribution import REFERENCE_DISTRIBUTION, SamplingDistribution
from thalweg.sampling.random import seed_for
from thalweg.sampling.sample import REFERENCE, Sampler

PROBABILITIES = "draft_probabilities"  # slot field: the distribution from which each draft was sampled
DRAFT = 1  # seeds the noise of drafts, where it must not be the target's


class DraftSampling(Protocol):
    """Samples drafts for steps in which some row has a temperature; else a draft is the most likely token.
    `distribution`: for drafters that need several drafts of a row.
    """

    @property
    def distribution(self) -> SamplingDistribution: ...

    def fields(self) -> tuple[Field, ...]:
        """Slot fields that it needs."""

    def sample_drafts(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        """int64 [E]: a draft for the position `ahead` tokens after the last known token of each slot; the most likely
        token for greedy rows. It may be below 0 if logits are NaN. logits_EV float32: the drafter's, -inf for tokens
        that it does not know. ints_EI: the slots' integers as if all tokens before the draft were known. ahead may be
        int64 [E]. truncated: see `SamplingNeeds`.
        """


class CoupledDraftSampling:
    """Samples drafts with the target's own Gumbel noise. So draft and target are the same token as often as is possible
    for two samplers that do not know each other's distribution (`sampling.drafts`). sampler: the target's.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.distribution = sampler, sampler.distribution

    def fields(self) -> tuple[Field, ...]:
        return ()

    def sample_drafts(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        return self.sampler.sample_tokens(
            logits_EV, slots, slot_E, ints_EI, SamplingNeeds(random=True, truncated=truncated)
        )


COUPLED = CoupledDraftSampling(REFERENCE)


class IndependentDraftSampling:
    """Samples drafts with independent noise, with the target's temperature and truncation, and stores the
    distributions. width: K.
    """

    def __init__(self, width: int, vocab: int, distribution: SamplingDistribution = REFERENCE_DISTRIBUTION) -> None:
        self.width, self.vocab, self.distribution = width, vocab, distribution

    def fields(self) -> tuple[Field, ...]:
        return (Field(PROBABILITIES, (self.width, self.vocab), torch.float32),)

    def sample_drafts(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, ahead: int | Tensor, truncated: bool
    ) -> Tensor:
        greedy_E = slots.temperature.index_select(0, slot_E) == 0
        q_EV = self.distribution.apply_temperature(logits_EV, slots, slot_E, ints_EI, truncated).softmax(-1)
        kept_NV = slots.extra[PROBABILITIES].view(-1, self.vocab)
        kept_NV.index_copy_(0, slot_E * self.width + ahead, q_EV)
        perturbed_EV = self.distribution.add_gumbel_noise(
            q_EV.log_(), seed_for(ints_EI[:, SEED], DRAFT), ints_EI[:, LENGTH]
        )
        return torch.where(greedy_E, logits_EV.argmax(-1), perturbed_EV.argmax(-1))
