"""The requests of every composed case, and when two engines gave the same tokens.

Tokens are equal up to the first position where the reference's two best candidates lie closer than JUMP, because a
different batch rounds differently. A greedy sequence compares candidates by logit, a sampled one by its score in
Gumbel-max sampling. Rounding moves this model's log-probabilities by about 1e-5. Where it tips a near tie of a discrete
choice inside the model (an expert, a position that the indexer selects), they jump by a few hundredths. Both are
counted and must be rare.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import torch

from thalweg.core.messages import TokenDelta
from thalweg.core.plan import TokenLogprob
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine
from thalweg.sampling.random import exponential

ROUNDING = 1e-3  # of a log-probability; more is a jump, and counted
JUMP = 0.1
ALTERNATIVES = 8


@dataclass(frozen=True)
class Ask:
    """One request: prompt, parameters, and the turn of the loop at which it arrives."""

    prompt: tuple[int, ...]
    params: SamplingParams
    turn: int


@dataclass
class Answer:
    """What came back for one sequence."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]
    finish: str = ""


def workload(seed: int, vocab: int, kind: str, logprobs: bool, prompt_logprobs: bool, n: int) -> list[Ask]:
    """Requests with shared prefixes of several pages, short and long prompts, arriving over a while."""
    rng = random.Random(seed)
    shared = [tuple(rng.randrange(20, vocab - 40) for _ in range(150)) for _ in range(2)]
    asks = []
    for i in range(8):
        grower = i % 2 == 1  # short prompts and long outputs: together they outgrow scarce pages
        prefix = () if grower else rng.choice(shared)[: rng.choice((0, 64, 128, 150))]
        prompt = prefix + tuple(rng.randrange(20, vocab - 40) for _ in range(rng.randint(1, 40 if grower else 120)))
        params = {
            "greedy": SamplingParams(temperature=0.0),
            "seeded": SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=rng.randrange(1 << 40)),
            "penalised": SamplingParams(
                temperature=0.0,
                repetition_penalty=1.2,
                frequency_penalty=0.3,
                presence_penalty=0.2,
                logit_bias=((rng.randrange(20, vocab), 4.0),),
                min_tokens=4,
            ),
        }[kind]
        more: dict[str, object] = {
            "max_tokens": rng.randint(100, 140) if grower else rng.randint(4, 24),
            "n": n if i % 3 == 0 else 1,
            "ignore_eos": i % 2 == 0 or grower,
        }
        more |= {"logprobs": ALTERNATIVES if logprobs else None}
        more |= {"prompt_logprobs": 2 if prompt_logprobs and i % 2 else None}
        asks.append(Ask(prompt, msgspec.structs.replace(params, **more), rng.randrange(3 if grower else 12)))
    return asks


def serve(engine: LocalEngine, asks: list[Ask]) -> list[Answer]:
    """Runs them as they arrive; one Answer a sequence, in the order of the requests and their choices."""
    answers: dict[int, Answer] = {}
    order: dict[int, tuple[int, ...]] = {}
    waiting = sorted(range(len(asks)), key=lambda i: asks[i].turn)
    turn = 0
    while waiting or not engine.idle:
        while waiting and asks[waiting[0]].turn <= turn:
            i = waiting.pop(0)
            order[i] = engine.submit(asks[i].prompt, asks[i].params)
            answers |= {uid: Answer([], [], []) for uid in order[i]}
        for delta in engine.step():
            take(answers[delta.uid], delta)
        turn += 1
    return [answers[uid] for i in range(len(asks)) for uid in order[i]]


def take(answer: Answer, delta: TokenDelta) -> None:
    answer.tokens += delta.tokens
    answer.logprobs += [TokenLogprob(*entry) for entry in delta.logprobs]
    answer.prompt_logprobs += [TokenLogprob(*entry) for entry in delta.prompt_logprobs]
    answer.finish = delta.finish or answer.finish


def gap(params: SamplingParams, reference: TokenLogprob, position: int, seed: int, kind: str) -> float:
    """How far apart the reference's two best candidates for this token lie."""
    ids, values = torch.tensor(reference.top_ids), torch.tensor(reference.top_logprobs)
    if kind == "seeded":
        race = exponential(torch.tensor([seed]), torch.tensor([position]), int(ids.max()) + 1)[0, ids].log()
        values = values / params.temperature - race
    best = values.topk(2).values
    return float(best[0] - best[1])
