"""Deterministic inference: bit for bit the same log-probabilities, whatever the batch, the chunks, what the cache held, and overlap."""

from __future__ import annotations

from typing import Any

from tests.compose.workload import Answer, serve, workload
from thalweg.core.tree import TreeShape
from thalweg.engine.local import LocalEngine

SEED = 11
KINDS = ("seeded", "penalised")
PLAIN: dict[str, Any] = {"budget": 4096, "depth": 1, "radix": False, "pages": 200, "slots": 16}
CASES: dict[str, dict[str, Any]] = {
    "small chunks, scarce pages": {"budget": 48, "depth": 1, "radix": True, "pages": 10, "slots": 16},
    "overlap, prefix hits": {"budget": 100, "depth": 2, "radix": True, "pages": 200, "slots": 16},
    "few slots, no cache": {"budget": 2048, "depth": 2, "radix": False, "pages": 200, "slots": 3},
}
# drafts that part ways, for whatever drafts: in small chunks, with overlap and prefix hits
TREES: dict[str, Any] = {
    "budget": 100,
    "depth": 2,
    "radix": True,
    "pages": 200,
    "slots": 8,
    "width": 7,
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
