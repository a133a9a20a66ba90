"""The official Anthropic SDK against /v1/messages over HTTP, with a scripted model behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import ModelInfo
from openai.types import Model as OpenAIModel

from tests.cpu.fakes import CONTEXT, FakeFront, Script, default_script, fake_app, serving
from thalweg.config.server import ServerOptions

MESSAGES = [{"role": "user", "content": "Say something about rivers."}]
TOOLS = [
    {
        "name": "weather",
        "description": "The weather of a place.",
        "input_schema": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    }
]
CALLS = (
    'I will look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="place"'
    ' string="true">Köln</｜DSML｜parameter>\n<｜DSML｜parameter name="days"'
    ' string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter'
    ' name="place" string="true">Ulm</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
THINK = {"type": "enabled", "budget_tokens": 2000}


@contextmanager
def client_of(script: Script = default_script, **options: Any) -> Iterator[tuple[anthropic.Anthropic, FakeFront]]:
    front = FakeFront(script)
    with serving(fake_app(front, ServerOptions(**options))) as url:
        with anthropic.Anthropic(base_url=url, api_key="key", max_retries=0) as client:
            yield client, front


@pytest.fixture(scope="module")
def client() -> Iterator[anthropic.Anthropic]:
    with client_of() as (client, _):
        yield client


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "max_tokens": 2000, "messages": MESSAGES, **more}


def prompt_of(front: FakeFront) -> str:
    return bytes(front.seen[-1][0]).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fills_the_context(stream: bool) -> None:
    """Clients send large defaults: the output is cut, and the stop reason says so."""
    with client_of(lambda prompt, choice: "x" * 2 * CONTEXT) as (client, _):
        if stream:
            with client.messages.stream(**ask(max_tokens=1 << 20)) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**ask(max_tokens=1 << 20), timeout=60)
        assert message.stop_reason == "model_context_window_exceeded"
        assert message.usage.input_tokens + message.usage.output_tokens == CONTEXT
        assert client.messages.create(**ask(max_tokens=5)).stop_reason == "max_tokens"


def test_an_answer() -> None:
    with client_of() as (client, front):
        message = client.messages.create(system="Be brief.", metadata={"user_id": "me"}, **ask())
        (block,) = message.content
        assert block.type == "text" and block.text.startswith("Answer 0") and block.text.endswith("Grüße, 世界!")
        assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
        assert message.id.startswith("msg_") and message.model == "scripted"
        assert message.usage.input_tokens == len(front.seen[0][0]) and message.usage.output_tokens > 20
        prompt = prompt_of(front)
        assert prompt.startswith("<｜begin▁of▁sentence｜>Be brief.<｜User｜>Say") and prompt.endswith("</think>")
        parts = [
            {"type": "text", "text": "Be "},
            {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
        ]
        client.messages.create(
            system=parts,
            **ask(messages=[{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]),
        )
        assert prompt_of(front) == prompt


def test_a_stream_adds_up_to_the_answer(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ask())
    with client.messages.stream(**ask()) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    assert streamed.content[0].text == whole.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    assert [event.type for event in events if event.type not in ("text", "content_block_delta")] == [
        "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]  # fmt: skip
    assert sum(event.type == "text" for event in events) > 10


def test_the_wire_is_named_events_and_nothing_else(client: anthropic.Anthropic) -> None:
    body = ask(stream=True, max_tokens=3)
    text = httpx.post(f"{str(client.base_url).rstrip('/')}/v1/messages", json=body).text
    events = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    assert all(len(event) == 2 for event in events)
    names = [event[0].removeprefix("event: ") for event in events]
    data = [json.loads(event[1].removeprefix("data: ")) for event in events]
    assert names == [one["type"] for one in data]
    assert names == ["message_start", "ping", "content_block_start", *["content_block_delta"] * 3, "content_block_stop",
                     "message_delta", "message_stop"]  # fmt: skip
    assert data[0]["message"]["content"] == [] and data[0]["message"]["stop_reason"] is None
    assert data[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert data[-2]["usage"]["output_tokens"] == 3


def test_thinking() -> None:
    with client_of(lambda prompt, choice: "It is a sum: 2 + 2.</think>Four.") as (client, front):
        message = client.messages.create(thinking=THINK, **ask())
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "It is a sum: 2 + 2.", "Four.")
        assert thought.signature and prompt_of(front).endswith("<think>")
        with client.messages.stream(thinking=THINK, **ask()) as stream:
            streamed = stream.get_final_message()
        assert streamed.content[0] == thought and streamed.content[1].text == text.text
        client.messages.create(thinking={"type": "disabled"}, **ask())
        assert prompt_of(front).endswith("</think>")


def test_stop_sequences_and_lengths(client: anthropic.Anthropic) -> None:
    stopped = client.messages.create(stop_sequences=["zzz", " has"], **ask())
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " has")
    assert stopped.content[0].text == "Answer 0: the prompt"
    short = client.messages.create(**ask(max_tokens=2))
    assert short.stop_reason == "max_tokens" and short.content[0].text == "An" and short.usage.output_tokens == 2


def test_tools_make_a_loop() -> None:
    with client_of(
        lambda prompt, choice: "Sun.</think>It shines." if "<result>" in prompt else "Look.</think>" + CALLS
    ) as (client, front):
        more = {"tools": TOOLS, "thinking": THINK, "tool_choice": {"type": "auto"}}
        message = client.messages.create(**ask(**more))
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        calls = message.content[2:]
        assert [(call.name, call.input) for call in calls] == [
            ("weather", {"place": "Köln", "days": 2}), ("weather", {"place": "Ulm"})]  # fmt: skip
        assert calls[0].id != calls[1].id and all(call.id.startswith("toolu_") for call in calls)
        assert '"description": "The weather of a place."' in prompt_of(front)

        with client.messages.stream(**ask(**more)) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            streamed = stream.get_final_message()
        assert [block.model_dump(exclude={"id"}) for block in streamed.content] == [
            block.model_dump(exclude={"id"}) for block in message.content]  # fmt: skip
        assert len(pieces) > 4 and streamed.stop_reason == "tool_use"

        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"sun {i}"} for i, call in enumerate(calls)
        ]
        results[0]["content"] = [{"type": "text", "text": "sun "}, {"type": "text", "text": "0"}]
        history = [
            *MESSAGES,
            message.to_param(),
            {"role": "user", "content": [*reversed(results), {"type": "text", "text": "Well?"}]},
        ]
        last = client.messages.create(**ask(**more | {"messages": history}))
        assert [block.type for block in last.content] == ["thinking", "text"] and last.content[1].text == "It shines."
        prompt = prompt_of(front)
        assert "<result>sun 0</result>\n<result>sun 1</result>" in prompt and prompt.endswith(
            "<｜User｜>Well?<｜Assistant｜><think>"
        )

        client.messages.create(**ask(tools=TOOLS, tool_choice={"type": "none"}))
        assert "weather" not in prompt_of(front)


def test_a_call_that_is_cut_has_the_members_that_are_complete() -> None:
    def until(word: str) -> int:
        return len(CALLS.partition(word)[0].encode()) + len(word)  # each byte is a token

    with client_of(lambda prompt, choice: CALLS) as (client, _):
        for tokens, arguments, members in (
            (until('"false">2'), '{"place": "Köln", "days": 2', {"place": "Köln"}),
            (until('"true">K'), '{"place": "K', {}),
        ):
            message = client.messages.create(**ask(tools=TOOLS, max_tokens=tokens))
            assert message.stop_reason == "max_tokens"
            assert [(block.name, block.input) for block in message.content[1:]] == [("weather", members)]
            events = list(client.messages.create(stream=True, **ask(tools=TOOLS, max_tokens=tokens)))
            deltas = [event.delta for event in events if event.type == "content_block_delta"]
            assert "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta") == arguments


def test_a_cut_call_with_half_a_surrogate_is_answered() -> None:
    text = CALLS.partition("<｜DSML｜parameter")[0] + '{"a": "\\ud83d", "b": "unfinished'
    with client_of(lambda prompt, choice: text) as (client, _):
        message = client.messages.create(**ask(tools=TOOLS, max_tokens=len(text.encode()) - 3))
        assert list(message.content[1].input) == ["a"] and message.stop_reason == "max_tokens"


def test_a_thought_survives_the_tool_round() -> None:
    with client_of() as (client, front):
        history = [
            *MESSAGES,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "I THINK", "signature": "x"},
                {"type": "redacted_thinking", "data": "SECRET"},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"place": "Ulm"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "is_error": True}]},
        ]  # fmt: skip
        client.messages.create(**ask(messages=history, tools=TOOLS, thinking=THINK))
        prompt = prompt_of(front)
        assert "<think>I THINK</think>\n\n<｜DSML｜function_calls>" in prompt and "SECRET" not in prompt
        assert prompt.endswith("<result></result>\n</function_results>\n\n<think>")


def test_the_last_message_may_begin_the_answer() -> None:
    with client_of() as (client, front):
        client.messages.create(**ask(messages=[*MESSAGES, {"role": "assistant", "content": "Rivers are"}]))
        assert prompt_of(front).endswith("</think>Rivers are")


def test_counting_is_what_the_answer_says() -> None:
    with client_of() as (client, front):
        more: dict[str, Any] = {"tools": TOOLS, "system": "Be brief.", "thinking": THINK}
        count = client.messages.count_tokens(model="scripted", messages=MESSAGES, **more)
        assert count.input_tokens == client.messages.create(**ask(**more)).usage.input_tokens == len(front.seen[0][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"messages": []}, "messages: is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type: is 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0]"),
        ({"messages": [*MESSAGES, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "messages[1].content[0]: is 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: is 'web_search"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: is required"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name: is 'other'"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
        ({"extra_body": {"temperature": -1}}, "temperature: must be"),
        ({"stop_sequences": [""]}, "stop_sequences: an empty"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers: is not supported"),
        ({"extra_body": {"output_config": {"format": {"type": "poem"}}}}, "output_config.format.type: is 'poem'"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_named_in_anthropics_shape(
    client: anthropic.Anthropic, change: dict[str, Any], words: str, stream: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(stream=stream, **ask(**change))
    body = bad.value.body
    assert isinstance(body, dict) and body["type"] == "error" and set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"].startswith(words)


def test_the_rest_of_the_errors() -> None:
    with client_of(api_key=("key", "other"), max_body_bytes=2000) as (client, front):
        assert client.messages.create(**ask()).content, "x-api-key is accepted"
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(**ask())
        with anthropic.Anthropic(base_url=client.base_url, auth_token="other", max_retries=0) as bearer:
            assert bearer.messages.create(**ask()).content
        with pytest.raises(anthropic.NotFoundError, match="does not exist here"):
            client.messages.create(**ask(model="claude"))
        with pytest.raises(anthropic.APIStatusError, match="longer than the limit") as long:
            client.messages.create(**ask(system="x" * 2000))
        assert long.value.status_code == 413 and long.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
        front.full = True
        with pytest.raises(anthropic.RateLimitError):
            client.messages.create(**ask())
        front.full, front.gap = False, 0.02
        with pytest.raises(anthropic.APIStatusError, match="exit code -9"):
            for event in client.messages.create(stream=True, **ask()):
                if event.type == "content_block_delta":
                    front.die("the engine process ended with exit code -9")
        with pytest.raises(anthropic.InternalServerError, match="exit code -9") as dead:
            client.messages.create(**ask())
        assert dead.value.status_code == 503 and dead.value.body["error"]["type"] == "api_error"  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_the_sdk_works(stream: bool) -> None:
    """It asks for a thread first, and sends all messages once that is refused by its code."""
    places: list[str] = []

    @anthropic.beta_tool
    def weather(place: str, days: int = 1) -> str:
        """The weather of a place."""
        places.append(place)
        return f"sun {days}"

    with client_of(lambda prompt, choice: "It shines." if "<result>" in prompt else CALLS) as (client, front):
        runner = client.beta.messages.tool_runner(tools=[weather], stream=stream, **ask())
        last = runner.until_done()
        assert places == ["Köln", "Ulm"] and last.content[0].text == "It shines." and last.stop_reason == "end_turn"
        prompt = prompt_of(front)
        assert "<result>sun 2</result>\n<result>sun 1</result>" in prompt and "Say something about rivers." in prompt
        assert len(front.seen) == 2

        refused = {"extra_body": {"thread": {"type": "continue", "previous_message_id": "msg_0"}}}
        for call, body in (
            (client.messages.create, ask()),
            (client.beta.messages.count_tokens, {"model": "scripted", "messages": MESSAGES}),
        ):
            with pytest.raises(anthropic.BadRequestError) as bad:
                call(**body, **refused)  # type: ignore[operator]
            assert (bad.value.error_code, bad.value.type) == ("thread_unsupported_request", "invalid_request_error")


def test_models_are_complete_in_the_form_of_each_sdk() -> None:
    with client_of(served_model_name=("one", "two")) as (client, _):
        url = str(client.base_url).rstrip("/") + "/v1"
        headers = {"anthropic-version": "2023-06-01"}
        raw = httpx.get(f"{url}/models", headers=headers).json()
        assert [ModelInfo.model_validate(entry).id for entry in raw["data"]] == ["one", "two"]
        assert set(ModelInfo.model_fields) == set(raw["data"][0])
        for listed in (client.models.list(), client.beta.models.list()):
            assert [entry.id for entry in listed] == ["one", "two"] and listed.has_more is False
            assert (listed.first_id, listed.last_id) == ("one", "two")
        info = client.models.retrieve("two")
        assert (info.type, info.display_name, info.lifecycle) == ("model", "two", "active")
        assert info.max_input_tokens == info.max_tokens == CONTEXT and info.created_at.year > 2000
        assert info.capabilities and info.capabilities.thinking.types.enabled.supported
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.models.retrieve("three")
        assert missing.value.body["type"] == "error" and missing.value.type == "not_found_error"  # type: ignore[index]

        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as other:
            assert [OpenAIModel.model_validate(card.model_dump()).id for card in other.models.list()] == ["one", "two"]
            with pytest.raises(openai.NotFoundError) as unknown:
                other.models.retrieve("three")
            assert unknown.value.code == "model_not_found"
