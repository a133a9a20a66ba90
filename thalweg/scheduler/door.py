"""The door: a front's `Submit` becomes a `Request`, or an error that names the field."""

from __future__ import annotations

import random

from thalweg.core.errors import InvalidRequest
from thalweg.core.messages import Submit
from thalweg.core.plan import SamplingNeeds
from thalweg.core.request import Request
from thalweg.core.sampling import SamplingParams
from thalweg.scheduler.limits import Limits


def enter(message: Submit, limits: Limits, context: int, seeds: random.Random, first: Request | None) -> Request:
    """The request that `message` asks for. context: the longest sequence that model and page pool can hold. first: its
    n > 1 sibling.

    Raises InvalidRequest. The front has checked the same; the engine survives a front that did not.
    """
    params = message.params
    params.check(limits.vocab)
    _check_prompt(message, limits.vocab, context)
    message.grammar.check(params)
    stop_ids = dict.fromkeys(params.stop_token_ids + (() if params.ignore_eos else limits.eos_ids))
    size = len(message.prompt)
    return Request(
        uid=message.uid,
        prompt=message.prompt,
        params=params,
        end=context if params.max_tokens is None else min(size + params.max_tokens, context),
        seed=seeds.getrandbits(63) if params.seed is None else params.seed,
        stop_ids=tuple(stop_ids),
        salt=message.salt,
        priority=message.priority,
        sibling=first,
        needs=needs(params),
        has_grammar=message.grammar.is_set,
        grammar=message.grammar,
        retention=message.retention,
    )


def needs(params: SamplingParams) -> SamplingNeeds:
    """What one sequence asks of sampling. min_tokens counts as a bias: it bans the stop ids for a while."""
    random_draw = not params.is_greedy
    return SamplingNeeds(
        random=random_draw,
        truncated=random_draw and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0),
        penalised=params.has_penalties,
        biased=bool(params.logit_bias) or params.min_tokens > 0,
        logprobs=-1 if params.logprobs is None else params.logprobs,
    )


def _check_prompt(message: Submit, vocab: int, context: int) -> None:
    prompt = message.prompt
    if not prompt:
        raise InvalidRequest("prompt", "is empty; a sequence needs at least one token to go on from")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < vocab:
            raise InvalidRequest("prompt", f"token id {token} is outside the vocabulary of {vocab}")
    room = context if message.params.max_tokens == 0 else context - 1
    if len(prompt) > room:
        raise InvalidRequest(
            "prompt",
            f"has {len(prompt)} tokens; the longest sequence, prompt and output together, is {context}, "
            f"so a prompt may have {room}: shorten it",
        )
