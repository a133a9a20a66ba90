"""Sampling from a vocabulary that ranks share: candidates where they are enough, and the tokens of one rank always."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.ranks import layouts, on_ranks
from thalweg.batch.slots import Slots
from thalweg.core.plan import Bind, SamplingNeeds
from thalweg.core.sampling import SamplingParams
from thalweg.parallel.vocabulary import VocabularyShards
from thalweg.sampling import sharded
from thalweg.sampling.rejection import RejectionSampling
from thalweg.sampling.sample import REFERENCE, Sampled, Sampler, accept

ROWS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=1.3, seed=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias=((2, 9.0), (130, 3.0))),
]
GREEDY, RANDOM = SamplingNeeds(), SamplingNeeds(random=True)
NEEDS = {
    "greedy": GREEDY,
    "random": RANDOM,
    "truncated": SamplingNeeds(random=True, truncated=True),
    "edited": SamplingNeeds(random=True, penalised=True, biased=True),
    "logprobs": SamplingNeeds(logprobs=3),
}


def slots() -> Slots:
    made = Slots(len(ROWS), 64, torch.device("cpu"))
    made.bind([Bind(i, (5, 6, 7), 3, 2, 60, p.seed or 0, (), p) for i, p in enumerate(ROWS)])
    return made


def sampled(logits_NV: Tensor, needs: SamplingNeeds, sampler: Sampler) -> Sampled:
    state, slot_E = slots(), torch.arange(len(ROWS))
    return accept(logits_NV.clone(), state, slot_E, state.ints_SI.index_select(0, slot_E), needs, 8, sampler=sampler)


def logits_of(vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits_NV = torch.randn(len(ROWS), vocab, generator=generator) * 3
    logits_NV[0] = logits_NV[0].round()  # ties between ranks
    return logits_NV


@pytest.mark.parametrize("name", NEEDS)
@pytest.mark.parametrize(("vocab", "ranks"), [(133, 2), (133, 4), (5, 4)])
def test_tokens_are_one_ranks(name: str, vocab: int, ranks: int) -> None:
    if vocab == 5 and name == "edited":
        return  # the biases name ids that it has not
    logits_NV, needs = logits_of(vocab), NEEDS[name]
    want = sampled(logits_NV, needs, REFERENCE)

    def work(rank: int) -> Sampled:
        shards = VocabularyShards(axes[rank].tp, vocab)
        own_NV = logits_NV[:, shards.here.start : shards.here.stop]
        return sampled(own_NV, needs, sharded.sharded(REFERENCE, shards))

    axes = layouts(tp=ranks)
    for got in on_ranks(ranks, work):
        assert torch.equal(got.tokens_EQ, want.tokens_EQ)
        if want.logprob_N is not None and got.logprob_N is not None:
            assert torch.equal(got.logprob_N, want.logprob_N)


def test_a_nan_on_one_rank_is_no_token_on_all() -> None:
    logits_NV, axes = logits_of(40), layouts(tp=2)
    logits_NV[1, 33] = torch.nan

    def work(rank: int) -> Tensor:
        shards = VocabularyShards(axes[rank].tp, 40)
        own_NV = logits_NV[:, shards.here.start : shards.here.stop]
        return sampled(own_NV, GREEDY, sharded.sharded(REFERENCE, shards)).tokens_EQ[:, 0]

    assert [tokens.tolist()[1] for tokens in on_ranks(2, work)] == [-1, -1]


def gathered(needs: SamplingNeeds, make: Callable[[], Sampler] = lambda: REFERENCE) -> int:
    """Numbers that a rank sends for each row."""
    logits_NV, axes, sizes = logits_of(132), layouts(tp=2), list[int]()

    def work(rank: int) -> None:
        axis: Any = axes[rank].tp
        exchange = axis.rendezvous.exchange

        def counted(number: int, name: str, x: Tensor) -> list[Tensor]:
            sizes.append(x.numel() // len(ROWS) if number == 0 else 0)
            found: list[Tensor] = exchange(number, name, x)
            return found

        axis.rendezvous.exchange = counted if rank == 0 else axis.rendezvous.exchange
        shards = VocabularyShards(axis, 132)
        sampled(logits_NV[:, shards.here.start : shards.here.stop], needs, sharded.sharded(make(), shards))

    on_ranks(2, work)
    return sum(sizes)


def test_candidates_are_two_numbers_a_row() -> None:
    assert gathered(GREEDY) == 2 and gathered(RANDOM) == 4
    assert gathered(SamplingNeeds(random=True, truncated=True)) == 66, "thresholds need all logits"
    assert gathered(GREEDY, lambda: RejectionSampling(REFERENCE)) == 66, "so do acceptance rules"


@pytest.mark.parametrize("bug", ["ids without their place", "noise without its place"])
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug == "ids without their place":
        monkeypatch.setattr(VocabularyShards, "_own_largest", lambda self, own_NV: own_NV.max(-1))
    else:
        exponential = sharded.exponential
        monkeypatch.setattr(
            sharded, "exponential", lambda seed, position, vocab, first: exponential(seed, position, vocab)
        )
    with pytest.raises(AssertionError):
        test_tokens_are_one_ranks("random", 133, 4)
