"""LOSSY. Relaxed acceptance, as TensorRT-LLM has it for thoughts: a draft among the target's most likely tokens is
accepted if its probability is close to the largest one, whatever token the target samples. The output follows neither
the model's distribution nor its greedy tokens. Measure the effect on answers before turning it on.

Probabilities are those after penalties, bias and grammar, before temperature and truncation, so that greedy requests
and sampled ones follow the same rule. What the grammar or a minimum length forbids is never accepted.

Letters: N positions, V vocabulary, C candidates, K drafts, I integers of a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.core.plan import SamplingNeeds
from thalweg.sampling.sample import Sampler, SamplerWrapper
from thalweg.sampling.simulated_acceptance import ahead


class RelaxedAcceptance(SamplerWrapper):
    """Accepts a draft among the `candidates` most likely tokens if its probability is at least the largest one less
    `delta`; of several the most likely one. Also accepts what `sampler` accepts.
    """

    def __init__(self, sampler: Sampler, candidates: int, delta: float) -> None:
        super().__init__(sampler)
        self.candidates, self.delta = candidates, delta

    def sample_tokens(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds
    ) -> Tensor:
        _, token_NK, any_NK = ahead(slots, slot_N, ints_NI)  # before sampling, which may overwrite them
        position_N, *_, num_drafts_N = ints_NI.unbind(1)
        is_draft_N1 = (position_N - slots.length[slot_N] < num_drafts_N).unsqueeze(1)
        all_N1, most = logits_NV.logsumexp(-1, keepdim=True), min(self.candidates, logits_NV.shape[1])
        best_NC = (logits_NV.topk(most, -1).values - all_N1).exp()
        p_NK = (logits_NV.gather(1, token_NK) - all_N1).exp()
        near_NK = any_NK & is_draft_N1 & (p_NK > 0) & (p_NK >= best_NC[:, -1:]) & (p_NK >= best_NC[:, :1] - self.delta)
        draft_N = token_NK.gather(1, p_NK.masked_fill(~near_NK, -1.0).argmax(1, keepdim=True)).squeeze(1)
        target_ids_N = self.sampler.sample_tokens(logits_NV, slots, slot_N, ints_NI, needs)
        return torch.where(near_NK.any(1), draft_N, target_ids_N)
