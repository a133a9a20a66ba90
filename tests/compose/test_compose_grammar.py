"""Grammars with every other feature: half of the requests have one. Each case gives the plain engine's tokens, and
finished outputs are valid.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.compose.covering import covering
from tests.compose.matrix import DRAFTING, MODEL, SCHEDULING, SEED, compare, settings
from tests.compose.workload import Answer, Ask, take, workload
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.sampling import SamplingParams
from thalweg.engine.local import LocalEngine, choice_params
from thalweg.text.tokenizer import Tokenizer

COLUMNS: dict[str, list[Any]] = {
    "grammar": ["json_schema", "regex", "triggered"],  # none is test_compose.py
    "chunked_prefill_size": [48, 2048],
    "max_steps_in_flight": [1, 2],
    "radix_cache": [True, False],
    "num_pages": [7, 200],
    "max_running_requests": [3, 16],
    "kind": ["greedy", "seeded", "penalised"],
    "logprobs": [True, False],
    "n": [1, 2],
    "drafts": ["none", "nextn-tree", "adaptive"],
}
CASES = covering(COLUMNS, SEED)
SCHEMA = {"type": "array", "items": {"enum": ["aye", "nay", 7]}, "minItems": 10, "maxItems": 13}
WORDS = r"([a-d]{2,4} ){10,15}\."
TRIGGER = Tokenizer(Path(MODEL)).encode(",", False)[0]
GRAMMARS = {
    "triggered": Grammar("regex", r"[a-d]{2,4}!", trigger_id=TRIGGER),
    "none": NO_GRAMMAR,
    "json_schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "regex": Grammar("regex", WORDS),
}


def crowd(engine: LocalEngine, case: dict[str, Any]) -> list[tuple[Ask, Grammar]]:
    """Every second request of the workload is under the grammar; its end is the grammar's."""
    prompt_logprobs = case.get("prompt_logprobs", False)
    asks = workload(SEED, engine.vocab, case["kind"], case["logprobs"], prompt_logprobs, case["n"])
    grammar, held = GRAMMARS[case["grammar"]], []
    for i, ask in enumerate(asks):
        if grammar.is_set and i % 2 == 0:
            params = msgspec.structs.replace(ask.params, ignore_eos=False, max_tokens=180)
            held.append((replace(ask, params=params), grammar))
        else:
            held.append((ask, NO_GRAMMAR))
    return held


def serve(engine: LocalEngine, asked: list[tuple[Ask, Grammar]]) -> list[Answer]:
    """Runs them as they arrive; one Answer a sequence, in the order of the requests and their choices."""
    answers: dict[int, Answer] = {}
    order: list[int] = []
    waiting, turn = sorted(range(len(asked)), key=lambda i: asked[i][0].turn), 0
    uids: dict[int, tuple[int, ...]] = {}
    while waiting or not engine.idle:
        while waiting and asked[waiting[0]][0].turn <= turn:
            i = waiting.pop(0)
            ask, grammar = asked[i]
            uids[i] = engine.submit(ask.prompt, ask.params, grammar=grammar)
            answers |= {uid: Answer([], [], []) for uid in uids[i]}
        for delta in engine.step():
            take(answers[delta.uid], delta)
        turn += 1
    for i in range(len(asked)):
        order += uids[i]
    return [answers[uid] for uid in order]


@cache
def plain(kind: str, n: int, grammar: str) -> list[Answer]:
    """The reference: each request alone, whole prompts, no prefix cache, plenty of pages, depth 1."""
    engine = LocalEngine(
        settings(
            chunked_prefill_size=4096, max_steps_in_flight=1, radix_cache=False, num_pages=200, max_running_requests=16
        )
    )
    asked = crowd(engine, {"kind": kind, "n": n, "grammar": grammar, "logprobs": True})
    return [answer for one in asked for answer in serve(engine, [one])]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{value}" for value in case.values()))
def test_every_pair_gives_the_plain_engines_tokens(case: dict[str, Any]) -> None:
    fields = {name: value for name, value in case.items() if name in SCHEDULING}
    engine = LocalEngine(settings(**fields, **DRAFTING[case["drafts"]]))
    asked, reference = crowd(engine, case), plain(case["kind"], case["n"], case["grammar"])
    sequences = [(ask, grammar, choice_params(ask.params, i)) for ask, grammar in asked for i in range(ask.params.n)]
    jumped: set[int] = set()  # n siblings jump together
    tokenizer = Tokenizer(Path(MODEL))
    for (ask, grammar, params), want, got in zip(sequences, reference, serve(engine, asked), strict=True):
        if not grammar.is_set:
            if compare(ask, params, want, got, case["kind"]):
                jumped.add(id(ask))
            continue
        if got.tokens != want.tokens:  # a near tie among the few tokens that the grammar leaves
            jumped.add(id(ask))
        if grammar.trigger_id < 0:
            check(grammar, params, tokenizer.decode(got.tokens), got)
        elif TRIGGER in got.tokens and got.finish == "stop":
            assert re.fullmatch(grammar.source, tokenizer.decode(got.tokens[got.tokens.index(TRIGGER) + 1 :]))
    assert len(jumped) <= 2, f"{len(jumped)} requests left the reference: too many to be rounding"
    allocator = engine.loop.scheduler.allocator
    assert allocator.num_available() == allocator.num_pages, "a page did not come home"


def check(grammar: Grammar, params: SamplingParams, text: str, got: Answer) -> None:
    assert got.finish == "stop" or len(got.tokens) == params.max_tokens
    if got.finish == "stop" and grammar.kind == "json_schema":
        jsonschema.validate(json.loads(text), SCHEMA)
    elif got.finish == "stop":
        assert re.fullmatch(WORDS, text)


def test_the_mixed_load_preempts_under_a_grammar() -> None:
    """The column is worth nothing if it never bites."""
    engine = LocalEngine(
        settings(chunked_prefill_size=2048, max_steps_in_flight=2, num_pages=7, max_running_requests=16)
    )
    case = {"kind": "seeded", "n": 1, "grammar": "json_schema", "logprobs": False}
    answers = serve(engine, crowd(engine, case))
    assert engine.loop.stats().preemptions > 0
    assert sum(answer.finish == "stop" for answer in answers) >= 4
