"""Admission of requests: the scheduler's limits, the checks that turn a `Submit` into a `Request`, and the queue."""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from thalweg.core.messages import Submit
from thalweg.core.plan import SamplingNeeds
from thalweg.core.request import Request, check_request
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import CHAIN, TreeShape


@dataclass(frozen=True, slots=True)
class Limits:
    """Constants of a scheduler."""

    slots: int  # requests that run at once
    budget: int  # tokens of a step
    context: int  # longest sequence of the model, in tokens
    vocab: int  # number of token ids
    eos_ids: tuple[int, ...] = ()  # end a sequence unless it ignores EOS
    stages: int = 1  # pipeline stages
    policy: str = "fcfs"  # order of the queue, a key of POLICIES
    seed: int = 0  # of the random seeds for requests without one
    tree: TreeShape = CHAIN  # shape of the drafts


def make_request(
    message: Submit, limits: Limits, context: int, seeds: random.Random, sibling: Request | None
) -> Request:
    """The request for `message`. context: longest sequence that model and page pool can hold.

    Raises InvalidRequest. The client has checked the same; the engine survives one that has not.
    """
    params = message.params
    check_request(message.prompt, params, context, limits.vocab, message.grammar)
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
        sibling=sibling,
        needs=sampling_needs(params),
        has_grammar=message.grammar.masks,
        grammar=message.grammar,
        retention=message.retention,
    )


def sampling_needs(params: SamplingParams) -> SamplingNeeds:
    """Sampling features that one sequence uses. min_tokens is a bias: it bans the stop ids for a while."""
    is_random = not params.is_greedy
    return SamplingNeeds(
        random=is_random,
        truncated=is_random and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0),
        penalised=params.has_penalties,
        biased=bool(params.logit_bias) or params.min_tokens > 0,
        logprobs=-1 if params.logprobs is None else 0 if params.logprob_token_ids else params.logprobs,
        num_logprob_ids=0 if params.logprobs is None else len(params.logprob_token_ids),
    )


HitPages = Callable[[Request], int]  # pages of a request's prefix that are cached now

# Sort keys of the queue; ties and preempted requests go in order of arrival.
POLICIES: dict[str, Callable[[Request, HitPages], int]] = {
    "fcfs": lambda request, hit_pages: 0,
    "lpm": lambda request, hit_pages: -hit_pages(request),  # longest prefix match: use cached pages before eviction
    "priority": lambda request, hit_pages: -request.priority,
}
DYNAMIC_POLICIES = frozenset({"lpm"})  # their keys change while requests wait


class WaitingQueue:
    """Queued requests in the order of a policy."""

    def __init__(self, policy: str, hit_pages: HitPages) -> None:
        key = POLICIES[policy]
        self._key = lambda request: (key(request, hit_pages), request.uid)
        self._is_dynamic = policy in DYNAMIC_POLICIES
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        if self._is_dynamic:
            self._requests.append(request)
        else:
            insort(self._requests, request, key=self._key)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def last(self, running: Iterable[Request]) -> Request:
        """The running request to preempt first. Keys that change say nothing of running requests: the youngest."""
        return max(running, key=lambda r: r.uid) if self._is_dynamic else max(running, key=self._key)

    def unordered(self) -> Iterator[Request]:
        """The requests, in order unless that changes while they wait."""
        return iter(self._requests)

    def ordered(self) -> list[Request]:
        """The requests in the order in which they should be admitted now."""
        return sorted(self._requests, key=self._key) if self._is_dynamic else list(self._requests)
