"""Random schedules of four data-parallel ranks: idle ranks, long prompts, grammars, n > 1, prefix hits, preemption,
experts that move, and a drafter that is lost on the way. Every request gets one rank's tokens.

python -m tests.soak.ranks --steps 12500
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tests.compose.matrix import DRAFTING, MODEL, SEED, compare, settings
from tests.compose.test_compose_grammar import GRAMMARS, check
from tests.compose.test_compose_grammar import serve as serve_alone
from tests.compose.workload import Answer, Ask, workload
from tests.ranks.bugs import LOST_AT
from tests.ranks.group import ProcessGroup, Script, Served, submits
from tests.ranks.test_tokens import EPLB, LAYOUTS, answers_of, engine_config
from tests.soak.report import write
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.engine.local import LocalEngine, choice_params
from thalweg.text.tokenizer import Tokenizer

RANKS = 4
CONTEXT = 800
LONG = 600  # tokens of the longest prompt
JUMPS = 0.05  # share of the sequences that a near tie may move
Load = list[tuple[str, Ask, Grammar]]  # kind, request, grammar


def pool(draw: random.Random) -> Load:
    """Different requests of every kind; some with grammars, some with a long prompt."""
    made: Load = []
    for kind in ("greedy", "seeded", "penalised"):
        for seed in (SEED, SEED + 1):
            for i, ask in enumerate(workload(seed, 2048, kind, logprobs=True, prompt_logprobs=False, n=2)):
                grammar = GRAMMARS[draw.choice(("json_schema", "regex"))] if i % 4 == 2 else NO_GRAMMAR
                if grammar.is_set:
                    params = msgspec.structs.replace(ask.params, ignore_eos=False, max_tokens=180)
                    ask = replace(ask, params=params)
                elif i == 0:
                    more = tuple(draw.randrange(20, 2000) for _ in range(LONG - len(ask.prompt)))
                    ask = replace(ask, prompt=ask.prompt + more)
                made.append((kind, ask, grammar))
    return made


def schedule(steps: int, count: int, draw: random.Random) -> list[list[tuple[int, int]]]:
    """(step, request of the pool) of each rank: bursts, and pauses in which a rank is idle."""
    ranks: list[list[tuple[int, int]]] = [[] for _ in range(RANKS)]
    for rank in ranks:
        at = draw.randrange(40)
        while at < steps:
            rank += ((at, draw.randrange(count)) for _ in range(draw.choice((1, 2, 4, 8))))
            at += draw.choice((30, 80, 200, 600))
    return ranks


def reference(load: Load) -> list[list[Answer]]:
    """Of each request alone, on one rank."""
    limits = {"chunked_prefill_size": 4096, "num_pages": 400, "max_running_requests": 16}
    engine = LocalEngine(_settings(max_steps_in_flight=1, radix_cache=False, **limits))
    return [serve_alone(engine, [(ask, grammar)]) for _, ask, grammar in load]


def _settings(**fields: Any) -> Any:
    return msgspec.structs.replace(settings(**fields), context_length=CONTEXT)


def scripts(load: Load, ranks: list[list[tuple[int, int]]]) -> tuple[list[Script], dict[int, tuple[int, int]]]:
    """The scripts of all ranks, and of each sequence its request and choice."""
    made, asked, uid = list[Script](), dict[int, tuple[int, int]](), 0
    for rank in ranks:
        script = list[Any]()
        for at, index in rank:
            _, ask, grammar = load[index]
            for choice, submit in enumerate(submits(uid, ask.prompt, ask.params, grammar=grammar)):
                script.append((at, submit))
                asked[submit.uid], uid = (index, choice), uid + 1
        made.append(tuple(script))
    return made, asked


def count(served: list[Served], load: Load, want: list[list[Answer]], asked: dict[int, tuple[int, int]]) -> Any:
    """What came of all sequences. Raises AssertionError for one that is no request's."""
    answers, counts, tokenizer = answers_of(served), Counter[str](), Tokenizer(Path(MODEL))
    assert answers.keys() == asked.keys(), "a sequence is lost"
    for uid, (index, choice) in asked.items():
        kind, ask, grammar = load[index]
        params, expected, got = choice_params(ask.params, choice), want[index][choice], answers[uid]
        if grammar.is_set:
            counts["near ties"] += got.tokens != expected.tokens
            check(grammar, params, tokenizer.decode(got.tokens), got)
        else:
            counts["near ties"] += compare(ask, params, expected, got, kind)
        counts["sequences"] += 1
        counts["tokens"] += len(got.tokens)
    return counts


def main(steps: int, seed: int) -> dict[str, Any]:
    """Raises AssertionError at the first sequence that is not one rank's."""
    draw, begun = random.Random(seed), time.monotonic()
    load = pool(draw)
    want, (parts, asked) = reference(load), scripts(load, schedule(steps, len(load), draw))
    limits = {"chunked_prefill_size": 64, "num_pages": 13, "max_running_requests": 8, "max_steps_in_flight": 2}
    config = engine_config("dp4-ep4", **limits, **DRAFTING["nextn-3"], **EPLB)
    group = ProcessGroup(LAYOUTS["dp4-ep4"]["tp_size"], patience=3600.0)
    try:
        served = group.serve(msgspec.structs.replace(config, context_length=CONTEXT), parts, "drafter lost")
    finally:
        group.close()
    counts = count(served, load, want, asked)
    assert counts["near ties"] <= JUMPS * counts["sequences"], "too many to be rounding"
    ran = {rank.steps for rank in served}
    assert len(ran) == len({rank.checksum for rank in served}) == 1, "all ranks run the same passes"
    counts |= {"ranks": RANKS, "steps": ran.pop(), "preemptions": sum(rank.preemptions for rank in served)}
    counts |= {"cached": sum(rank.cached for rank in served), "accepted": sum(rank.accepted for rank in served)}
    counts["expert moves"] = sum(rank.expert_moves for rank in served)
    rare = [name for name in ("preemptions", "cached", "accepted", "expert moves") if not counts[name]]
    assert not rare and counts["steps"] > LOST_AT, f"nothing of {rare}, or too short to lose a drafter"
    command = f"python -m tests.soak.ranks --steps {steps} --seed {seed}"
    print(dict(counts), write("ranks", command, time.monotonic() - begun, counts).name)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12_500, help="at which the last requests come")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    main(args.steps, args.seed)
