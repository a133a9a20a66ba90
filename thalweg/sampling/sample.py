"""`accept` samples the next tokens of each row: one token, and one more for each draft that equals the sampled token.
Without drafts, `accept` samples one token.

Order: penalties → bias → minimum length → grammar → temperature → top-k → top-p (of what top-k left) → min-p (relative
to the largest) → sample. Letters: E sampled rows, Q positions of each that are sampled, N = E · Q, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Protocol

import torch
from torch import Tensor

from thalweg.batch.slots import Slots
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import SamplingNeeds
from thalweg.kernels.build_inputs.ref import LENGTH, MIN_LEN, PROMPT_LEN, SEED, TEMPERATURE, TOP_K
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
    """The next tokens of each sampled row."""

    tokens_EQ: Tensor  # int64; the last of a row may be NO_TOKEN, which ends its slot
    count_E: Tensor  # int64 or bool: number of tokens of the row; 0 if the slot had ended before
    done_E: Tensor  # bool: the slot has ended
    # the model's own log-probabilities of tokens_EQ, and ids with theirs: listed ones, then the most likely; None
    # unless asked for
    logprob_N: Tensor | None = None
    top_ids_NK: Tensor | None = None
    top_logprobs_NK: Tensor | None = None
    # int64: the tree node at which each was sampled, the root after the last; None for a chain
    nodes_EQ: Tensor | None = None
    kv_is_compacted: bool = False  # the KV of these nodes has been moved to the positions of a chain


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
        path_tokens_EQD: Tensor | None = None,
    ) -> None:
        """Applies penalties, bias, minimum length and grammar in place. path_tokens_EQD int64: for tree nodes, the
        drafts on the path to each node, -1 after the last; None if all tokens before a position are in the tokens
        plane.
        """

    def sample_tokens(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds
    ) -> Tensor:
        """int64 [N]: the sampled tokens, NO_TOKEN for logits with a NaN. Slots do not change, except for the tokens
        plane after the known tokens.
        """

    def sample_into_slots(
        self,
        logits_EV: Tensor,
        slots: Slots,
        slot_E: Tensor,
        ints_EI: Tensor,
        needs: SamplingNeeds,
        out: Sampled | None = None,
    ) -> Sampled:
        """Samples a token of each row and writes it into the slots. out: memory for the result, which a CUDA graph
        always leaves in the same place; what is launched depends on the shapes and on `needs` alone.
        """

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, top: int, listed_NL: Tensor | None = None) -> Logprobs:
        """Log-probabilities of `tokens_N`, and ids with theirs: those of `listed_NL`, if given, in which -1 is none,
        then the `top` most likely. (None, None, None) for top < 0.
        """


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
        path_tokens_EQD: Tensor | None = None,
    ) -> None:
        if needs.penalised:
            query = 1 if path_tokens_EQD is None else path_tokens_EQD.shape[1]
            longest = min(max_kv_len, slots.context)
            penalise(logits_NV, slots, slot_N[::query], ints_NI[::query], longest, path_tokens_EQD)
        if needs.biased:
            logits_NV.scatter_add_(1, slots.bias_ids_SB[slot_N], slots.bias_SB[slot_N])
            stop_NK = slots.stop_SK[slot_N]
            early_NK = (ints_NI[:, LENGTH] < ints_NI[:, MIN_LEN])[:, None] & (stop_NK >= 0)
            logits_NV.scatter_add_(1, stop_NK.clamp(min=0), torch.where(early_NK, BANNED, 0.0))
        if masks is not None:
            apply_grammar_mask(logits_NV, masks)

    def sample_tokens(
        self, logits_NV: Tensor, slots: Slots, slot_N: Tensor, ints_NI: Tensor, needs: SamplingNeeds
    ) -> Tensor:
        if not needs.random:
            return argmax_token(logits_NV)
        # the arg min of Exp(1) / p needs neither normalisation nor a cumulative sum, and its noise is per token id, so
        # that the token does not depend on the order of equal probabilities
        floats_NF = slots.floats_SF[slot_N]
        scaled_NV = apply_temperature(logits_NV, floats_NF, ints_NI[:, TOP_K], needs.truncated)
        noisy_NV = scaled_NV - exponential(ints_NI[:, SEED], ints_NI[:, LENGTH], logits_NV.shape[1]).log_()
        return torch.where(floats_NF[:, TEMPERATURE] == 0, argmax_token(logits_NV), argmax_token(noisy_NV))

    def sample_into_slots(
        self,
        logits_EV: Tensor,
        slots: Slots,
        slot_E: Tensor,
        ints_EI: Tensor,
        needs: SamplingNeeds,
        out: Sampled | None = None,
    ) -> Sampled:
        tokens_E = self.sample_tokens(logits_EV, slots, slot_E, ints_EI, needs)
        return append_tokens(tokens_E, slots, slot_E, ints_EI, out)

    def logprobs(self, logits_NV: Tensor, tokens_N: Tensor, top: int, listed_NL: Tensor | None = None) -> Logprobs:
        if top < 0:
            return None, None, None
        logprob_NV = logits_NV.log_softmax(-1)
        top_NK = logprob_NV.topk(min(top, logits_NV.shape[1]), dim=-1)
        own_N = logprob_NV.gather(1, tokens_N[:, None])[:, 0]
        return with_listed(logits_NV, tokens_N, listed_NL, own_N, top_NK.indices, top_NK.values)


def with_listed(
    logits_NV: Tensor, tokens_N: Tensor, listed_NL: Tensor | None, own_N: Tensor, ids_NK: Tensor, values_NK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of tokens and of the most likely ids, with those of listed ids before the latter."""
    if listed_NL is None:
        return own_N, ids_NK, values_NK
    logit_N1 = logits_NV.gather(1, tokens_N[:, None])
    values_NL = logits_NV.gather(1, listed_NL.clamp(min=0)) - logit_N1 + own_N[:, None]
    return own_N, torch.cat([listed_NL, ids_NK], 1), torch.cat([values_NL, values_NK], 1)


REFERENCE = ReferenceSampler()


class SamplerWrapper:
    """Base of the acceptance rules: a sampler of which only `sample_tokens` changes."""

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
    """Samples the next tokens of each row, writes them into `slots`, and ends slots that reach a stop id or their end.

    The tokens come from the first of these that applies:
      - `captured`, a CUDA graph that samples these logits; it returns None for needs that it was not captured for;
      - `sampler.sample_into_slots`, if no row has drafts;
      - `sampler.sample_tokens` at every position, then `accept_drafts`.

    logits_NV float32: the model's logits at the last known token and the drafts of each row; may be overwritten.
    ints_EI: the slots' integers before the step. max_kv_len: upper bound of the rows' lengths, drafts included.
    """
    query = len(logits_NV) // len(slot_E)
    own_NV, positions = logits_NV, None
    if needs.penalised or needs.biased or masks is not None:
        if needs.logprobs >= 0:
            own_NV = logits_NV.clone()
        positions = sampled_positions(slots, slot_E, ints_EI, query)
        has_paths = needs.penalised and slots.tree.is_tree_step(query)
        path_tokens_EQD = tree_paths(slots, positions, query) if has_paths else None
        slot_N, ints_NI, _ = positions
        sampler.edit_logits(logits_NV, slots, slot_N, ints_NI, needs, max_kv_len, masks, path_tokens_EQD)
    sampled = None if captured is None else captured(SamplingNeeds(needs.random, needs.truncated))
    if sampled is None and query == 1:
        sampled = sampler.sample_into_slots(logits_NV, slots, slot_E, ints_EI, needs)
    if sampled is None:
        positions = positions or sampled_positions(slots, slot_E, ints_EI, query)
        target_ids_N = sampler.sample_tokens(logits_NV, slots, positions.slot_N, positions.ints_NI, needs)
        path = accept_drafts(target_ids_N.view(-1, query), positions, slots, slot_E, ints_EI)
        sampled = Sampled(path.tokens_RD, path.count_R, path.done_R, nodes_EQ=path.nodes_RD)
    if needs.logprobs < 0:
        return sampled
    if sampled.nodes_EQ is not None:
        first_E1 = torch.arange(len(slot_E), device=slot_E.device).unsqueeze(1) * query
        own_NV = own_NV.index_select(0, (first_E1 + sampled.nodes_EQ).flatten())
    listed_NL = None
    if needs.num_logprob_ids:
        listed_NL = slots.logprob_ids_SL[slot_E, : needs.num_logprob_ids].repeat_interleave(
            len(own_NV) // len(slot_E), 0
        )
    tokens_N = sampled.tokens_EQ.flatten().clamp(min=0)
    logprob_N, ids_NK, values_NK = sampler.logprobs(own_NV, tokens_N, needs.logprobs, listed_NL)
    return replace(sampled, logprob_N=logprob_N, top_ids_NK=ids_NK, top_logprobs_NK=values_NK)


def append_tokens(
    tokens_E: Tensor, slots: Slots, slot_E: Tensor, ints_EI: Tensor, out: Sampled | None = None
) -> Sampled:
    """Appends the tokens to their slots, token 0 for NO_TOKEN, and ends slots at a stop id or their end. out: memory
    for the result.
    """
    (length_E, _, end_E, *_), stop_EK = ints_EI.unbind(1), slots.stop_SK.index_select(0, slot_E)
    live_E = end_E > 0
    new_E = length_E + live_E
    going_E = (new_E < end_E) & (tokens_E.unsqueeze(1) != stop_EK).all(1) & (tokens_E >= 0)
    place_E = slot_E * slots.tokens_SL.size(1) + torch.where(live_E, length_E, slots.context)
    slots.tokens_SL.view(-1).index_copy_(0, place_E, tokens_E.clamp(min=0).to(torch.int32))
    slots.state_S3.index_copy_(0, slot_E, torch.stack((new_E, new_E - 1, end_E * going_E), 1))
    if out is None:
        return Sampled(tokens_E.unsqueeze(1), live_E, ~going_E)
    out.tokens_EQ.copy_(tokens_E.unsqueeze(1))
    out.count_E.copy_(live_E)
    out.done_E.copy_(~going_E)
    return out


def penalise(
    logits_NV: Tensor,
    slots: Slots,
    slot_E: Tensor,
    ints_EI: Tensor,
    max_kv_len: int,
    path_tokens_EQD: Tensor | None = None,
) -> None:
    """Repetition penalty over prompt and output (divides positive, multiplies negative logits), frequency and presence
    over the output.

    Tokens are counted from the tokens plane in each step, so nothing is rolled back. Tokens before a tree are counted
    once. path_tokens_EQD: see `Sampler.edit_logits`; without it a row is one position, N = E.
    """
    vocab = logits_NV.shape[1]
    tokens_EL = slots.tokens_SL[slot_E, :max_kv_len].to(torch.int64)
    at_L = torch.arange(max_kv_len, device=tokens_EL.device)
    known_EL = at_L < ints_EI[:, LENGTH, None]
    output_EL = known_EL & (at_L >= ints_EI[:, PROMPT_LEN, None])
    nothing_EV = logits_NV.new_zeros(len(slot_E), vocab)
    token_seen_NV = nothing_EV.scatter_add(1, tokens_EL, known_EL.to(nothing_EV.dtype))
    count_NV = nothing_EV.scatter_add_(1, tokens_EL, output_EL.to(nothing_EV.dtype))
    floats_NF = slots.floats_SF[slot_E]
    if path_tokens_EQD is not None:
        token_seen_NV, count_NV, floats_NF = (
            x.repeat_interleave(path_tokens_EQD.shape[1], 0) for x in (token_seen_NV, count_NV, floats_NF)
        )
        path_tokens_ND = path_tokens_EQD.flatten(0, 1)
        ids_ND, more_ND = path_tokens_ND.clamp(min=0), (path_tokens_ND >= 0).to(count_NV.dtype)
        token_seen_NV.scatter_add_(1, ids_ND, more_ND)
        count_NV.scatter_add_(1, ids_ND, more_ND)
    *_, repetition, frequency, presence = floats_NF.unsqueeze(2).unbind(1)
    scaled_NV = torch.where(logits_NV > 0, logits_NV / repetition, logits_NV * repetition)
    logits_NV.copy_(torch.where(token_seen_NV > 0, scaled_NV, logits_NV))
    logits_NV -= count_NV * frequency + (count_NV > 0) * presence
