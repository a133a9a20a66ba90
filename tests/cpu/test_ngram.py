"""N-gram lookup: what it proposes, and in a whole engine."""

from __future__ import annotations

import random

import pytest
import torch

from tests.compose.matrix import settings
from tests.cpu.test_speculation import run
from thalweg.batch.slots import Slots
from thalweg.core.plan import Bind, SamplingNeeds
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.memory.planes import Planes
from thalweg.models import traced
from thalweg.spec.drafter import DraftRequest
from thalweg.spec.ngram import LEAST, MOST, NgramDrafter, lookup


def drafted(tokens: list[int], width: int = 3, max_kv_len: int = 60) -> list[int]:
    slots = Slots(3, 64, torch.device("cpu"))
    slots.tokens_SL.random_(0, 99)
    slots.bind([Bind(1, tuple(tokens), 1, 0, 64, 0, (), SamplingParams())])
    found = NgramDrafter().propose(
        DraftRequest(torch.tensor([1]), max_kv_len, SamplingNeeds()), width, slots, Planes((), 1)
    )
    assert found is not None
    made = int(found.num_drafts_E)
    assert slots.num_drafts[1] == made
    assert slots.tokens_SL[1, len(tokens) : len(tokens) + made].tolist() == found.drafts_EK[0, :made].tolist()
    return found.drafts_EK[0, :made].tolist()


def test_what_followed_the_last_tokens_before() -> None:
    assert drafted([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5]
    assert drafted([1, 2, 3, 7, 1, 2, 4, 8, 8, 1, 2]) == [4, 8, 8], "the last place"
    assert drafted([6, 1, 2, 3, 7, 1, 2, 4, 8, 6, 1, 2]) == [3, 7, 1], "the longest match"
    assert drafted([1, 2, 3, 4]) == [] and drafted([5]) == [] and drafted([1, 7, 2, 7]) == [], (
        f"{LEAST} tokens at least"
    )


def test_nothing_is_looked_up_where_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = Slots(2, 16, torch.device("cpu"))
    slots.num_drafts.fill_(5)
    monkeypatch.setattr("thalweg.spec.ngram.lookup", lambda *given: pytest.fail("it costs milliseconds a step"))
    assert NgramDrafter().propose(DraftRequest(torch.tensor([1]), 10, SamplingNeeds()), 0, slots, Planes((), 1)) is None
    assert slots.num_drafts.tolist() == [5, 0]


def test_repeating_text_is_proposed_again() -> None:
    assert drafted([1, 2, 3, 1, 2, 3], width=7) == [1, 2, 3, 1, 2, 3, 1]
    assert drafted([4, 4, 4], width=4) == [4, 4, 4, 4]


def test_the_end_of_the_context_is_kept() -> None:
    slots = Slots(2, 16, torch.device("cpu"))
    before = slots.tokens_SL[1].clone()
    slots.bind([Bind(0, (1, 2) * 8, 1, 0, 16, 0, (), SamplingParams())])
    NgramDrafter().propose(DraftRequest(torch.tensor([0]), 20, SamplingNeeds()), 5, slots, Planes((), 1))
    assert torch.equal(slots.tokens_SL[1], before) and slots.tokens_SL[0, :16].tolist() == [1, 2] * 8


def by_hand(tokens: list[int]) -> int | None:
    for size in range(min(MOST, len(tokens) - 1), LEAST - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                return end
    return None


def test_lookup_is_what_a_plain_search_finds() -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    rows = [[rng.randrange(3) for _ in range(rng.randint(1, 30))] for _ in range(300)]
    padded = torch.tensor([row + [rng.randrange(3) for _ in range(30 - len(row))] for row in rows])
    at, found = lookup(padded, torch.tensor([len(row) for row in rows]))
    for row, place, hit in zip(rows, at.tolist(), found.tolist(), strict=True):
        want = by_hand(row)
        assert hit == (want is not None) and (want is None or place == want), (seed, row)


@pytest.mark.parametrize("depth", [1, 2])
def test_in_an_engine(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "ROWS", 0)
    rng = random.Random(2)
    words = [rng.randrange(20, 2000) for _ in range(12)]
    asked = [[0, *words * 3, *words[:k]] for k in (3, 5, 8)]
    params = SamplingParams(temperature=0.5, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True, frequency_penalty=0.1)
    plain = run(LocalEngine(settings(chunked_prefill_size=64, num_pages=60, max_running_requests=8)), asked, params)
    made = LocalEngine(
        settings(
            chunked_prefill_size=64,
            num_pages=60,
            max_running_requests=8,
            max_steps_in_flight=depth,
            speculative_algorithm="NGRAM",
            num_drafts=4,
        )
    )
    assert run(made, asked, params) == plain
    assert made.loop.stats().drafted_tokens > 0
