"""Prompts whose KV nobody computed: with random vectors as their cached prefixes, decoding at long contexts can be
timed without minutes of prefill.
"""

from __future__ import annotations

from random import Random

from thalweg.bench.datasets import vocabulary_of
from thalweg.bench.in_process import Tokens
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.plan import PAGE
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolved import Resolved


def check(engine: LocalEngine, flag: str) -> None:
    """Raises UnsupportedConfig where the engine's cache finds no prefixes."""
    if not engine.config.radix_cache:
        raise UnsupportedConfig(f"{flag} works by cached prefixes: leave out --no-radix-cache")


def prompts_of_own_pages(resolved: Resolved, batch: int, length: int, rng: Random) -> list[Tokens]:
    """Prompts of `length` tokens that share no page: each has a first page of its own, and a last one, so that tokens
    choose experts as different as those of other prompts do.
    """
    vocabulary = vocabulary_of(resolved.path)
    between = vocabulary.draw(rng, max(length - 2 * PAGE, 0))
    return [
        (vocabulary.draw(rng, PAGE) + between + vocabulary.draw(rng, min(length, PAGE)))[-length:] for _ in range(batch)
    ]
