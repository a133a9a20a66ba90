"""Accept: logits and `Slots` give the next tokens of each emitting row: one, and one more for each draft that is what
would have been drawn anyway (`chain`). With no drafts, accepting IS sampling.

Order: penalties → bias → minimum length → grammar → temperature → top-k → top-p (of what top-k left) → min-p (relative
to the largest) → draw. Letters: E emitting rows, Q positions of each that are sampled, N = E · Q, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Protocol

import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import SamplingNeeds
from thalweg.kernels.temperature.ref import apply_temperature
from thalweg.sampling.distribution import REFERENCE_DISTRIBUTION, SamplingDistribution
from thalweg.sampling.drafts import accept_drafts, sampled_positions, tree_paths
from thalweg.sampling.grammar_mask import apply_grammar_mask
from thalweg.sampling.random import exponential

# below every logit, yet above what a grammar forbids: one that is complete can still end before the minimum length
BANNED = -1e30
NO_TOKEN = -1  # in the place of a token, where the model computed no numbers


def argmax_token(score_NV: Tensor) -> Tensor:
    """int64 [N]: the token with the largest score, the first of equal ones; NO_TOKEN in a row that has a NaN."""
    best_N, token_N = score_NV.max(-1)
    return token_N.masked_fill_(best_N.isnan(), NO_TOKEN)


Logprobs = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next tokens of each emitting row."""

    tokens_EQ: Tensor  # int64; the last of a row may be NO_TOKEN, which ends its slot
    count_E: Tensor  # int64 or bool: how many of them are the row's; none where the slot had ended before
    done_E: Tensor  # bool: the slot ended with them
    # the model's own log-probabilities of tokens_EQ, and the most likely ids with theirs; None unless asked for
    logprob_N: Tensor | None = None
    top_ids_NK: Tensor | None = None
    top_logprobs_NK: Tensor | None = None
    # int64: the node of the tree at which each was drawn, the root behind the last; None for a chain
    nodes_EQ: Tensor | None = None


class Moved(Sampled):
    """Along trees, where the KV of these nodes is in the places of a chain's already."""

    __slots__ = ()


class Sampler(Protocol):
    """The three steps of `accept`, on one kind of device."""

    @property
    def distribution(self) -> SamplingDistribution: ...

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
        """Penalties, bias, minimum length and grammar, in place. behind_EQD int64, of positions that are nodes of
        trees: which drafts are on the path to each behind the known tokens, -1 where there are no more; None where what
        is before a position stands in the tokens plane.
        """

    def draw(self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds) -> Tensor:
        """int64 [N]: a token for each, NO_TOKEN for logits with a NaN; what stands in the slots is left, but for the
        tokens plane behind what is known.
        """

    def sample_into_slots(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, needs: SamplingNeeds
    ) -> Sampled:
        """Draws a token of each row and writes it into the slots."""

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, top: int) -> Logprobs:
        """Log-probabilities of `tokens_N` and the `top` most likely ids with theirs; (None, None, None) for top < 0."""


class ReferenceSampler:
    """Plain torch, on any device."""

    distribution = REFERENCE_DISTRIBUTION

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
        if needs.penalised:
            query = 1 if behind_EQD is None else behind_EQD.shape[1]
            longest = min(max_kv_len, slots.context)
            penalise(logits_NV, slots, slot_N[::query], ints_NI[::query], longest, behind_EQD)
        if needs.biased:
            logits_NV.scatter_add_(1, slots.bias_ids_SB[slot_N], slots.bias_SB[slot_N])
            stop_NK = slots.stop_SK[slot_N]
            early_NK = (ints_NI[:, 0] < ints_NI[:, 5])[:, None] & (stop_NK >= 0)
            logits_NV.scatter_add_(1, stop_NK.clamp(min=0), torch.where(early_NK, BANNED, 0.0))
        if masks is not None:
            apply_grammar_mask(logits_NV, masks)

    def draw(self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds) -> Tensor:
        if not needs.random:
            return argmax_token(logits_NV)
        # the arg min of Exp(1) / p needs neither normalisation nor a cumulative sum, and its noise is per token id, so
        # that the token does not depend on the order of equal probabilities
        floats_NF = slots.floats_SF[slot_N]
        scaled_NV = apply_temperature(logits_NV, floats_NF, ints_NI[:, 6], needs.truncated)
        noisy_NV = scaled_NV - exponential(ints_NI[:, 3], ints_NI[:, 0], logits_NV.shape[1]).log_()
        return torch.where(floats_NF[:, 0] == 0, argmax_token(logits_NV), argmax_token(noisy_NV))

    def sample_into_slots(
        self, logits_EV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, needs: SamplingNeeds
    ) -> Sampled:
        tokens_E = self.draw(logits_EV, slots, slot_E, ints_EI, needs)
        return _append_tokens(tokens_E, slots, slot_E, ints_EI)

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, top: int) -> Logprobs:
        if top < 0:
            return None, None, None
        logprob_NV = logits_NV.log_softmax(-1)
        top_NK = logprob_NV.topk(min(top, logits_NV.shape[1]), dim=-1)
        return logprob_NV.gather(1, tokens_N[:, None])[:, 0], top_NK.indices, top_NK.values


REFERENCE = ReferenceSampler()


class SamplerWrapper:
    """A sampler of which a rule of acceptance changes `draw` alone."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.distribution, self.logprobs = sampler, sampler.distribution, sampler.logprobs
        self.edit_logits, self.sample_into_slots = sampler.edit_logits, sampler.sample_into_slots


def accept(
    logits_NV: Tensor,
    slots: Slots,
    slot_E: Tensor,
    ints_EI: Tensor,
    needs: SamplingNeeds,
    max_kv_len: int,
    masks: GrammarMasks | None = None,
    sampler: Sampler = REFERENCE,
    captured: Callable[[SamplingNeeds], Sampled | None] | None = None,
) -> Sampled:
    """Draws the next tokens of each row, writes them into `slots`, and ends those that reached a stop id or their end.

    logits_NV float32 is the model's and may be overwritten: of each row equally many positions, the last known token's
    and those of the drafts behind it. ints_EI: the slots' integers as the step found them. max_kv_len: upper bound of
    every row's length, drafts included. captured: draws from these very logits by a graph; None for needs without one.
    """
    query = len(logits_NV) // len(slot_E)
    own_NV, positions = logits_NV, None
    if needs.penalised or needs.biased or masks is not None:
        if needs.logprobs >= 0:
            own_NV = logits_NV.clone()
        positions = sampled_positions(slots, slot_E, ints_EI, query)
        has_paths = needs.penalised and slots.tree.is_tree_step(query)
        behind_EQD = tree_paths(slots, positions, query) if has_paths else None
        slot_N, ints_NI, _ = positions
        sampler.edit_logits(logits_NV, slots, slot_N, ints_NI, needs, max_kv_len, masks, behind_EQD)
    sampled = None if captured is None else captured(SamplingNeeds(needs.random, needs.truncated))
    if sampled is None and query == 1:
        sampled = sampler.sample_into_slots(logits_NV, slots, slot_E, ints_EI, needs)
    if sampled is None:
        positions = positions or sampled_positions(slots, slot_E, ints_EI, query)
        drawn_N = sampler.draw(logits_NV, slots, positions.slot_N, positions.ints_NI, needs)
        path = accept_drafts(drawn_N.view(-1, query), positions, slots, slot_E, ints_EI)
        sampled = Sampled(path.tokens_RD, path.count_R, path.done_R, nodes_EQ=path.nodes_RD)
    if needs.logprobs < 0:
        return sampled
    if sampled.nodes_EQ is not None:
        first_E1 = torch.arange(len(slot_E), device=slot_E.device).unsqueeze(1) * query
        own_NV = own_NV.index_select(0, (first_E1 + sampled.nodes_EQ).flatten())
    logprob_N, ids_NK, values_NK = sampler.logprobs(own_NV, sampled.tokens_EQ.flatten().clamp(min=0), needs.logprobs)
    return replace(sampled, logprob_N=logprob_N, top_ids_NK=ids_NK, top_logprobs_NK=values_NK)


def _append_tokens(tokens_E: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor) -> Sampled:
    """Appends the tokens to their slots, token 0 for NO_TOKEN, and ends slots at a stop id or their end."""
    length_E, end_E, stop_EK = ints_EI[:, 0], ints_EI[:, 2], slots.stop_SK.index_select(0, slot_E)
    live_E = end_E > 0
    new_E = length_E + live_E
    going_E = (new_E < end_E) & (tokens_E.unsqueeze(1) != stop_EK).all(1) & (tokens_E >= 0)
    place_E = slot_E * slots.tokens_SL.size(1) + torch.where(live_E, length_E, slots.context)
    slots.tokens_SL.view(-1).index_copy_(0, place_E, tokens_E.clamp(min=0).to(torch.int32))
    slots.state_S3.index_copy_(0, slot_E, torch.stack((new_E, new_E - 1, end_E * going_E), 1))
    return Sampled(tokens_E.unsqueeze(1), live_E, ~going_E)


def penalise(
    logits_NV: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, max_kv_len: int, behind_EQD: Tensor | None = None
) -> None:
    """Repetition penalty over prompt and output (divides positive, multiplies negative logits), frequency and presence
    over the output.

    Counts are taken from the tokens plane each step, so there is nothing to roll back. What is before all nodes of a
    tree is counted once. behind_EQD: see `Sampler.edit_logits`; without it a row is one position, N = E.
    """
    vocab = logits_NV.shape[1]
    tokens_EL = slots.tokens_SL[slot_E, :max_kv_len].to(torch.int64)
    at_L = torch.arange(max_kv_len, device=tokens_EL.device)
    known_EL = at_L < ints_EI[:, :1]
    output_EL = known_EL & (at_L >= ints_EI[:, 4:5])
    nothing_EV = logits_NV.new_zeros(len(slot_E), vocab)
    seen_NV = nothing_EV.scatter_add(1, tokens_EL, known_EL.to(nothing_EV.dtype))
    count_NV = nothing_EV.scatter_add_(1, tokens_EL, output_EL.to(nothing_EV.dtype))
    floats_NF = slots.floats_SF[slot_E]
    if behind_EQD is not None:
        seen_NV, count_NV, floats_NF = (
            x.repeat_interleave(behind_EQD.shape[1], 0) for x in (seen_NV, count_NV, floats_NF)
        )
        behind_ND = behind_EQD.flatten(0, 1)
        ids_ND, more_ND = behind_ND.clamp(min=0), (behind_ND >= 0).to(count_NV.dtype)
        seen_NV.scatter_add_(1, ids_ND, more_ND)
        count_NV.scatter_add_(1, ids_ND, more_ND)
    repetition, frequency, presence = floats_NF[:, 3:4], floats_NF[:, 4:5], floats_NF[:, 5:6]
    scaled_NV = torch.where(logits_NV > 0, logits_NV / repetition, logits_NV * repetition)
    logits_NV.copy_(torch.where(seen_NV > 0, scaled_NV, logits_NV))
    logits_NV -= count_NV * frequency + (count_NV > 0) * presence
