"""Every family against transformers, in float32, on drawn configurations (`make soak` draws others)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cpu import zoo
from tests.cpu.batches import Bench
from tests.cpu.equality import SameTokens
from tests.seed import SEED
from thalweg.models.interface import Model

TOLERANCE = 1e-4  # max |difference| / max |reference|
LENGTH = 150  # far past every index_topk that the zoo draws, and past two pages


class Pair:
    """One drawn configuration: transformers' model, ours from its checkpoint, a prompt and transformers' logits of
    it.
    """

    def __init__(self, family: str, folder: Path) -> None:
        print(f"{family}: TEST_SEED={SEED}")
        self.config: dict[str, Any] = zoo.draw_config(family, SEED)
        self.theirs: nn.Module = zoo.reference(self.config, SEED)
        zoo.save(self.theirs, self.config, folder)
        self.watched = zoo.Watched()
        self.ours: Model = zoo.ours(folder, selection=self.watched)
        self.ids = self.draw(lambda ids: Bench(self.ours, 1).step([(0, ids)]))
        self.want = self.logits(self.ids)

    def draw(self, use: Callable[[list[int]], object]) -> list[int]:
        """LENGTH random tokens in whose use no choice of context or experts is a near-tie: there two right programs may
        differ.
        """
        for attempt in range(20):
            draw, self.watched.near = random.Random(f"{SEED} {attempt}"), False
            ids = [draw.randrange(self.config["vocab_size"]) for _ in range(LENGTH)]
            use(ids)
            if not self.watched.near:
                return ids
        raise AssertionError(f"20 prompts in a row with near-ties among choices, TEST_SEED={SEED}")

    def logits(self, ids: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.theirs(torch.tensor([ids])).logits[0]
        return logits


@pytest.fixture(scope="module", params=list(zoo.FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def test_prompt_in_one_piece(pair: Pair) -> None:
    got = Bench(pair.ours, 1).step([(0, pair.ids)])[0]
    assert error(got, pair.want) < TOLERANCE, f"TEST_SEED={SEED}"


def test_prompt_in_chunks(pair: Pair) -> None:
    bench, draw, got, at = Bench(pair.ours, 1), random.Random(SEED), [], 0
    while at < LENGTH:
        size = draw.choice([1, 2, 7, 33, 64, 70])
        got += bench.step([(0, pair.ids[at : at + size])])
        at += size
    assert error(torch.cat(got), pair.want) < TOLERANCE, f"TEST_SEED={SEED}"


def test_token_by_token(pair: Pair) -> None:
    bench = Bench(pair.ours, 1)
    got = torch.cat([bench.step([(0, [token])])[0] for token in pair.ids])
    assert error(got, pair.want) < TOLERANCE, f"TEST_SEED={SEED}"


def test_rows_of_different_lengths_in_one_step_with_padding(pair: Pair) -> None:
    """Decode rows before, at and past index_topk, two equal chunks and a long one, and padding, in one step: none
    disturbs another.
    """
    bench = Bench(pair.ours, 6)
    lengths = [3, 64, 130, 40, 10, 0]
    for row, length in enumerate(lengths):
        if length:
            bench.step([(row, pair.ids[:length])])
    sizes = [1, 1, 1, 5, 5, 100]
    rows = [(row, pair.ids[at : at + size]) for row, (at, size) in enumerate(zip(lengths, sizes, strict=True))]
    got = bench.step(rows, padding=3)
    for row, (at, size) in enumerate(zip(lengths, sizes, strict=True)):
        assert error(got[row], pair.want[at : at + size]) < TOLERANCE, f"row {row}, TEST_SEED={SEED}"


def test_tiles_bound_memory_and_change_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thalweg.attention.context.TILE_ELEMENTS", 1 << 13)
    bench = Bench(pair.ours, 2)
    head = bench.step([(0, pair.ids[:70]), (1, pair.ids[:70])])
    tail = bench.step([(0, pair.ids[70:]), (1, pair.ids[70:])])
    for row in range(2):
        assert error(torch.cat([head[row], tail[row]]), pair.want) < TOLERANCE, f"TEST_SEED={SEED}"


def split(ids: list[int]) -> list[list[int]]:
    return [ids[:20], ids[20:90], ids[90:95]]


def greedy(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    """64 tokens of each prompt, one by one from the cache, all prompts in one batch."""
    bench, got = Bench(model, len(prompts)), [[] for _ in prompts]
    last = [bench.step([(row, prompt)])[0][-1] for row, prompt in enumerate(prompts)]
    for _ in range(64):
        tokens = [int(logits.argmax()) for logits in last]
        for row, token in enumerate(tokens):
            got[row].append(token)
        last = [logits[-1] for logits in bench.step([(row, [token]) for row, token in enumerate(tokens)])]
    return got


def test_greedy_tokens(pair: Pair) -> None:
    """64 greedy tokens from three prompts."""
    same, got = SameTokens(), list[list[int]]()
    ids = pair.draw(lambda ids: got.__setitem__(slice(None), greedy(pair.ours, split(ids))))
    for row, prompt in enumerate(split(ids)):
        # transformers' logits along OUR tokens: up to the first difference they are along its own
        logits = pair.logits(prompt + got[row])[len(prompt) - 1 : -1]
        top = logits.topk(2).values
        reason = same.difference(logits.argmax(-1).tolist(), (top[:, 0] - top[:, 1]).tolist(), got[row])
        assert not reason, f"prompt {row}: {reason}, TEST_SEED={SEED}"
    assert same.rare, f"{same.excused} of {same.positions} tokens differ at near-ties, TEST_SEED={SEED}"
