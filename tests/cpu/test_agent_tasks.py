"""Made-up conversations with tools: what the chat template makes of them reads back as the same calls, which fit their
schemas.
"""

from __future__ import annotations

import collections
import json
from random import Random
from typing import Any

import jsonschema
import pytest

from thalweg.bench.agent_tasks import Maker, ToolConversation, answer_to
from thalweg.bench.tasks import make_items, score
from thalweg.text.chat import builtin
from tools.fuzz_checks import parse
from tools.train_tiny.tokenizer import ASSISTANT, EOS

COUNT = 200
Call = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def talks() -> list[ToolConversation]:
    maker = Maker(Random(7))
    return [maker.draw() for _ in range(COUNT)]


def calls_of(message: dict[str, Any]) -> list[Call]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def schemas_of(talk: ToolConversation) -> dict[str, Any]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in talk.tools}


def answers_of(text: str) -> list[str]:
    """What the assistant says in each turn: after a question, or after results."""
    return [part.rpartition(f"{ASSISTANT}</think>")[2].rpartition("</function_results>\n\n</think>")[2]
            for part in text.split(EOS)[:-1]]  # fmt: skip


def test_rendered_conversations_parse_back(talks: list[ToolConversation]) -> None:
    for talk in talks:
        text = builtin("deepseek-v32").encode(talk.messages, list(talk.tools) or None, thinking=False)
        said = [message for message in talk.messages if message["role"] == "assistant"]
        answers = answers_of(text)
        assert len(answers) == len(said)
        for answer, message in zip(answers, said, strict=True):
            parsed = parse(answer, None, "deepseekv32", functions=[tool["function"] for tool in talk.tools])
            found = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
            assert found == calls_of(message) and (parsed.content or "") == message["content"]
            assert json.dumps(found) == json.dumps(calls_of(message)), "the types are the same too"


def test_arguments_fit_their_schemas(talks: list[ToolConversation]) -> None:
    for talk in talks:
        schemas = schemas_of(talk)
        for schema in schemas.values():
            jsonschema.Draft202012Validator.check_schema(schema)
        said = [message for message in talk.messages if message["role"] == "assistant"][talk.given :]
        for name, arguments in (call for message in said for call in calls_of(message)):
            jsonschema.Draft202012Validator({"additionalProperties": False, **schemas[name]}).validate(arguments)
            assert list(arguments) == [key for key in schemas[name]["properties"] if key in arguments], "in order"


def test_a_shaped_answer_is_compact_json_of_its_schema() -> None:
    maker = Maker(Random(3))
    shown = 0
    for _ in range(COUNT):
        talk = maker.shaped()
        answer = talk.messages[-1]["content"]
        value = json.loads(answer)
        assert answer == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        shown += talk.response_format is not None
        if talk.response_format is not None:
            jsonschema.Draft202012Validator(talk.response_format).validate(value)
    assert 0.45 < shown / COUNT < 0.75


def test_every_loop_ends_and_uses_its_results(talks: list[ToolConversation]) -> None:
    used = 0
    for talk in talks:
        last, before = talk.messages[-1], talk.messages[-2]
        assert last["role"] == "assistant", "the assistant has the last word"
        if before["role"] == "tool" and not last.get("tool_calls"):
            assert before["content"] in last["content"] or "This is the" in last["content"] or before["content"] == ""
            used += 1
    assert used > COUNT / 2


def test_the_mixture_has_every_case() -> None:
    maker = Maker(Random(11))
    counts, names = collections.Counter[str](), set[str]()
    for _ in range(800):
        talk = maker.draw()
        schemas = schemas_of(talk)
        names |= set(schemas)
        counts[f"{len(schemas)} tools"] += 1
        counts["parallel"] += any(len(message.get("tool_calls", ())) > 1 for message in talk.messages)
        roles = "".join(message["role"][0] for message in talk.messages)
        counts["steps"] += "atat" in roles
        counts["no call"] += "ua" in roles and not any(message.get("tool_calls") for message in talk.messages)
        counts["final_result"] += "final_result" in schemas
        counts["handoff"] += any(name.startswith("transfer_to_") for name in schemas)
        kinds = {json.dumps(member.get("type", "anyOf")) for schema in schemas.values() for member in schema["properties"].values()}  # fmt: skip
        counts.update(f"type {kind}" for kind in kinds)
        counts["strict"] += any(tool["function"].get("strict") is True for tool in talk.tools)
    assert all(counts[f"{n} tools"] > 10 for n in range(1, 7)) and counts["0 tools"] < 60
    for case in ("parallel", "steps", "no call", "final_result", "handoff", "strict"):
        assert counts[case] > 15, case
    for kind in ('"string"', '"integer"', '"number"', '"boolean"', '"array"', '"object"', '"anyOf"'):
        assert counts[f"type {kind}"] > 50, kind
    assert len(names) > 1300, "names are random"


def test_answers_repeat_results_as_they_are() -> None:
    assert answer_to(['{"n":1}']) == 'The result is {"n":1}.'
    assert answer_to(["Sunny, 21 C", "", "3"]) == 'The results are "Sunny, 21 C", empty and 3.'


def test_a_wrong_turn_is_wrong() -> None:
    for item in make_items("agents", "held_out", 60, seed=2):
        assert score(item, item.target)
        assert not score(item, item.target + " More.") and not score(item, item.target[:-1])
