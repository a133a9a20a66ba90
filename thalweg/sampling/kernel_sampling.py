"""Sampling by kernels of a GPU: what `sample.ReferenceSampler` computes, without waiting for the device and without a
sort of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.slots import Slots, upload
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import SamplingNeeds
from thalweg.kernels.logprobs import triton as logprobs
from thalweg.kernels.penalties import triton as penalties
from thalweg.kernels.sample import triton as sample
from thalweg.kernels.sample.triton import SampledRows, SampledTokens
from thalweg.kernels.temperature import triton as temperature
from thalweg.kernels.topk_topp import triton as topk_topp
from thalweg.sampling.sample import BANNED, Logprobs, Sampled, with_listed


class KernelDistribution:
    def apply_temperature(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, truncated: bool
    ) -> Tensor:
        return temperature.apply_temperature(_rows(logits_NV, slots, slot_N, ints_NI), truncated)

    def add_gumbel_noise(self, score_NV: Tensor, seed_E: Tensor, position_E: Tensor) -> Tensor:
        return temperature.add_gumbel_noise(score_NV, seed_E, position_E)


class KernelSampler:
    """See `sample.Sampler`."""

    distribution = KernelDistribution()

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
        if needs.penalised or needs.biased:
            rows, biases = _rows(logits_NV, slots, slot_N, ints_NI), (slots.bias_ids_SB, slots.bias_SB)
            kinds = needs.penalised, needs.biased
            penalties.apply_penalties(rows, slots.tensors(False), biases, *kinds, BANNED, path_tokens_EQD)
        if masks is not None:
            bits = torch.from_numpy(masks.bits).pin_memory().to(logits_NV.device, non_blocking=True)
            penalties.apply_grammar_mask(logits_NV, upload(masks.rows, torch.int64, logits_NV.device), bits)

    def sample_tokens(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds
    ) -> Tensor:
        out = _out(len(logits_NV), logits_NV.device)
        sample_into(out, logits_NV, slots, slot_N, ints_NI, needs, torch.empty_like(slots.ints_SI))  # written, not read
        return out[0]

    def sample_into_slots(
        self,
        logits_EV: Tensor,
        slots: Slots,
        slot_E: Tensor,
        ints_EI: Tensor,
        needs: SamplingNeeds,
        out: Sampled | None = None,
    ) -> Sampled:
        if out is None:
            tokens_E, done_E, live_E = _out(len(logits_EV), logits_EV.device)
            out = Sampled(tokens_E.unsqueeze(1), live_E, done_E)
        held = out.tokens_EQ.view(-1), out.done_E, out.count_E
        sample_into(held, logits_EV, slots, slot_E, ints_EI, needs, slots.ints_SI)
        return out

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, top: int, listed_NL: Tensor | None = None) -> Logprobs:
        if top < 0:
            return None, None, None
        return with_listed(logits_NV, tokens_N, listed_NL, *logprobs.logprobs(logits_NV, tokens_N, top))


def _out(rows: int, device: torch.device) -> SampledTokens:
    # an allocation each: kernels are compiled for how their arguments are aligned
    done_E, live_E = (torch.empty(rows, dtype=torch.bool, device=device) for _ in range(2))
    return torch.empty(rows, dtype=torch.int64, device=device), done_E, live_E


def sample_into(
    out: SampledTokens,
    logits_EV: Tensor,
    slots: Slots,
    slot_E: Tensor,
    ints_EI: Tensor,
    needs: SamplingNeeds,
    ints_SI: Tensor,
) -> None:
    """Draws into `out`. Writes the tokens into the slots, and the slots' new integers into `ints_SI`. Launches depend
    on the shapes and on `needs` alone.
    """
    rows, held = _rows(logits_EV, slots, slot_E, ints_EI), slots.tensors(False)._replace(ints_SI=ints_SI)
    if needs.truncated:
        topk_topp.sample_tokens(rows, held, out)
    else:
        sample.sample_tokens(rows, held, needs.random, out)


def _rows(logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor) -> SampledRows:
    return SampledRows(logits_NV, logits_NV.stride(0), logits_NV.shape[1], slot_N, ints_NI, slots.floats_SF)
