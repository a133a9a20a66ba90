"""Every field of a generating route's body, set to another value, changes what the engine gets or what the client
gets.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.cpu.fakes import FakeFront, fake_app
from thalweg.server.app import ROUTES
from thalweg.server.protocol import NativeSampling

FRONT = FakeFront(chunk=4096)
CLIENT = TestClient(fake_app(FRONT))
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {}}}
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 200},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 200},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 200},
    "/generate": {"text": "Once"},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
VALUES: list[Any] = [
    *(True, False, 0, 1, 2, 7, 0.25, "e", "r1", "low", "none", ["e"], [9], "[a-c]+", 'root ::= "a"', {"5": 1.0}),
    *({"include_usage": True}, {"thinking": True}, {"type": "enabled"}, {"effort": "low"}, {"a": "b"}, {"regex": "a"}),
    *({"type": "json_object"}, SCHEMA, {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}),
    *({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, {"max_new_tokens": 3}, "required"),
    *([{"type": "function", "function": TOOL}], [{"type": "function", **TOOL}], [{"name": "f", "input_schema": SCHEMA}]),
    *({"type": "any"}, {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}, "disabled", "right"),
    *("Be brief.", [5, 6], "auto", ["reasoning.encrypted_content"], "off", {"type": "structural_tag", "structures": [], "triggers": []}),
]  # fmt: skip
WITH: dict[str, dict[str, Any]] = {  # fields that need others
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
    "top_logprobs_num": {"return_logprob": True},
    "logprob_start_len": {"return_logprob": True},
    "return_text_in_logprobs": {"return_logprob": True},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [{"type": "function", "function": TOOL}]},
    "parallel_tool_calls": {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
    "tool_strict_level": {"tools": [{"type": "function", "function": TOOL}]},
    "separate_reasoning": {"chat_template_kwargs": {"thinking": True}},
    "continue_final_message": {"messages": [*MESSAGES, {"role": "assistant", "content": "So"}], "add_generation_prompt": False},
    "min_tokens": {"max_tokens": 20},
    "max_new_tokens": {"max_tokens": None},
    "/v1/completions return_tokens_as_token_ids": {"logprobs": 1},
    "/v1/completions logprob_token_ids": {"logprobs": 1},
    "/v1/chat/completions logprob_token_ids": {"logprobs": True},
    "/v1/chat/completions return_tokens_as_token_ids": {"logprobs": True},
    "truncation_side": {"truncate_prompt_tokens": 2},
    "thinking_token_budget": {"chat_template_kwargs": {"thinking": True}},
    "include_reasoning": {"chat_template_kwargs": {"thinking": True}},
    "/v1/chat/completions echo": {
        "messages": [*MESSAGES, {"role": "assistant", "content": "So"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}  # fmt: skip
TOOLS_OF = {"/v1/responses": [{"type": "function", **TOOL}], "/v1/messages": [{"name": "f", "input_schema": SCHEMA}]}
NO_EFFECT = {
    "user",
    "model",
    "best_of",
    "metadata",
    "truncation",
    "include",
    "store",
    "rid",
    "previous_response_id",
    "input_ids",
}

NOT_SEEN = {
    ("/v1/chat/completions", "skip_special_tokens"),  # parsers of answers need the tokens
    ("/v1/completions", "add_special_tokens"),  # the tokenizer here has none
}


def fields() -> list[tuple[str, str]]:
    bodies = {route.path: route.body for route in ROUTES if route.path in BASES}
    found = [
        (path, field)
        for path, body in bodies.items()
        if body is not None
        for field in body.__struct_fields__
        if (path, field) not in NOT_SEEN
        if field not in (*BASES[path], *NO_EFFECT, *getattr(body, "REFUSED", ()))
    ]
    unseen = (*NativeSampling.REFUSED, "stream_interval")  # the number of a stream's events
    native = [name for name in NativeSampling.__struct_fields__ if name not in unseen]
    return found + [("/generate", f"sampling_params.{name}") for name in native]


def observed(path: str, body: dict[str, Any]) -> Any:
    """The status; what the engine got, and the response without ids and times."""
    for calls in (FRONT.seen, FRONT.grammars, FRONT.keeps):
        calls.clear()
    answer = CLIENT.post(path, content=json.dumps(body))
    text = answer.text
    if answer.status_code == 200 and not answer.headers["content-type"].startswith("text/event-stream"):
        text = json.dumps(_without_ids(answer.json()))
    engine = [(prompt, params, priority, salt) for prompt, params, _, priority, salt in FRONT.seen]
    shape = text if answer.headers["content-type"].startswith("application/json") else "stream" + str("usage" in text)
    return answer.status_code, repr((engine, FRONT.grammars, FRONT.keeps, shape)), text


def _without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        dropped = ("id", "created", "created_at", "completed_at", "e2e_latency", "call_id", "encrypted_content")
        return {key: _without_ids(item) for key, item in value.items() if key not in dropped}
    return [_without_ids(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path, field", fields())
def test_a_field_changes_what_the_engine_or_the_client_gets(path: str, field: str) -> None:
    outer, _, inner = field.rpartition(".")
    base = BASES[path] | WITH.get(field, {}) | WITH.get(f"{path} {field}", {})
    if "tools" in base and path in TOOLS_OF:
        base |= {"tools": TOOLS_OF[path]}
    status, before, text = observed(path, base)
    assert status == 200, text
    errors = []
    for value in VALUES:
        status, after, text = observed(path, base | ({outer: {inner: value}} if outer else {field: value}))
        if status == 200 and after != before:
            return
        errors.append(f"{value!r}: {status} {text[:150]}")
    raise AssertionError(f"{path} {field} has no effect:\n" + "\n".join(errors))
