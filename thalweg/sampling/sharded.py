"""Sampling from logits that are shared by tensor-parallel ranks, each of which has those of some token ids.

A greedy token needs the best candidate of each rank only, and so does a token that is sampled without truncation in
plain torch: its noise is a function of the token id, so the largest noisy score of all is the largest of the ranks'.
Everything else gathers the logits: top-k and top-p need thresholds over the whole distribution, log-probabilities its
sum, and penalties, grammars and the kernels of a GPU work on whole rows. All ranks compute the same from equal bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import SamplingNeeds
from thalweg.kernels.build_inputs.ref import LENGTH, SEED, TEMPERATURE
from thalweg.kernels.temperature.ref import apply_temperature
from thalweg.parallel.vocabulary import VocabularyShards
from thalweg.sampling.random import exponential
from thalweg.sampling.sample import (
    NO_TOKEN,
    Logprobs,
    ReferenceSampler,
    Sampled,
    Sampler,
    SamplerWrapper,
    append_tokens,
)


class ShardedSampler:
    """`sampler` for logits [N, ids of this rank]."""

    def __init__(self, sampler: Sampler, shards: VocabularyShards) -> None:
        self.sampler, self.shards, self.distribution = sampler, shards, sampler.distribution
        self.takes_largest = not isinstance(sampler, SamplerWrapper)  # acceptance rules need distributions
        self.has_torch_noise = isinstance(sampler, ReferenceSampler)

    def edit_logits(
        self,
        logits_NV: Tensor,
        slots: Slots,
        slot_N: Tensor,
        ints_NI: Tensor,
        needs: SamplingNeeds,
        max_kv_len: int,
        masks: GrammarMasks | None,
        path_tokens_EQD: Tensor | None = None,
    ) -> None:
        all_NV, here = self.shards.gather(logits_NV), self.shards.here
        self.sampler.edit_logits(all_NV, slots, slot_N, ints_NI, needs, max_kv_len, masks, path_tokens_EQD)
        logits_NV.copy_(all_NV[:, here.start : here.stop])

    def sample_tokens(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds
    ) -> Tensor:
        if not self._needs_candidates(needs):
            return self.sampler.sample_tokens(self.shards.gather(logits_NV), slots, slot_N, ints_NI, needs)
        return self._best(logits_NV, slots, slot_N, ints_NI, needs)

    def sample_into_slots(
        self,
        logits_EV: Tensor,
        slots: Slots,
        slot_E: Tensor,
        ints_EI: Tensor,
        needs: SamplingNeeds,
        out: Sampled | None = None,
    ) -> Sampled:
        if not self._needs_candidates(needs):
            return self.sampler.sample_into_slots(self.shards.gather(logits_EV), slots, slot_E, ints_EI, needs, out)
        return append_tokens(self._best(logits_EV, slots, slot_E, ints_EI, needs), slots, slot_E, ints_EI, out)

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, top: int, listed_NL: Tensor | None = None) -> Logprobs:
        if top < 0:
            return None, None, None
        return self.sampler.logprobs(self.shards.gather(logits_NV), tokens_N, top, listed_NL)

    def _needs_candidates(self, needs: SamplingNeeds) -> bool:
        return self.takes_largest and not needs.truncated and (self.has_torch_noise or not needs.random)

    def _best(self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds) -> Tensor:
        """int64 [N]: as `ReferenceSampler.sample_tokens`, without truncation."""
        if not needs.random:
            return _token(*self.shards.largest(logits_NV)[0])
        floats_NF, here = slots.floats_SF[slot_N], self.shards.here
        scaled_NV = apply_temperature(logits_NV, floats_NF, ints_NI[:, LENGTH], truncated=False)
        noise_NV = exponential(ints_NI[:, SEED], ints_NI[:, LENGTH], len(here), here.start).log_()
        greedy, noisy = self.shards.largest(logits_NV, scaled_NV - noise_NV)
        return torch.where(floats_NF[:, TEMPERATURE] == 0, _token(*greedy), _token(*noisy))


def _token(value_N: Tensor, id_N: Tensor) -> Tensor:
    return id_N.masked_fill(value_N.isnan(), NO_TOKEN)


def sharded(sampler: Sampler, shards: VocabularyShards) -> Sampler:
    """The sampler of one rank's logits; on a single rank the sampler itself."""
    return sampler if shards.axis.size == 1 else ShardedSampler(sampler, shards)
