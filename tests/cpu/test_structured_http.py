"""Structured output over HTTP: the examples of docs/structured-output.md, every field name, tools, reasoning, expensive
grammars.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.cpu.test_serve import Served, served
from tests.null.test_grammars import EXPENSIVE

PAGE = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\nPOST (\S+)\n(.*?)```", PAGE, re.S)
CHAT = {"model": "default", "messages": [{"role": "user", "content": "What is 12 + 34?"}], "temperature": 1.0}
SHAPE = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 999}, "sure": {"type": "boolean"}},
    "required": ["sum", "sure"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "strict": True, "parameters": SHAPE}},
    {"type": "function", "function": {"name": "give_up"}},
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("--enable-overlap-schedule", "--chunked-prefill-size", "96") as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(("path", "body"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples(api: httpx.Client, path: str, body: str) -> None:
    asked = json.loads(body)
    answer = ok(api.post(path, json=asked))
    if "tools" in asked:
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        wanted = asked["tools"][0]["function"]
        assert call["function"]["name"] == wanted["name"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), wanted["parameters"])
    elif "format" in asked.get("response_format", ()):
        assert re.fullmatch(r"<sum>\d\d?</sum>", answer["choices"][0]["text"])
    elif "response_format" in asked:
        schema = asked["response_format"]["json_schema"]["schema"]
        jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), schema)
    elif "choice" in asked:
        assert answer["choices"][0]["text"] in asked["choice"]
    elif "ebnf" in asked:
        assert re.fullmatch(r"\d\d?( \+ \d\d?)? =", answer["choices"][0]["text"])
    else:
        assert re.fullmatch(asked["sampling_params"]["regex"], answer["text"])


def test_the_python_example() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() in ("merry", "sad")


@pytest.mark.parametrize(
    "body",
    [
        {"json_schema": {"enum": ["aye"]}},
        {"json_schema": '{"enum": ["aye"]}'},
        {"guided_json": {"enum": ["aye"]}},
        {"structured_outputs": {"json": {"enum": ["aye"]}}},
        {"regex": '"aye"'},
        {"guided_regex": '"aye"'},
        {"structured_outputs": {"regex": '"aye"'}},
        {"ebnf": 'root ::= "\\"aye\\""'},
        {"guided_grammar": 'start: "\\"aye\\""'},
        {"structured_outputs": {"grammar": 'root ::= "\\"aye\\""'}},
        {"choice": ['"aye"']},
        {"guided_choice": ['"aye"']},
        {"structured_outputs": {"choice": ['"aye"']}},
    ],
    ids=lambda body: next(iter(body)),
)
def test_every_grammar_field_on_every_route(api: httpx.Client, body: dict[str, Any]) -> None:
    assert ok(api.post("/v1/completions", json={"prompt": "x", **body}))["choices"][0]["text"] == '"aye"'
    assert ok(api.post("/v1/chat/completions", json={**CHAT, **body}))["choices"][0]["message"]["content"] == '"aye"'
    assert ok(api.post("/generate", json={"text": "x", "sampling_params": body}))["text"] == '"aye"'
    many = ok(api.post("/generate", json={"text": ["x", "y"], **body}))
    assert [one["text"] for one in many] == ['"aye"'] * 2


def test_a_structural_tag_leaves_text_free(api: httpx.Client) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": SHAPE, "end": "</f>"}], "triggers": ["<f"]}
    ask = {"prompt": "Once upon", "temperature": 0, "max_tokens": 24}
    free = ok(api.post("/v1/completions", json=ask))["choices"][0]["text"]
    assert ok(api.post("/v1/completions", json={**ask, "structural_tag": tag}))["choices"][0]["text"] == free
    format_ = {"type": "structural_tag", **tag}
    assert ok(api.post("/v1/completions", json={**ask, "response_format": format_}))["choices"][0]["text"] == free


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_holds_after_the_reasoning(sdk: openai.OpenAI, thinking: bool, stream: bool) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SHAPE, "strict": True}}
    more = {"extra_body": {"chat_template_kwargs": {"thinking": thinking}}, "response_format": wanted, "seed": 5}
    ask: dict[str, Any] = {**CHAT, **more, "temperature": 0.3, "max_tokens": 300}
    if stream:
        deltas = [chunk.choices[0].delta for chunk in sdk.chat.completions.create(stream=True, **ask)]
        content = "".join(delta.content or "" for delta in deltas)
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    else:
        message = sdk.chat.completions.create(**ask).choices[0].message
        content, thought = message.content or "", getattr(message, "reasoning_content", None) or ""
    jsonschema.validate(json.loads(content), SHAPE)
    assert bool(thought) == thinking


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=["required", "named"]
)
def test_a_forced_call_follows_the_reasoning(sdk: openai.OpenAI, thinking: bool, choice: Any) -> None:
    ask: dict[str, Any] = {
        **CHAT,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "max_tokens": 400,
        "extra_body": {"chat_template_kwargs": {"thinking": thinking}},
    }
    for seed in range(3):
        answer = sdk.chat.completions.create(seed=seed, **ask).choices[0]
        assert answer.message.tool_calls and answer.finish_reason == "tool_calls" and not answer.message.content
        (call,) = answer.message.tool_calls
        assert call.type == "function" and call.function.name in ("add", "give_up")
        arguments = json.loads(call.function.arguments)
        if isinstance(choice, dict) or call.function.name == "add":
            assert call.function.name == "add"
            jsonschema.validate(arguments, SHAPE)
        else:
            assert arguments == {}
        parts: list[str] = []
        for chunk in sdk.chat.completions.create(seed=seed, stream=True, **ask):
            for part in chunk.choices[0].delta.tool_calls or ():
                parts.append(part.function.arguments or "" if part.function else "")
        assert json.loads("".join(parts)) == arguments


def test_auto_with_a_schema_is_a_call_or_the_schema(sdk: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SHAPE}}
    for seed in range(4):
        ask: dict[str, Any] = {**CHAT, "tools": TOOLS, "response_format": wanted, "max_tokens": 400, "seed": seed}
        message = sdk.chat.completions.create(parallel_tool_calls=False, **ask).choices[0].message
        if message.tool_calls:
            assert message.tool_calls[0].type == "function"
            assert message.tool_calls[0].function.name in ("add", "give_up")
        else:
            jsonschema.validate(json.loads(message.content or ""), SHAPE)


ASK = "What will the weather be in Oslo for 3 days?"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_in_auto_is_of_a_declared_tool(
    api: httpx.Client, sdk: openai.OpenAI, thinking: bool, stream: bool
) -> None:
    """Nothing here is strict. A bias makes the model begin a call, whatever it would rather do."""
    (mark,) = ok(api.post("/tokenize", json={"prompt": "｜DSML｜", "add_special_tokens": False}))["tokens"]
    tools: Any = [
        {"type": "function", "function": {"name": name, "parameters": SHAPE}} for name in ("zab.qu", "other-1")
    ]
    ask: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": ASK}], "tools": tools,
                           "logit_bias": {str(mark): 60}, "max_tokens": 300, "parallel_tool_calls": None,
                           "extra_body": {"chat_template_kwargs": {"thinking": thinking}}}  # fmt: skip
    for seed in range(3):
        if stream:
            with sdk.chat.completions.stream(seed=seed, **ask) as events:
                answer: Any = events.get_final_completion()
        else:
            answer = sdk.chat.completions.create(seed=seed, **ask)
        calls = answer.choices[0].message.tool_calls
        assert calls or answer.choices[0].finish_reason == "length"
        for call in calls if answer.choices[0].finish_reason == "tool_calls" else ():
            assert call.function.name in ("zab.qu", "other-1")
            jsonschema.validate(json.loads(call.function.arguments), SHAPE)


def test_calls_in_auto_can_be_free(api: httpx.Client) -> None:
    """Then they are what the model alone makes of the prompt."""
    tools = [{"type": "function", "function": {"name": "zab.qu", "parameters": SHAPE}}]
    ask = {"messages": [{"role": "user", "content": ASK}], "tools": tools, "temperature": 0, "max_tokens": 200}
    answers = [
        ok(api.post("/v1/chat/completions", json={**ask, "return_token_ids": True, **more}))["choices"][0]["token_ids"]
        for more in ({"tool_strict_level": "off"}, {"tool_strict_level": "parameter"})
    ]
    prompt = ok(api.post("/tokenize", json={"messages": ask["messages"], "tools": tools}))["tokens"]
    free = ok(api.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 200, "return_token_ids": True}))  # fmt: skip
    assert answers[0] == free["choices"][0]["token_ids"]
    assert api.post("/v1/chat/completions", json={**ask, "tool_strict_level": "most"}).status_code == 400


@pytest.mark.parametrize("disable", [None, True, False])
def test_json_is_compact_by_default(api: httpx.Client, disable: bool | None) -> None:
    """A bias towards spaces shows whether they may come."""
    space = ok(api.post("/tokenize", json={"prompt": " ", "add_special_tokens": False}))["tokens"][0]
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SHAPE}}
    body = {**CHAT, "response_format": wanted, "logit_bias": {str(space): 90}, "max_tokens": 200}
    if disable is not None:
        body["structured_outputs"] = {"disable_any_whitespace": disable}
    text = ok(api.post("/v1/chat/completions", json=body))["choices"][0]["message"]["content"]
    assert (" " in text) == (disable is False)


WRONG = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"regex": "a", "guided_json": {}}, "guided_json"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "regex"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"uniqueItems": True}}}
            ]
        }
        | {"tool_choice": "required"},
        "tools[0].function.parameters",
    ),
]


@pytest.mark.parametrize(("change", "param"), WRONG, ids=[param for _, param in WRONG])
def test_what_is_wrong_is_a_400_that_names_it(api: httpx.Client, change: dict[str, Any], param: str) -> None:
    answer = api.post("/v1/chat/completions", json={**CHAT, **change})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


PAIR = {
    **SHAPE,
    "properties": {**SHAPE["properties"], "pair": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}},
}
LOOSE = {**PAIR, "properties": {**PAIR["properties"], "pair": {**PAIR["properties"]["pair"], "uniqueItems": True}}}
PLACE = "#/properties/pair/uniqueItems"
WANTED = {"type": "json_schema", "json_schema": {"name": "sum", "schema": LOOSE}}
CALLING = {"type": "function", "function": {"name": "add", "parameters": LOOSE}}
ROUTES: dict[str, tuple[str, dict[str, Any], str]] = {  # path, body, the field that is named
    "chat": ("/v1/chat/completions", {**CHAT, "response_format": WANTED}, "response_format.json_schema.schema"),
    "chat tools": (
        "/v1/chat/completions",
        {**CHAT, "tools": [CALLING], "tool_choice": "required"},
        "tools[0].function.parameters",
    ),
    "completions": ("/v1/completions", {"prompt": "x", "guided_json": LOOSE}, "guided_json"),
    "responses": (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "sum", "schema": LOOSE}}},
        "text.format.schema",
    ),
    "messages": (
        "/v1/messages",
        {"messages": CHAT["messages"], "max_tokens": 60, "tool_choice": {"type": "any"}}
        | {"tools": [{"name": "add", "input_schema": LOOSE}]},
        "tools[0].input_schema",
    ),
    "generate": (
        "/generate",
        {"text": "x", "sampling_params": {"json_schema": json.dumps(LOOSE)}},
        "sampling_params.json_schema",
    ),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_is_not_enforced_is_named_in_the_answer(api: httpx.Client, route: str, stream: bool) -> None:
    path, body, field = ROUTES[route]
    answer = api.post(path, json={**body, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-thalweg-unenforced"] == field + PLACE
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    first = events[0] if stream else answer.json()
    holder = first.get("message") or first.get("response") or first.get("meta_info") or first
    (warning,) = holder["warnings"]
    assert warning.startswith(f"{field}{PLACE} ") and ("'add'" in warning) == ("tools" in field)
    assert path == "/generate" or sum("warnings" in json.dumps(event) for event in events[1:]) in (0, 2), "once"


def test_nothing_is_named_where_all_is_enforced(api: httpx.Client) -> None:
    answer = api.post("/v1/completions", json={"prompt": "x", "guided_json": PAIR})
    assert "x-thalweg-unenforced" not in answer.headers and "warnings" not in ok(answer)


def strict(value: Any) -> Any:
    """The body with `strict` wherever it can be."""
    if isinstance(value, dict):
        value = {key: strict(member) for key, member in value.items()}
        return value | (
            {"strict": True}
            if {"schema", "name"} <= value.keys() or {"parameters", "input_schema"} & value.keys()
            else {}
        )
    return [strict(member) for member in value] if isinstance(value, list) else value


@pytest.mark.parametrize("route", ["chat", "chat tools", "responses", "messages"])
def test_strict_refuses_what_is_not_enforced(api: httpx.Client, route: str) -> None:
    path, body, field = ROUTES[route]
    answer = api.post(path, json=strict(body))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error.get("param", field) == field, answer.text
    assert field in error["message"] and PLACE in error["message"]
    assert ("'add'" in error["message"]) == ("tools" in field)


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_only_allowed_tools_are_called(api: httpx.Client, route: str, mode: str) -> None:
    if route == "/v1/responses":
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "give_up"}]}
        body: dict[str, Any] = {"input": "What is 12 + 34?", "tools": tools, "tool_choice": choice}
    else:
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "give_up"}}]}
        body = {**CHAT, "tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    called = 0
    for seed in range(4):
        answer = ok(api.post(route, json={**body, "seed": seed, "temperature": 0.5}))
        if route == "/v1/responses":
            names = [item["name"] for item in answer["output"] if item["type"] == "function_call"]
            prompt = answer["usage"]["input_tokens"]
        else:
            names = [call["function"]["name"] for call in answer["choices"][0]["message"].get("tool_calls") or ()]
            prompt = answer["usage"]["prompt_tokens"]
        assert set(names) <= {"give_up"}
        called += bool(names)
    assert called == 4 or mode == "auto"
    everything = ok(api.post(route, json={**body, "tool_choice": "auto", "max_output_tokens": 1, "max_tokens": 1}))
    assert prompt in everything["usage"].values(), "the prompt has all tools"


@pytest.mark.parametrize(
    ("allowed", "param"),
    [
        ({"mode": "auto", "tools": []}, "tool_choice"),
        (
            {"mode": "never", "tools": [{"type": "function", "function": {"name": "add"}}]},
            "tool_choice.allowed_tools.mode",
        ),
        ({"tools": [{"type": "function", "function": {"name": "x"}}]}, "tool_choice.allowed_tools.tools[0]"),
        ({"tools": [{"type": "custom"}]}, "tool_choice.allowed_tools.tools[0]"),
    ],
)
def test_allowed_tools_that_there_are_not(api: httpx.Client, allowed: Any, param: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = api.post("/v1/chat/completions", json={**CHAT, "tools": TOOLS, "tool_choice": choice})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_structural_tag_of_the_new_form(api: httpx.Client) -> None:
    tag = {"type": "tag", "begin": "<sum>", "content": {"type": "json_schema", "json_schema": SHAPE}, "end": "</sum>"}
    form = {"type": "structural_tag", "format": tag}
    for body in {"response_format": form}, {"structural_tag": form}, {"structured_outputs": {"structural_tag": form}}:
        text = ok(api.post("/v1/completions", json={"prompt": "x", "max_tokens": 200, **body}))["choices"][0]["text"]
        jsonschema.validate(json.loads(text.removeprefix("<sum>").removesuffix("</sum>")), SHAPE)
    wrong = {"type": "structural_tag", "format": {**tag, "content": {"type": "poem"}}}
    answer = api.post("/v1/completions", json={"prompt": "x", "response_format": wrong})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "response_format.format.content.type"


def test_expensive_grammars_are_refused_while_a_stream_goes_on(api: httpx.Client, server: Served) -> None:
    names = {"json_schema": "json_schema", "regex": "regex", "ebnf": "ebnf", "structural_tag": "structural_tag"}
    arrivals: list[float] = []
    begun, ended = threading.Event(), threading.Event()

    def flow() -> None:
        body = {"prompt": "My lord,", "max_tokens": 800, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=60) as client:
            with client.stream("POST", server.url + "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if line:
                        arrivals.append(time.monotonic())
                        begun.set()
        ended.set()

    thread = threading.Thread(target=flow, daemon=True)
    thread.start()
    assert begun.wait(30)
    for grammar in EXPENSIVE.values():
        if grammar.kind in names:
            started = time.monotonic()
            answer = api.post("/v1/completions", json={"prompt": "x", names[grammar.kind]: grammar.source})
            assert answer.status_code == 400 and time.monotonic() - started < 6.0, answer.text
            assert answer.json()["error"]["param"].startswith(names[grammar.kind])
    overlapped = not ended.is_set()
    thread.join(60)
    gaps = [b - a for a, b in zip(arrivals, arrivals[1:], strict=False)]
    assert overlapped and len(arrivals) >= 600 and max(gaps) < 3.0, (overlapped, len(arrivals), max(gaps))
