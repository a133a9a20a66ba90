"""Rejection sampling, the standard rule of speculative sampling: a draft d that was sampled from q is accepted with the
probability min(1, p(d) / q(d)). The token that replaces a rejected draft is sampled from norm(max(p - q, 0))
(Leviathan, Kalman, Matias 2023, algorithm 1; Chen et al. 2023).

Drafts are accepted as often as any rule can that changes no distribution, 1 - D at D total variation distance between p
and q; Gumbel-max (`sampling.drafts`) accepts (1 - D) / (1 + D) at least. The price: q is kept for every draft, and
which tokens a seed gives depends on what was drafted; how they are distributed does not. Greedy rows have plain
decoding's tokens.

p is the target's distribution after penalties, bias, grammar, temperature and truncation. A position has
independent noise for the draft, for its acceptance and for the token in its place.

Letters: N positions, V vocabulary, K drafts, I integers of a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.core.plan import SamplingNeeds
from thalweg.sampling.distribution import SamplingDistribution
from thalweg.sampling.draft_sampling import PROBABILITIES
from thalweg.sampling.random import seed_for, uniform
from thalweg.sampling.sample import SamplerWrapper, argmax_token

ACCEPTANCE = 2  # seeds the noise of acceptance
CHUNK = 1 << 23  # logits that are verified at once; bounds the temporary memory
ALIKE = 16  # positions of a chunk are a multiple: kernels are compiled for how their arguments are aligned


class RejectionSampling(SamplerWrapper):
    """Verifies drafts that `draft_sampling.IndependentDraftSampling` has sampled."""

    def sample_tokens(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds
    ) -> Tensor:
        if not needs.random:
            return self.sampler.sample_tokens(logits_NV, slots, slot_N, ints_NI, needs)
        most = max(CHUNK // logits_NV.shape[1] // ALIKE, 1) * ALIKE
        parts = [slice(first, first + most) for first in range(0, len(logits_NV), most)]
        return torch.cat(
            [
                _verify_drafts(self.distribution, logits_NV[n], slots, slot_N[n], ints_NI[n], needs.truncated)
                for n in parts
            ]
        )


def _verify_drafts(
    distribution: SamplingDistribution,
    logits_NV: Tensor,
    slots: Slots,
    slot_N: Tensor,
    ints_NI: Tensor,
    truncated: bool,
) -> Tensor:
    """Returns the draft if it is accepted, else a token from the residual. After the last draft, and for greedy rows,
    returns plain decoding's token.
    """
    position_N, _, _, seed_N, *_, num_drafts_N = ints_NI.unbind(1)
    sampled_N = slots.temperature.index_select(0, slot_N) > 0
    kept_SKV = slots.extra[PROBABILITIES]
    width, vocab = kept_SKV.shape[1:]
    ahead_N = position_N - slots.length[slot_N]
    is_draft_N = (ahead_N < num_drafts_N) & sampled_N
    draft_N = slots.tokens_SL[slot_N, position_N].to(torch.int64)
    p_NV = distribution.apply_temperature(logits_NV, slots, slot_N, ints_NI, truncated).softmax(-1)
    q_NV = kept_SKV.view(-1, vocab)[slot_N * width + ahead_N.clamp(max=width - 1)]
    p_N, q_N = (x_NV.gather(1, draft_N.unsqueeze(1)).squeeze(1) for x_NV in (p_NV, q_NV))
    # a q of NaN, of a drafter that is about to be switched off, rejects all and leaves p unchanged
    is_accepted_N = is_draft_N & (uniform(seed_for(seed_N, ACCEPTANCE), position_N) * q_N < p_N)
    residual_NV = (p_NV - q_NV.nan_to_num_(0.0) * is_draft_N.unsqueeze(1)).clamp_(min=0.0)
    # rounding may reject a draft although p equals q; the residual is empty then
    residual_NV = torch.where(residual_NV.sum(1, keepdim=True) > 0, residual_NV, p_NV)
    perturbed_NV = distribution.add_gumbel_noise(residual_NV.log_(), seed_N, position_N)
    target_ids_N = torch.where(sampled_N, argmax_token(perturbed_NV), argmax_token(logits_NV))
    return torch.where(is_accepted_N, draft_N, target_ids_N)
