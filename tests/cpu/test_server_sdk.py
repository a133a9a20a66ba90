"""The official OpenAI SDK against the server over HTTP, with a scripted model behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import openai
import pytest

from tests.cpu.fakes import DEEPSEEK_V32, FakeFront, Script, fake_app, serving
from tests.cpu.sdk_checks import CHECKS, MESSAGES
from thalweg.config.server import ServerOptions
from thalweg.text.chat import ChatEncoder, ChatFormat, ParserNames
from thalweg.text.template import Template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALLS = (
    'I will look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="place"'
    ' string="true">Köln</｜DSML｜parameter>\n<｜DSML｜parameter name="days"'
    ' string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter'
    ' name="place" string="true">Ulm</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)


@contextmanager
def client_of(
    script: Script | None = None, chunk: int = 1, chat: ChatFormat = DEEPSEEK_V32, **options: object
) -> Iterator[tuple[openai.OpenAI, FakeFront]]:
    front = FakeFront() if script is None else FakeFront(script, chunk=chunk)
    with serving(fake_app(front, ServerOptions(**options), chat)) as url:  # type: ignore[arg-type]
        with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
            yield client, front


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with client_of() as (client, _):
        yield client


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_sdk(client: openai.OpenAI, check: Callable[[openai.OpenAI, str], None]) -> None:
    check(client, "scripted")


def test_reasoning_is_apart_from_the_answer() -> None:
    with client_of(lambda prompt, choice: "It is a sum: 2 + 2.</think>Four.") as (client, front):
        ask = {"model": "scripted", "messages": MESSAGES, "extra_body": {"chat_template_kwargs": {"thinking": True}}}
        message = client.chat.completions.create(**ask).choices[0].message
        assert (message.model_extra["reasoning_content"], message.content) == ("It is a sum: 2 + 2.", "Four.")
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **ask)]
        thoughts = [(delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas]
        assert "".join(thoughts) == "It is a sum: 2 + 2." and thoughts.count("") < len(thoughts) - 5
        assert "".join(delta.content or "" for delta in deltas) == "Four."
        assert bytes(front.seen[0][0]).decode().endswith("<think>")

        ask["extra_body"] |= {"separate_reasoning": False}
        raw = client.chat.completions.create(**ask).choices[0].message
        assert raw.content == "It is a sum: 2 + 2.</think>Four." and not (raw.model_extra or {})["reasoning_content"]
        ask["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
        assert client.chat.completions.create(**ask).choices[0].message.content == "It is a sum: 2 + 2.</think>Four."
        assert bytes(front.seen[-1][0]).decode().endswith("</think>")


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_tool_calls(chunk: int) -> None:
    with client_of(lambda prompt, choice: CALLS, chunk) as (client, front):
        ask = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS}
        choice = client.chat.completions.create(**ask).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I will look."
        calls = choice.message.tool_calls
        assert [call.function.name for call in calls] == ["weather", "weather"] and calls[0].id != calls[1].id
        assert [json.loads(call.function.arguments) for call in calls] == [
            {"place": "Köln", "days": 2},
            {"place": "Ulm"},
        ]
        assert '"name": "weather"' in bytes(front.seen[0][0]).decode()

        content, names, arguments, ends = "", [], ["", ""], []
        for chunk in client.chat.completions.create(stream=True, **ask):
            delta = chunk.choices[0].delta
            content += delta.content or ""
            ends += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
            assert len(delta.tool_calls or []) <= 1, "some clients read the first call of a chunk only"
            for call in delta.tool_calls or []:
                names += [call.function.name] if call.function.name else []
                arguments[call.index] += call.function.arguments or ""
        assert content == "I will look." and names == ["weather", "weather"] and ends == ["tool_calls"]
        assert list(map(json.loads, arguments)) == [{"place": "Köln", "days": 2}, {"place": "Ulm"}]

        history = [*MESSAGES, choice.message.model_dump(exclude_none=True)]
        history += [{"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in calls]
        client.chat.completions.create(model="scripted", messages=history, tools=TOOLS)
        assert "<result>sun</result>" in bytes(front.seen[-1][0]).decode()

        ask["max_tokens"] = len(CALLS.partition("ln")[0].encode())  # each byte is a token
        cut = client.chat.completions.create(**ask).choices[0]
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **ask)]
        streamed = [call.function.arguments or "" for one in chunks for call in one.delta.tool_calls or ()]
        assert cut.message.tool_calls[0].function.arguments == "".join(streamed) == '{"place": "Kö'
        assert cut.finish_reason == chunks[-1].finish_reason == "length" and cut.message.content == "I will look."
        del ask["max_tokens"]

        plain = client.chat.completions.create(tool_choice="none", **ask).choices[0]
        assert plain.finish_reason == "stop" and not plain.message.tool_calls
        assert "DSML" not in plain.message.content and "Köln" in plain.message.content, "no call, and nothing lost"
        assert '"name": "weather"' not in bytes(front.seen[-1][0]).decode()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": "perhaps", "tools": TOOLS}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "nothing"}}, "tools": TOOLS},
            "tool_choice.function.name",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"functions": [{"name": "weather"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_honoured_is_refused_by_name(client: openai.OpenAI, change: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**{"model": "scripted", "messages": MESSAGES, **change})
    assert bad.value.param == param and bad.value.type == "invalid_request_error"


def test_harmless_fields_are_ignored(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted",
        messages=MESSAGES,  # type: ignore[arg-type]
        user="me",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        modalities=["text"],
        response_format={"type": "text"},
        reasoning_effort="none",
        parallel_tool_calls=True,
        tool_choice="auto",
        extra_body={"made_up": [1, 2], "lora_path": None, "use_beam_search": False},
    )
    assert answer.choices[0].message.content


def test_engine_death_reaches_the_sdk() -> None:
    with client_of() as (client, front):
        front.gap = 0.05
        stream = client.completions.create(model="scripted", prompt="x", max_tokens=40, stream=True)
        next(stream)
        front.die("the engine process ended with exit code -9")
        with pytest.raises(openai.APIError, match="exit code -9"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="exit code -9") as dead:
            client.completions.create(model="scripted", prompt="x")
        assert dead.value.status_code == 503 and dead.value.code == "engine_dead"


def chat_with(template: str, names: ParserNames) -> ChatFormat:
    return ChatFormat(ChatEncoder("jinja", {"default": Template(template, {})}, "tools" in template), names, "test")


GLM = "{{ tools }}{{ messages[-1].content }}<think></think>"


@pytest.mark.parametrize("reasoning", ["deepseek-r1", "deepseek-v3", "qwen3", "glm45"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_closed_its_thought_is_outside_it(reasoning: str, stream: bool) -> None:
    script = "\n".join(("Look.", "<tool_call>weather", "<arg_key>place</arg_key>", "<arg_value>Köln</arg_value>"))
    with client_of(lambda *_: script + "\n</tool_call>", chat=chat_with(GLM, ParserNames(reasoning, "glm45"))) as made:
        ask = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS}
        if stream:
            with made[0].chat.completions.stream(**ask) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = made[0].chat.completions.create(**ask).choices[0]
        assert choice.message.content == "Look." and not (choice.message.model_extra or {}).get("reasoning_content")
        (call,) = choice.message.tool_calls or ()
        assert json.loads(call.function.arguments) == {"place": "Köln"} and choice.finish_reason == "tool_calls"


def test_tools_that_no_parser_reads_are_a_400() -> None:
    with client_of(chat=chat_with("{{ tools }}{{ messages[-1].content }}", ParserNames(None, None))) as (client, _):
        ask = {"model": "scripted", "messages": MESSAGES, "tools": TOOLS}
        with pytest.raises(openai.BadRequestError, match="no parser knows the calls .* --chat-template"):
            client.chat.completions.create(**ask)
        assert client.chat.completions.create(**ask, tool_choice="none").choices[0].message.content


@pytest.mark.parametrize(
    ("extra", "opens"),
    [
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high", "thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"thinking": True}}, False),
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, False),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, True),
    ],
)
def test_deepseeks_switch_of_thinking(extra: dict[str, object], opens: bool) -> None:
    with client_of() as (client, front):
        client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=3, extra_body=extra)
        assert bytes(front.seen[0][0]).decode().endswith("<think>" if opens else "</think>")


def test_a_last_message_with_prefix_is_continued() -> None:
    with client_of() as (client, front):
        begun = [*MESSAGES, {"role": "assistant", "content": "The answer is", "prefix": True}]
        client.chat.completions.create(model="scripted", messages=begun, max_tokens=3)
        assert bytes(front.seen[0][0]).decode().endswith("The answer is")
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].prefix"):
            client.chat.completions.create(model="scripted", messages=[{**MESSAGES[0], "prefix": True}, *begun])


def test_a_completion_without_special_tokens() -> None:
    with client_of() as (client, front):
        for extra in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            client.completions.create(model="scripted", prompt="Hi", max_tokens=2, extra_body=extra)
        with_bos, the_same, without = (ids for ids, *_ in front.seen)
        assert list(with_bos) == list(the_same) and list(without) == list(b"Hi")


@pytest.mark.parametrize(
    "name",
    ["allowed_token_ids", "token_ids_logprob", "return_tokens_as_token_ids", "thinking_token_budget", "vllm_xargs"],
)
def test_fields_that_would_change_the_result_are_refused_by_name(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match=name):
        client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body={name: [1]})
    client.chat.completions.create(model="scripted", messages=MESSAGES, max_tokens=2, extra_body={name: None})


def test_a_json_object_may_have_a_schema() -> None:
    with client_of() as (client, front):
        form = {"type": "json_object", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
        client.chat.completions.create(model="scripted", messages=MESSAGES, extra_body={"response_format": form})
        assert '"integer"' in front.grammars[-1].source
