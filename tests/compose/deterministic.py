"""Deterministic inference: log-probabilities are bit for bit equal for any batch, chunking, cache state and overlap."""

from __future__ import annotations

from typing import Any

from tests.compose.workload import Answer, serve, workload
from thalweg.core.tree import TreeShape
from thalweg.engine.local import LocalEngine

SEED = 11
KINDS = ("seeded", "penalised")
PLAIN: dict[str, Any] = {
    "chunked_prefill_size": 4096,
    "max_steps_in_flight": 1,
    "radix_cache": False,
    "num_pages": 200,
    "max_running_requests": 16,
}
CASES: dict[str, dict[str, Any]] = {
    "small chunks, scarce pages": {
        "chunked_prefill_size": 48,
        "max_steps_in_flight": 1,
        "radix_cache": True,
        "num_pages": 10,
        "max_running_requests": 16,
    },
    "overlap, prefix hits": {
        "chunked_prefill_size": 100,
        "max_steps_in_flight": 2,
        "radix_cache": True,
        "num_pages": 200,
        "max_running_requests": 16,
    },
    "few slots, no cache": {
        "chunked_prefill_size": 2048,
        "max_steps_in_flight": 2,
        "radix_cache": False,
        "num_pages": 200,
        "max_running_requests": 3,
    },
}
# drafts that part ways, for whatever drafts: in small chunks, with overlap and prefix hits
TREES: dict[str, Any] = {
    "chunked_prefill_size": 100,
    "max_steps_in_flight": 2,
    "radix_cache": True,
    "num_pages": 200,
    "max_running_requests": 8,
    "num_drafts": 7,
    "tree": TreeShape(3, 3, 7),
}


def answers(engine: LocalEngine, kind: str, alone: bool) -> list[Answer]:
    """Of the whole workload: its requests one after another, or as they arrive."""
    asks = workload(SEED, engine.vocab, kind, logprobs=True, prompt_logprobs=True, n=1)
    return [answer for ask in asks for answer in serve(engine, [ask])] if alone else serve(engine, asks)


def assert_equal_bits(left: list[Answer], right: list[Answer]) -> None:
    for want, got in zip(left, right, strict=True):
        assert got.tokens == want.tokens and got.finish == want.finish
        assert got.logprobs == want.logprobs, "log-probabilities differ in their last bits"
        assert got.prompt_logprobs == want.prompt_logprobs
