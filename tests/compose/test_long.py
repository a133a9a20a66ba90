"""A prompt of nearly the whole context, in chunks beside another one, with drafts and prefix hits."""

from __future__ import annotations

import random

import msgspec

from tests.compose.matrix import DRAFTING, compare, settings
from tests.compose.workload import ALTERNATIVES, Ask, serve
from thalweg.core.plan import PAGE
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine

CONTEXT = 4096


def test_a_long_context_gives_the_plain_engines_tokens() -> None:
    rng = random.Random(3)
    plain, engine = (
        LocalEngine(
            msgspec.structs.replace(settings(max_running_requests=3, num_pages=200, **fields), context_length=CONTEXT)
        )
        for fields in (
            {"chunked_prefill_size": CONTEXT, "max_steps_in_flight": 1, "radix_cache": False},
            {"chunked_prefill_size": 300, "max_steps_in_flight": 2, "radix_cache": True, **DRAFTING["nextn-3"]},
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=ALTERNATIVES)
    tokens = [rng.randrange(20, plain.vocab - 40) for _ in range(CONTEXT)]
    asks = [
        Ask((*tokens[:kept], *tokens[:own]), params, turn)
        for kept, own, turn in ((3900, 100, 0), (3800, 7, 0), (70, 9, 2))
    ]
    want = [serve(plain, [ask])[0] for ask in asks]
    got = [*serve(engine, asks[:1]), *serve(engine, asks[1:])]
    jumps = [compare(ask, params, a, b, "greedy") for ask, a, b in zip(asks, want, got, strict=True)]
    assert sum(jumps) <= 1 and all(len(answer.tokens) == 32 for answer in got)
    assert engine.loop.stats().cached_tokens >= 3800 // PAGE * PAGE, "the second prompt hits the pages of the first"
