"""The official OpenAI SDK against /v1/responses over HTTP, with a scripted model behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.cpu.fakes import FakeFront, Script, default_script, fake_app, serving
from tests.cpu.test_server_anthropic import CALLS
from thalweg.config.server import ServerOptions
from thalweg.server.responses.store import ResponseStore

TOOLS = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    }
]


@contextmanager
def client_of(script: Script = default_script, **options: Any) -> Iterator[tuple[openai.OpenAI, FakeFront]]:
    front = FakeFront(script)
    with serving(fake_app(front, ServerOptions(**options))) as url:
        with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
            yield client, front


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with client_of() as (client, _):
        yield client


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": "Say something about rivers.", **more}


def prompt_of(front: FakeFront) -> str:
    return bytes(front.seen[-1][0]).decode()


def test_an_answer() -> None:
    with client_of() as (client, front):
        response = client.responses.create(instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, **ask())
        assert response.output_text.startswith("Answer 0") and response.output_text.endswith("Grüße, 世界!")
        assert (response.status, response.object, response.model) == ("completed", "response", "scripted")
        assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")
        assert response.error is None and response.incomplete_details is None and response.temperature == 0.5
        assert response.instructions == "Be brief." and response.metadata == {"a": "b"}
        usage = response.usage
        assert usage and usage.input_tokens == len(front.seen[0][0]) and usage.output_tokens > 20
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        prompt = prompt_of(front)
        assert (
            prompt.startswith("<｜begin▁of▁sentence｜>Be brief.<｜User｜>Say") and front.seen[-1][1].temperature == 0.5
        )
        items = [
            {"role": "developer", "content": "Be brief."},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "Say something about rivers."}],
            },
        ]
        client.responses.create(**ask(input=items))
        assert prompt_of(front) == prompt


def test_a_stream_adds_up_to_the_answer(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ask())
    with client.responses.stream(**ask()) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == whole.output_text and final.status == "completed"
    assert final.usage and whole.usage and final.usage.output_tokens == whole.usage.output_tokens
    assert [event.type for event in events if not event.type.endswith("delta")] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events))) and len(events) > 20


def test_reasoning() -> None:
    with client_of(lambda prompt, choice: "It is a sum: 2 + 2.</think>Four.") as (client, front):
        response = client.responses.create(reasoning={"effort": "high"}, **ask())
        thought, message = response.output
        assert (thought.type, thought.content[0].text, message.type) == ("reasoning", "It is a sum: 2 + 2.", "message")
        assert thought.id.startswith("rs_") and thought.summary == [] and response.output_text == "Four."
        assert response.usage.output_tokens_details.reasoning_tokens == len("It is a sum: 2 + 2.")
        assert prompt_of(front).endswith("<think>")
        events = list(client.responses.create(stream=True, reasoning={"effort": "high"}, **ask()))
        deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "It is a sum: 2 + 2." and len(deltas) > 5
        final = events[-1].response
        assert [item.content[0].text for item in final.output] == ["It is a sum: 2 + 2.", "Four."]
        assert final.usage == response.usage
        client.responses.create(reasoning={"effort": "none"}, **ask())
        assert prompt_of(front).endswith("</think>")


def test_lengths(client: openai.OpenAI) -> None:
    response = client.responses.create(max_output_tokens=2, **ask())
    assert (response.status, response.output_text) == ("incomplete", "An")
    assert response.incomplete_details.reason == "max_output_tokens" and response.output[0].status == "incomplete"
    last = list(client.responses.create(stream=True, max_output_tokens=2, **ask()))[-1]
    assert last.type == "response.incomplete" and last.response.incomplete_details.reason == "max_output_tokens"


def tool_script(prompt: str, choice: int) -> str:
    return "Sun.</think>It shines." if "<result>" in prompt else "Look.</think>" + CALLS


@pytest.mark.parametrize("kept", [False, True])
def test_tools_make_a_loop(kept: bool) -> None:
    with client_of(tool_script) as (client, front):
        more: dict[str, Any] = {"tools": TOOLS, "reasoning": {"effort": "medium"}, "instructions": "Be brief."}
        response = client.responses.create(**ask(**more))
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        calls = [item for item in response.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"place": "Köln", "days": 2}, {"place": "Ulm"}]
        assert calls[0].call_id != calls[1].call_id and calls[0].id.startswith("fc_")
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"sun {i}"}
            for i, call in enumerate(calls)
        ]
        if kept:
            more |= {"previous_response_id": response.id, "input": results}
        else:
            history = [{"role": "user", "content": ask()["input"]}, *(item.model_dump() for item in response.output)]
            more |= {"input": [*history, *results]}
        last = client.responses.create(**ask(**more))
        assert last.output_text == "It shines." and last.previous_response_id == (response.id if kept else None)
        prompt = prompt_of(front)
        assert prompt.count("Be brief.") == 1
        assert "<think>Look.</think>I will look.\n\n<｜DSML｜function_calls>" in prompt
        assert prompt.endswith("<result>sun 0</result>\n<result>sun 1</result>\n</function_results>\n\n<think>")


def test_a_streamed_call() -> None:
    with client_of(lambda prompt, choice: CALLS) as (client, _):
        with client.responses.stream(**ask(tools=TOOLS)) as stream:
            events = list(stream)
            final = stream.get_final_response()
        calls = [item for item in final.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"place": "Köln", "days": 2}, {"place": "Ulm"}]
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        first = "".join(event.delta for event in deltas if event.item_id == calls[0].id)
        assert first == calls[0].arguments and len(deltas) > 4
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.arguments for event in done] == [call.arguments for call in calls]
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [item.type for item in added] == ["message", "function_call", "function_call"]
        assert added[1].name == "weather" and added[1].arguments == ""


CUT = len(CALLS.partition("ln")[0].encode())  # each byte is a token: within the first argument


def test_a_call_that_is_cut_is_incomplete_and_its_arguments_are_not_closed() -> None:
    with client_of(lambda prompt, choice: CALLS) as (client, front):
        cut = ask(tools=TOOLS, max_output_tokens=CUT)
        response = client.responses.create(**cut)
        events = list(client.responses.create(stream=True, **cut))
        streamed = events[-1].response
        for one in (response, streamed):
            message, call = one.output
            assert (one.status, one.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert (message.status, call.status, call.name) == ("completed", "incomplete", "weather")
            assert call.arguments == '{"place": "Kö' and one.output_text == "I will look."
        types = [event.type for event in events]
        assert "response.function_call_arguments.done" not in types and types[-1] == "response.incomplete"
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call.arguments
        assert [e.item.status for e in events if e.type == "response.output_item.done"] == ["completed", "incomplete"]
        client.responses.create(**ask(input="Go on.", previous_response_id=response.id))
        assert "weather" not in prompt_of(front)  # the call was never made


def test_a_chain_of_responses() -> None:
    with client_of() as (client, front):
        first = client.responses.create(instructions="Be brief.", **ask(input="One"))
        (last,) = [
            e
            for e in client.responses.create(stream=True, **ask(input="Two", previous_response_id=first.id))
            if e.type == "response.completed"
        ]
        client.responses.create(**ask(input="Three", previous_response_id=last.response.id))
        prompt = prompt_of(front)
        assert "Be brief." not in prompt, "instructions are those of the request alone"
        assert [prompt.count(f"<｜User｜>{word}<") for word in ("One", "Two", "Three")] == [1, 1, 1]
        assert prompt.count("Answer 0") == 2

        again = client.responses.retrieve(first.id)
        assert again.output_text == first.output_text and again.usage == first.usage
        client.responses.delete(first.id)
        for act in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                act(first.id)
        with pytest.raises(openai.NotFoundError) as gone:
            client.responses.create(**ask(previous_response_id=first.id))
        assert gone.value.param == "previous_response_id"
        assert client.responses.retrieve(last.response.id).status == "completed", "its own conversation is whole"


def test_what_is_not_stored_is_not_there() -> None:
    with client_of(max_stored_responses=2) as (client, _):
        ids = [client.responses.create(**ask()).id for _ in range(2)]
        secret = client.responses.create(store=False, **ask())
        client.responses.retrieve(ids[0])
        third = client.responses.create(**ask()).id
        assert secret.store is False
        for id, there in ((secret.id, False), (ids[0], True), (ids[1], False), (third, True)):
            status = httpx.get(f"{client.base_url}responses/{id}").status_code
            assert (status == 200) == there, id
    with client_of(max_stored_responses=0) as (client, _):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(client.responses.create(**ask()).id)


def test_the_response_store_is_bounded_by_bytes() -> None:
    shelf = ResponseStore(100, 1000)
    messages = [{"role": "user", "content": "x" * 200}]
    for i in range(10):
        shelf.put(str(i), messages, b"y" * 100)
        assert shelf.size <= 1000
    assert 1 < len(shelf) < 5 and shelf.get("9") and not shelf.get("0")
    shelf.put("big", messages, b"y" * 2000)
    assert not shelf.get("big") and shelf.get("9"), "what can never fit displaces nothing"
    for i in range(10):
        shelf.remove(str(i))
    assert len(shelf) == shelf.size == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{"}]}, "input[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"background": True}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": {"type": "poem"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_named(client: openai.OpenAI, change: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(stream=stream, **ask(**change))
    assert bad.value.param == param and bad.value.type == "invalid_request_error"


def test_engine_death_fails_the_response() -> None:
    with client_of() as (client, front):
        front.gap = 0.02
        events = []
        for event in client.responses.create(stream=True, **ask()):
            events.append(event)
            if event.type == "response.output_text.delta":
                front.die("the engine process ended with exit code -9")
        last = events[-1]
        assert last.type == "response.failed" and last.response.status == "failed"
        assert "exit code -9" in last.response.error.message
        assert [event.sequence_number for event in events] == list(range(len(events)))
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(last.response.id)
        with pytest.raises(openai.InternalServerError, match="exit code -9"):
            client.responses.create(**ask())
