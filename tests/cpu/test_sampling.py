"""Sampling against transformers' logits processors, and its tokens against the distribution (statistically)."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from thalweg.batch.slots import Slots
from thalweg.core.plan import Bind, SamplingNeeds
from thalweg.core.sampling import SamplingParams
from thalweg.kernels.topk_topp.ref import apply_topk_topp
from thalweg.sampling.random import exponential, mix
from thalweg.sampling.sample import accept, penalise

VOCAB = 50


def bound(params: SamplingParams, tokens: tuple[int, ...], prompt_len: int, seed: int = 0, slots: int = 4) -> Slots:
    """Slots in which slot 2 holds this sequence, with its KV computed up to the last token."""
    made = Slots(slots, 256, torch.device("cpu"))
    made.bind([Bind(2, tokens, prompt_len, len(tokens) - 1, 200, seed, (7,), params)])
    return made


def step(slots: Slots, logits_EV: torch.Tensor, needs: SamplingNeeds, slot: int = 2) -> int:
    index = torch.tensor([slot])
    return int(accept(logits_EV, slots, index, slots.ints_SI[index], needs, slots.context).tokens_EQ)


def test_truncation_equals_transformers() -> None:
    torch.manual_seed(torch.seed() % 2**32)
    for k, p, min_p in ((5, 1.0, 0.0), (1 << 30, 0.7, 0.0), (1 << 30, 1.0, 0.2), (9, 0.6, 0.05), (1, 0.1, 0.9)):
        logits = torch.randn(64, VOCAB) * 2
        ids = torch.zeros(64, 1, dtype=torch.int64)
        want = TopKLogitsWarper(min(k, VOCAB))(ids, logits)
        if p < 1:
            want = TopPLogitsWarper(p)(ids, want)
        if min_p > 0:
            want = MinPLogitsWarper(min_p)(ids, want)
        column = torch.ones(64)
        got = apply_topk_topp(logits, column.to(torch.int64) * k, column * p, column * min_p)
        assert torch.equal(got.isinf(), want.isinf()), (k, p, min_p)
        assert torch.equal(got[~got.isinf()], want[~want.isinf()])


def test_repetition_penalty_equals_transformers_over_prompt_and_output() -> None:
    tokens = (3, 4, 4, 9, 11, 3)
    slots = bound(SamplingParams(repetition_penalty=1.7), tokens, 4)
    logits = torch.randn(1, VOCAB)
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), logits.clone())
    got = logits.clone()
    index = torch.tensor([2])
    penalise(got, slots, index, slots.ints_SI[index], slots.context)
    torch.testing.assert_close(got, want)


def test_frequency_and_presence_count_the_output_only() -> None:
    tokens = (3, 3, 3, 5, 5, 6)  # prompt 3 3 3, output 5 5 6
    slots = bound(SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), tokens, 3)
    logits = torch.zeros(1, VOCAB)
    index = torch.tensor([2])
    penalise(logits, slots, index, slots.ints_SI[index], slots.context)
    want = torch.zeros(1, VOCAB)
    want[0, 5], want[0, 6] = -(2 * 0.5 + 0.25), -(0.5 + 0.25)
    torch.testing.assert_close(logits, want)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=1),
        SamplingParams(temperature=1.3, top_k=6, seed=1),
        SamplingParams(temperature=1.0, top_p=0.6, seed=1),
        SamplingParams(temperature=1.0, min_p=0.1, seed=1),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Total variation between 2e5 draws (one per position) and the explicit distribution, under three times multinomial
    noise.
    """
    draws = 200_000
    logits = torch.randn(1, VOCAB) * 1.5
    ids = torch.zeros(1, 1, dtype=torch.int64)
    want = logits / params.temperature
    if params.top_k > 0:
        want = TopKLogitsWarper(params.top_k)(ids, want)
    if params.top_p < 1:
        want = TopPLogitsWarper(params.top_p)(ids, want)
    if params.min_p > 0:
        want = MinPLogitsWarper(params.min_p)(ids, want)
    probs = want.softmax(-1)[0].to(torch.float64)
    kept = apply_topk_topp(
        logits / params.temperature,
        torch.tensor([params.top_k or 1 << 30]),
        torch.tensor([params.top_p]),
        torch.tensor([params.min_p]),
    )
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    for start in range(0, draws, 20_000):
        position = torch.arange(start, start + 20_000)
        race = kept - exponential(torch.full_like(position, 99), position, VOCAB).log()
        counts += torch.bincount(race.argmax(-1), minlength=VOCAB)
    distance = 0.5 * (counts / draws - probs).abs().sum()
    noise = 0.5 * (2 * probs * (1 - probs) / (torch.pi * draws)).sqrt().sum()
    assert distance <= 3 * noise, (float(distance), float(noise))  # both are 0 where one token is kept


def test_random_numbers_depend_on_seed_and_position_only() -> None:
    one = exponential(torch.tensor([5, 6]), torch.tensor([10, 10]), VOCAB)
    other = exponential(torch.tensor([1, 6, 5]), torch.tensor([3, 10, 10]), VOCAB)
    assert torch.equal(one[0], other[2]) and torch.equal(one[1], other[1])
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], exponential(torch.tensor([5]), torch.tensor([11]), VOCAB)[0])


def test_mixer_equals_splitmix64() -> None:
    def reference(x: int) -> int:
        mask = 2**64 - 1
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    values = [0, 1, -1, 2**63 - 1, -(2**63), 123456789123456789]
    got = mix(torch.tensor(values)).tolist()
    assert [g % 2**64 for g in got] == [reference(v % 2**64) for v in values]


def test_greedy_row_beside_sampling_rows_takes_the_arg_max() -> None:
    slots = Slots(4, 256, torch.device("cpu"))
    greedy, random = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=3)
    slots.bind([Bind(s, (1, 2), 2, 1, 100, s, (), p) for s, p in enumerate((greedy, random, greedy))])
    logits = torch.randn(3, VOCAB)
    index = torch.tensor([0, 1, 2])
    got = accept(
        logits.clone(), slots, index, slots.ints_SI[index], SamplingNeeds(random=True, truncated=True), slots.context
    ).tokens_EQ[:, 0]
    assert got[0] == logits[0].argmax() and got[2] == logits[2].argmax()
    assert got[1] in logits[1].topk(3).indices


def test_bias_and_minimum_length() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((4, 100.0), (7, 100.0)), min_tokens=2)
    slots = bound(params, (1, 2, 3), 3)
    assert step(slots, torch.randn(1, VOCAB), SamplingNeeds(biased=True)) == 4  # 7 would stop it
    slots.stop_SK[2, 0] = 4
    assert step(slots, torch.randn(1, VOCAB), SamplingNeeds(biased=True)) == 7
    assert slots.end[2] > 0
    slots.stop_SK[2, 0] = 7
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1.0
    assert step(slots, logits, SamplingNeeds(biased=True)) == 7 and slots.end[2] == 0


def test_an_ended_slot_is_left_alone() -> None:
    slots = bound(SamplingParams(temperature=0.0), (1, 2, 3), 3)
    slots.end[2] = 0
    before = slots.tokens_SL[2, :-1].clone(), slots.length[2].clone(), slots.num_computed[2].clone()
    logits = torch.randn(1, VOCAB)
    index = torch.tensor([2])
    sampled = accept(logits, slots, index, slots.ints_SI[index], SamplingNeeds(), slots.context)
    assert not sampled.count_E and torch.equal(slots.tokens_SL[2, :-1], before[0])
    assert slots.length[2] == before[1] and slots.end[2] == 0


def test_logprobs_are_the_models_own() -> None:
    slots = bound(SamplingParams(temperature=0.0, logit_bias=((4, 100.0),), logprobs=3), (1, 2, 3), 3)
    logits = torch.randn(1, VOCAB)
    index = torch.tensor([2])
    sampled = accept(
        logits.clone(), slots, index, slots.ints_SI[index], SamplingNeeds(biased=True, logprobs=3), slots.context
    )
    want = logits.log_softmax(-1)
    assert sampled.tokens_EQ == 4 and sampled.logprob_N is not None and sampled.top_ids_NK is not None
    torch.testing.assert_close(sampled.logprob_N, want[:, 4])
    assert torch.equal(sampled.top_ids_NK, want.topk(3).indices)
