"""Conversations with reasoning: the second turn's prefix hit is exactly what its token ids allow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cpu.fakes import FakeFront, fake_app, serving
from thalweg.core.plan import PAGE
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams
from thalweg.llm import LLM, RequestOutput
from thalweg.llm.prompts import TextFrontend
from thalweg.text.parser import AnswerParser
from tools.fuzz_checks import collect

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "tiny")
GREEDY = SamplingParams(temperature=0.0, max_tokens=200, skip_special_tokens=False)
SUM = [{"role": "user", "content": "What is 347 + 586?"}]
DICE = [{"role": "user", "content": "Throw 16 dice of 24 sides each."}]
PARAMETERS = {"type": "object", "properties": {"dice": {"type": "integer"}, "sides": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "roll_dice", "description": "Throw dice", "parameters": PARAMETERS}}]


def padded(messages: Sequence[dict[str, str]], words: int) -> list[dict[str, str]]:
    """With a system message in front: where in its page the prompt ends is the test's choice."""
    return [{"role": "system", "content": "a " * words}, *messages]


def message(result: RequestOutput, thinking: bool, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The answer as a client sends it back."""
    parser = AnswerParser("deepseek-v3", "deepseekv32", inside=thinking, offered=bool(tools), hold=True)
    found = collect([*parser.feed(result.outputs[0].text), *parser.finish()])
    calls = [
        {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in found.calls
    ]
    said = {"role": "assistant", "content": found.content or "", "reasoning_content": found.reasoning or ""}
    return said | ({"tool_calls": calls} if calls else {})


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture(scope="module")
def loaded() -> LLM:
    return LLM(MODEL, max_total_tokens=48 * PAGE, max_running_requests=4)


@pytest.fixture(scope="module", params=[None, True, False], ids=["auto", "on", "off"])
def llm(loaded: LLM, request: pytest.FixtureRequest) -> LLM:
    """One engine; the option is the business of those who ask it."""
    loaded.texts = TextFrontend(MODEL, {"strip_thinking_cache": request.param}, progress=False)
    return loaded


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("pad", [0, 47, 110])  # 47: the prompt ends with its page, the tag that opens the thought last
def test_the_second_turn_hits_what_it_can(llm: LLM, pad: int, thinking: bool) -> None:
    assert pad != 47 or len(llm.texts.render(padded(SUM, pad), (), {"thinking": thinking}).ids) == PAGE
    turns(llm, padded(SUM, pad), thinking, [])


def test_a_call_and_its_thought_stay_for_the_results_and_go_with_the_next_question(llm: LLM) -> None:
    """The call, its result, and then another question."""
    turns(llm, padded(DICE, 40), True, TOOLS)


def turns(llm: LLM, messages: list[dict[str, Any]], thinking: bool, tools: list[dict[str, Any]]) -> None:
    llm.engine.flush_cache()
    llm.engine.step()
    strips = thinking and bool(llm.texts.retention.strips)
    kept: list[tuple[int, ...]] = []  # what the cache holds
    for turn in range(3):
        result = llm.chat(messages, GREEDY, thinking=thinking, tools=tools)[0]
        prompt, out = tuple(result.prompt_token_ids), tuple(result.outputs[0].token_ids)
        most = max((shared(tokens, prompt) for tokens in kept), default=0)
        assert result.num_cached_tokens == min(most, len(prompt) - 1) // PAGE * PAGE
        answer = message(result, thinking, tools)
        calls = answer.get("tool_calls")
        assert not tools or turn == 2 or bool(calls) == (turn == 0), "the bundled model answers after a result"
        kept.append(prompt if strips and not calls else (prompt + out)[:-1])
        distinct = {tokens[:end] for tokens in kept for end in range(PAGE, len(tokens) + 1, PAGE)}
        assert llm.engine.loop.scheduler.stats(0.0).pages_cached == len(distinct)
        results = [{"role": "tool", "content": "43", "tool_call_id": call["id"]} for call in calls or ()]
        question = [] if calls else [{"role": "user", "content": "What is 12 + 99?"}]
        messages = [*messages, answer, *results, *question]


def test_the_choice_is_told_with_its_reason(llm: LLM) -> None:
    (told,) = [one for one in llm.texts.resolved.decisions if one.name == "strip_thinking_cache"]
    assert told.value is llm.texts.retention.strips
    if llm.texts.format.strip is None:
        assert (told.source, told.reason) == ("auto", "the chat template drops the thoughts of earlier turns")
    else:
        assert (told.source, told.value) == ("user", llm.texts.format.strip)


def test_a_template_argument_of_one_request_counts_for_it_alone(llm: LLM) -> None:
    thinks = llm.texts.render(SUM, chat_template_kwargs={"thinking": True})
    assert thinks.retention.keeps_thoughts is not llm.texts.retention.strips
    assert llm.texts.render(SUM).retention == RETAIN_ALL


def test_the_server_tells_the_engine() -> None:
    front = FakeFront()
    think = {"chat_template_kwargs": {"thinking": True}}
    with serving(fake_app(front)) as url, httpx.Client(base_url=url, timeout=30) as api:
        for more in ({}, think, think | {"tools": TOOLS}):
            assert api.post("/v1/chat/completions", json={"messages": SUM, "max_tokens": 4} | more).status_code == 200
        body = {"messages": SUM, "max_tokens": 4, "thinking": {"type": "enabled", "budget_tokens": 1024}}
        assert api.post("/v1/messages", json=body | {"model": "scripted"}).status_code == 200
        assert api.post("/v1/completions", json={"prompt": "a", "max_tokens": 4}).status_code == 200
        assert api.get("/server_info").json()["strip_thinking_cache"] is True
    assert front.keeps == [RETAIN_ALL, CacheRetention(False), CacheRetention(False), CacheRetention(False), RETAIN_ALL]
