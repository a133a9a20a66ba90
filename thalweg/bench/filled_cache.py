"""Long contexts that nobody computed: random vectors in a cache whose pages belong to the prompts of a batch, so that
decode at long contexts can be timed without minutes of prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from thalweg.bench.datasets import vocabulary_of
from thalweg.bench.in_process import Tokens, check_one_process
from thalweg.cache.radix import PrefixCursor
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.plan import PAGE
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolved import Resolved
from thalweg.memory.planes import Planes

DRAWN_PAGES = 16  # whose vectors all others repeat


def check(engine: LocalEngine, flag: str) -> None:
    """Raises UnsupportedConfig where the engine's cache is not in this process, or finds no prefixes."""
    check_one_process(engine, flag)
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


def fill_planes(planes: Planes, seed: int) -> None:
    """Standard normal vectors in every page but the null page."""
    generator, pages = torch.Generator().manual_seed(seed), min(DRAWN_PAGES, planes.pages - 1)
    rows_T = torch.arange(PAGE, (pages + 1) * PAGE)
    for (name, layer), stored in planes.bytes.items():
        dim = planes.read(name, layer, planes.paged(name, layer)[:1], torch.float32).shape[-1]
        vectors = torch.randn(len(rows_T), dim, generator=generator).to(stored.device)
        planes.write(name, layer, rows_T.to(stored.device), vectors)
        first = 1 + pages
        while first < planes.pages:  # each copy doubles what is filled
            others = stored[first : 2 * first - 1]
            others.copy_(stored[1 : 1 + len(others)])
            first += len(others)


def cache_prompts(engine: LocalEngine, prompts: Sequence[Tokens]) -> None:
    """Whatever is in the cache's pages becomes the context of these prompts, where they are not cached; other prefixes
    may be evicted. Raises UnsupportedConfig where the cache has too few pages.
    """
    allocator = engine.loop.scheduler.allocator
    tree, held = allocator.tree, list[list[int]]()
    for prompt in prompts:
        cursor, count = PrefixCursor(prompt, 0), len(prompt) // allocator.page_size
        missing = count - tree.match(cursor, count)
        pages = tree.pages(cursor)
        allocator.acquire(pages)
        held.append(pages)
        if missing > allocator.num_available():
            needed = sum(len(each) for each in prompts)
            raise UnsupportedConfig(f"--fill-cache: the prompts have {needed:,} tokens; use more --max-total-tokens")
        pages += allocator.allocate(missing)
        tree.insert(cursor, pages, count)
    for pages in held:
        allocator.release(pages)
