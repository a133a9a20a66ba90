"""LOSSY. Relaxed acceptance, as TensorRT-LLM has it for thoughts: a draft among the target's most likely tokens is
accepted where the target finds it nearly as likely as the most likely one, whatever the target would have drawn itself.
What comes out is not the model's distribution any more, nor its greedy tokens: only who measures what that does to
answers should turn it on.

Probabilities are those after penalties, bias and grammar, before temperature and truncation, so that greedy requests
and sampled ones are judged alike. What the grammar or a minimum length forbids is never accepted.

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
    """`Sampler` that accepts a draft of the `candidates` most likely tokens whose probability is at least the largest
    one less `delta`, of several the most likely one, and beside those what `sampler` accepts.
    """

    def __init__(self, sampler: Sampler, candidates: int, delta: float) -> None:
        super().__init__(sampler)
        self.candidates, self.delta = candidates, delta

    def draw(self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds) -> Tensor:
        _, token_NK, any_NK = ahead(slots, slot_N, ints_NI)  # before the draw, which may write there
        made_N1 = (ints_NI[:, 0] - slots.length[slot_N] < ints_NI[:, 7]).unsqueeze(1)
        all_N1, most = logits_NV.logsumexp(-1, keepdim=True), min(self.candidates, logits_NV.shape[1])
        best_NC = (logits_NV.topk(most, -1).values - all_N1).exp()
        p_NK = (logits_NV.gather(1, token_NK) - all_N1).exp()
        near_NK = any_NK & made_N1 & (p_NK > 0) & (p_NK >= best_NC[:, -1:]) & (p_NK >= best_NC[:, :1] - self.delta)
        draft_N = token_NK.gather(1, p_NK.masked_fill(~near_NK, -1.0).argmax(1, keepdim=True)).squeeze(1)
        drawn_N = self.sampler.draw(logits_NV, slots, slot_N, ints_NI, needs)
        return torch.where(near_NK.any(1), draft_N, drawn_N)
