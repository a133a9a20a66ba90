"""Accept by kernels of a GPU: what `sample.Reference` says, without waiting for the device and without a sort of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.slots import INTS, Slots
from thalweg.batch.upload import upload
from thalweg.core.grammar import Masks
from thalweg.core.plan import Needs
from thalweg.kernels.adjust import triton as adjusting
from thalweg.kernels.draw import triton as drawing
from thalweg.kernels.logprobs import triton as logprobing
from thalweg.kernels.truncate import triton as truncating
from thalweg.sampling.sample import BANNED, Logprobs, Sampled

Out = tuple[Tensor, Tensor, Tensor]  # tokens, done, live, as of `Sampled`


class Launched:
    """Of a step that asks for nothing but a draw, `choose_into` is all: what CUDA graphs record. The others precede and follow it."""

    def edit(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, needs: Needs, reach: int, masks: Masks | None
    ) -> None:  # fmt: skip
        if needs.penalised or needs.biased:
            state = slots.floats_SF, slots.tokens_SL, slots.stop_SK, (slots.bias_ids_SB, slots.bias_SB)
            adjusting.adjust(logits_EV, slot_E, ints_EI, *state, needs.penalised, needs.biased, BANNED)
        if masks is not None:
            bits = torch.from_numpy(masks.bits).pin_memory().to(logits_EV.device, non_blocking=True)
            adjusting.forbid(logits_EV, upload(masks.rows, torch.int64, logits_EV.device), bits)

    def choose(self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, needs: Needs) -> Sampled:
        rows, device = len(logits_EV), logits_EV.device
        # an allocation each: kernels are compiled for how their arguments are aligned
        done_E, live_E = (torch.empty(rows, dtype=torch.bool, device=device) for _ in range(2))
        tokens_E = torch.empty(rows, dtype=torch.int64, device=device)
        choose_into((tokens_E, done_E, live_E), logits_EV, slots, slot_E, ints_EI, needs)
        return Sampled(tokens_E, done_E, live_E)

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, top: int) -> Logprobs:
        return (None, None, None) if top < 0 else logprobing.logprobs(logits_NV, tokens_N, top)


def choose_into(out: Out, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, needs: Needs) -> None:
    """Draws into `out` and writes into the slots. Launches depend on the shapes and on `needs` alone."""
    seed = INTS.index("seed")
    if needs.truncated:
        wishes = truncating.Wishes(slot_E, slots.floats_SF, ints_EI, seed, INTS.index("top_k"))
        state = slots.ints_SI, slots.stop_SK, slots.tokens_SL
        truncating.draw(logits_EV, wishes, *state, slots.context, out)
    else:
        fields = slots.ints_SI, slots.floats_SF, slots.stop_SK, slots.tokens_SL
        drawing.draw(logits_EV, slot_E, ints_EI, *fields, slots.context, seed, needs.random, out)
