"""Acceptance rules in one step and in a whole engine. `test_acceptance_rules` tests the distribution of tokens."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.compose.matrix import MODEL, settings
from tests.configs import changed
from tests.seed import SEED
from thalweg.batch.slots import Slots
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.plan import Bind, SamplingNeeds
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import TreeShape
from thalweg.engine.local import LocalEngine
from thalweg.models import traced
from thalweg.sampling.draft_sampling import PROBABILITIES, IndependentDraftSampling
from thalweg.sampling.rejection import RejectionSampling
from thalweg.sampling.relaxed import RelaxedAcceptance
from thalweg.sampling.sample import REFERENCE, accept
from thalweg.text.tokenizer import Tokenizer

VOCAB, ROWS = 50, 40
STANDARD = RejectionSampling(REFERENCE)


# ---- one step


class Step:
    """Rows of one known token whose two drafts are verified: logits of three positions each."""

    def __init__(self, made: int = 2, **params: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        asked = SamplingParams(**params)
        self.slots = Slots(ROWS, 16, torch.device("cpu"), IndependentDraftSampling(2, VOCAB).fields())
        self.slots.bind([Bind(row, (1,), 1, 0, 16, 900 + row, (), asked) for row in range(ROWS)])
        self.slots.tokens_SL[:, 1:3] = torch.randint(VOCAB, (ROWS, 2), generator=generator).int()
        self.slots.num_drafts.fill_(made)
        self.logits_NV = torch.randn(ROWS * 3, VOCAB, generator=generator)
        self.slot_N = torch.arange(ROWS).repeat_interleave(3)
        self.ints_NI = self.slots.ints_SI[self.slot_N]
        self.ints_NI[:, 0] += torch.arange(3).repeat(ROWS)
        self.needs = SamplingNeeds(random=not asked.is_greedy)
        self.drafts_R2 = self.slots.tokens_SL[:, 1:3].long()

    def keep(self, q_R2V: Tensor) -> None:
        self.slots.extra[PROBABILITIES].copy_(q_R2V)

    def draw(self, sampling: Any) -> Tensor:
        drawn_N: Tensor = sampling.sample_tokens(
            self.logits_NV.clone(), self.slots, self.slot_N, self.ints_NI, self.needs
        )
        return drawn_N.view(ROWS, 3)

    @property
    def p_R3V(self) -> Tensor:
        return self.logits_NV.softmax(-1).view(ROWS, 3, VOCAB)


def test_drafts_equal_to_target_samples_are_accepted() -> None:
    step = Step()
    step.keep(step.p_R3V[:, :2])
    assert torch.equal(step.draw(STANDARD)[:, :2], step.drafts_R2)


def test_drafts_with_zero_target_probability_are_rejected() -> None:
    step = Step()
    step.logits_NV.view(ROWS, 3, VOCAB)[:, :2].scatter_(2, step.drafts_R2.unsqueeze(2), -torch.inf)
    step.keep(torch.full((ROWS, 2, VOCAB), 1 / VOCAB))
    drawn = step.draw(STANDARD)
    assert not (drawn[:, :2] == step.drafts_R2).any()


def test_behind_the_last_draft_the_token_is_plain_decodings() -> None:
    step, plain = Step(made=1), Step()
    step.keep(step.p_R3V[:, :2])
    drawn = step.draw(STANDARD)
    assert torch.equal(drawn[:, 0], step.drafts_R2[:, 0])
    assert torch.equal(drawn[:, 1:], plain.draw(REFERENCE)[:, 1:])


def test_drafts_of_a_nan_drafter_change_nothing() -> None:
    step, plain = Step(), Step()
    step.keep(torch.full((ROWS, 2, VOCAB), torch.nan))
    assert torch.equal(step.draw(STANDARD), plain.draw(REFERENCE))


def test_greedy_rows_beside_sampled_ones_stay_greedy() -> None:
    step = Step()
    step.slots.floats_SF[::2, 0] = 0.0
    step.keep(step.p_R3V[:, :2])
    drawn = step.draw(STANDARD)
    assert torch.equal(drawn[::2], step.logits_NV.argmax(-1).view(ROWS, 3)[::2])
    assert torch.equal(drawn[1::2, :2], step.drafts_R2[1::2])


def test_many_positions_are_judged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step()
    step.keep(torch.rand(ROWS, 2, VOCAB).softmax(-1))
    whole = step.draw(STANDARD)
    monkeypatch.setattr("thalweg.sampling.rejection.CHUNK", 7 * VOCAB)
    assert torch.equal(step.draw(STANDARD), whole)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_relaxed_acceptance_follows_top_k_and_delta(temperature: float) -> None:
    step = Step(temperature=temperature)
    p_R2V = step.p_R3V[:, :2]
    rank_R2V = p_R2V.argsort(-1, descending=True).argsort(-1)
    rank_R2, p_R2 = (x.gather(2, step.drafts_R2.unsqueeze(2)).squeeze(2) for x in (rank_R2V, p_R2V))
    plain = step.draw(REFERENCE)[:, :2]
    for candidates, delta in ((1, 0.0), (10, 0.05), (30, 1.0)):
        near = (rank_R2 < candidates) & (p_R2 >= p_R2V.amax(-1) - delta)
        drawn = step.draw(RelaxedAcceptance(REFERENCE, candidates, delta))[:, :2]
        assert torch.equal(drawn, torch.where(near, step.drafts_R2, plain)), (candidates, delta)
    assert near.sum() > ROWS // 2


def test_relaxed_acceptance_accepts_nothing_that_is_forbidden() -> None:
    step = Step(temperature=0.0)
    step.logits_NV.view(ROWS, 3, VOCAB)[:, :2].scatter_(2, step.drafts_R2.unsqueeze(2), -torch.inf)
    drawn = step.draw(RelaxedAcceptance(REFERENCE, VOCAB, 1.0))
    assert not (drawn[:, :2] == step.drafts_R2).any()


def test_relaxed_acceptance_takes_the_most_likely_of_several_drafts() -> None:
    """Greedy: behind the root tokens 2, 3 and 4, behind 3 token 5."""
    slots = Slots(1, 16, torch.device("cpu"), (), TreeShape(branching=3, max_depth=2, num_drafts=4))
    slots.bind([Bind(0, (1,), 1, 0, 16, 0, (), SamplingParams(temperature=0.0))])
    slots.tokens_SL[0, 1:5] = torch.tensor([2, 3, 4, 5])
    slots.nodes_SN3[0, 1:, :2] = torch.tensor([[0, 1], [0, 1], [0, 1], [2, 2]])
    slots.num_drafts.fill_(4)
    logits = torch.full((5, 8), -5.0)
    logits[0, [6, 2, 3, 4]] = torch.tensor([2.0, 1.5, 1.7, -1.0])  # the target's own choice is 6
    logits[2, [7, 5]] = torch.tensor([1.0, 0.0])
    for delta, want in ((0.2, [3, 7]), (0.4, [3, 7]), (0.5, [3, 5, 0]), (0.0, [6])):
        index, ints = torch.tensor([0]), slots.ints_SI.clone()
        found = accept(
            logits.clone(),
            slots,
            index,
            ints,
            SamplingNeeds(),
            slots.context,
            sampler=RelaxedAcceptance(REFERENCE, 5, delta),
        )
        assert found.tokens_EQ[0, : int(found.count_E)].tolist() == want, delta
        slots.ints_SI.copy_(ints)
        slots.tokens_SL[0, 1:5] = torch.tensor([2, 3, 4, 5])


# ---- whole engines


@pytest.fixture(autouse=True, scope="module")
def unrecorded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "ROWS", 0)
        yield


def engine(acceptance: str, width: int = 3, **fields: Any) -> LocalEngine:
    wished = {
        "chunked_prefill_size": 1024,
        "num_pages": 200,
        "max_running_requests": 64,
        "speculative_algorithm": "NEXTN" if width else "NONE",
        "num_drafts": width,
    }
    return LocalEngine(changed(settings(), speculative_acceptance=acceptance, **wished | fields))


def prompts(count: int, longest: int = 150) -> list[list[int]]:
    rng = random.Random(4)
    return [[0, *(rng.randrange(20, 2000) for _ in range(rng.randint(5, longest)))] for _ in range(count)]


def run(
    made: LocalEngine, asked: list[tuple[list[int], SamplingParams]], grammar: Grammar = NO_GRAMMAR
) -> list[list[int]]:
    answers: dict[int, list[int]] = {}
    for prompt, params in asked:
        answers |= {uid: [] for uid in made.submit(prompt, params, grammar=grammar)}
    while not made.idle:
        for delta in made.step():
            answers[delta.uid] += delta.tokens
    return list(answers.values())


def mixed(count: int, **fields: Any) -> list[tuple[list[int], SamplingParams]]:
    """Greedy requests, each followed by a sampled one."""
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, **fields)
    sampled = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=30, ignore_eos=True, **fields)
    return [(prompt, params) for prompt in prompts(count) for params in (greedy, sampled)]


ADAPTIVE = (
    (1, 512, (1.0, 1.01, 1.02, 1.03)),
    (16, 512, (1.0, 1.05, 1.1, 1.15)),
)  # times of steps with which drafts are worth it


@pytest.mark.parametrize(
    ("asked", "fields"),
    [
        ({}, {"chunked_prefill_size": 60, "num_pages": 14}),
        ({"frequency_penalty": 0.5, "logprobs": 2, "n": 2}, {"speculative_step_times": ADAPTIVE, "radix_cache": False}),
    ],
    ids=["scarce", "adaptive"],
)
def test_greedy_requests_keep_their_tokens_beside_sampled_ones(asked: dict[str, Any], fields: dict[str, Any]) -> None:
    n = asked.get("n", 1)
    plain, made = (
        run(engine("gumbel-max", 0), mixed(4, **asked)),
        engine("rejection-sampling", max_steps_in_flight=2, **fields),
    )
    found = run(made, mixed(4, **asked))
    greedy = [i for i in range(len(plain)) if i // n % 2 == 0]
    assert [found[i] for i in greedy] == [plain[i] for i in greedy] and found != plain
    assert made.loop.stats().accepted_tokens > 20
    assert made.runner.slots.extra[PROBABILITIES].shape[1:] == (3, made.vocab)
    allocator = made.loop.scheduler.allocator
    assert allocator.num_available() == allocator.num_pages


def test_a_seed_gives_the_same_tokens_again_with_the_same_widths() -> None:
    asked = mixed(3)
    assert run(engine("rejection-sampling", max_steps_in_flight=2), asked) == run(
        engine("rejection-sampling", chunked_prefill_size=100, radix_cache=False), asked
    )


def test_under_a_grammar() -> None:
    words = {"type": "array", "items": {"enum": ["aye", "nay"]}, "minItems": 6, "maxItems": 9}
    made = engine("rejection-sampling")
    asked = [(prompt, SamplingParams(temperature=1.0, seed=3, max_tokens=400)) for prompt in prompts(3)]
    texts = run(made, asked, Grammar("json_schema", json.dumps(words), any_whitespace=True))
    assert made.loop.stats().accepted_tokens > 0
    tokenizer = Tokenizer(Path(MODEL))
    assert all(6 <= len(json.loads(tokenizer.decode(tokens[:-1]))) <= 9 for tokens in texts)


def tops(made: LocalEngine, prefix: list[int]) -> dict[int, float]:
    """The distribution of the next token with top-k 3, by the engine's own log-probabilities."""
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3, ignore_eos=True)
    (uid,) = made.submit(prefix, asked)
    while not made.idle:
        for delta in made.step():
            ids, logprobs = delta.logprobs[0][1], delta.logprobs[0][2]
    whole = sum(map(math.exp, logprobs))
    return {token: math.exp(logprob) / whole for token, logprob in zip(ids, logprobs, strict=True)}


def test_sampled_tokens_are_distributed_as_plain_decodings() -> None:
    """The three tokens behind a prompt: the second and third are drafts, or what comes in their place."""
    text = "<｜begin▁of▁sentence｜><｜User｜>Tell me of the house.<｜Assistant｜></think>"  # of which some drafts are right
    count, prompt = 600, Tokenizer(Path(MODEL)).encode(text)
    plain, made = engine("gumbel-max", 0), engine("rejection-sampling", 2)
    want: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        want = {
            (*path, token): share * p
            for path, share in want.items()
            for token, p in tops(plain, [*prompt, *path]).items()
        }
    params = SamplingParams(temperature=1.0, top_k=3, max_tokens=3, ignore_eos=True)
    asked = [(prompt, msgspec.structs.replace(params, seed=SEED + i)) for i in range(count)]
    got = Counter(map(tuple, run(made, asked)))
    noise = sum(math.sqrt(2 * p * (1 - p) / (math.pi * count)) for p in want.values()) / 2
    far = sum(abs(got[path] / count - p) for path, p in want.items()) / 2
    assert set(got) <= set(want) and far < 3 * noise, f"{far / noise} times the noise, TEST_SEED={SEED}"
    assert made.loop.stats().accepted_tokens > count / 4
