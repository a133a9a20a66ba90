"""Accept by kernels of a GPU: what `sample.Reference` says, without waiting for the device and without a sort of the
vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.slots import INTS, Slots, upload
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import SamplingNeeds
from thalweg.kernels.logprobs import triton as logprobing
from thalweg.kernels.penalties import triton as penalties
from thalweg.kernels.sample import triton as draft_sampling
from thalweg.kernels.temperature import triton as temperature
from thalweg.kernels.topk_topp import triton as topk_topp
from thalweg.sampling.sample import BANNED, Logprobs, Sampled

Out = tuple[Tensor, Tensor, Tensor]  # tokens, done, live, as of `Sampled`


class KernelDistribution:
    """By kernels: nothing of eight bytes an id, and no sort."""

    def apply_temperature(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, truncated: bool
    ) -> Tensor:
        return temperature.apply_temperature(logits_NV, _wishes(slots, slot_N, ints_NI), truncated)

    def add_gumbel_noise(self, score_NV: Tensor, seed_E: Tensor, position_E: Tensor) -> Tensor:
        return temperature.add_gumbel_noise(score_NV, seed_E, position_E)


class KernelSampler:
    """Of a step that asks for nothing but a draw, `choose_into` is all: what CUDA graphs record. The others precede and
    follow it.
    """

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
        behind_EQD: Tensor | None = None,
    ) -> None:
        if needs.penalised or needs.biased:
            state = slots.floats_SF, slots.tokens_SL, slots.stop_SK, (slots.bias_ids_SB, slots.bias_SB)
            penalties.apply_penalties(
                logits_NV, slot_N, ints_NI, *state, needs.penalised, needs.biased, BANNED, behind_EQD
            )
        if masks is not None:
            bits = torch.from_numpy(masks.bits).pin_memory().to(logits_NV.device, non_blocking=True)
            penalties.apply_grammar_mask(logits_NV, upload(masks.rows, torch.int64, logits_NV.device), bits)

    def draw(self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds) -> Tensor:
        out = _out(len(logits_NV), logits_NV.device)
        sample_into(out, logits_NV, slots, slot_N, ints_NI, needs, torch.empty_like(slots.ints_SI))  # written, not read
        return out[0]

    def sample_into_slots(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, needs: SamplingNeeds
    ) -> Sampled:
        out = _out(len(logits_EV), logits_EV.device)
        sample_into(out, logits_EV, slots, slot_E, ints_EI, needs, slots.ints_SI)
        return sampled(out)

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, top: int) -> Logprobs:
        return (None, None, None) if top < 0 else logprobing.logprobs(logits_NV, tokens_N, top)


def _out(rows: int, device: torch.device) -> Out:
    # an allocation each: kernels are compiled for how their arguments are aligned
    done_E, live_E = (torch.empty(rows, dtype=torch.bool, device=device) for _ in range(2))
    return torch.empty(rows, dtype=torch.int64, device=device), done_E, live_E


def sampled(out: Out) -> Sampled:
    """As `sample_into_slots` has it."""
    tokens_E, done_E, live_E = out
    return Sampled(tokens_E.unsqueeze(1), live_E, done_E)


def sample_into(
    out: Out, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, needs: SamplingNeeds, ints_SI: Tensor
) -> None:
    """Draws into `out`, and writes tokens into the slots and what becomes of these into `ints_SI`. Launches depend on
    the shapes and on `needs` alone.
    """
    if needs.truncated:
        state = ints_SI, slots.stop_SK, slots.tokens_SL
        topk_topp.draw(logits_EV, _wishes(slots, slot_E, ints_EI), *state, slots.context, out)
    else:
        fields = ints_SI, slots.floats_SF, slots.stop_SK, slots.tokens_SL
        draft_sampling.draw(logits_EV, slot_E, ints_EI, *fields, slots.context, INTS.index("seed"), needs.random, out)


def _wishes(slots: Slots, slot_E: Tensor, ints_EI: Tensor) -> topk_topp.SamplingColumns:
    return topk_topp.SamplingColumns(slot_E, slots.floats_SF, ints_EI, INTS.index("seed"), INTS.index("top_k"))
