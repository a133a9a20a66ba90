"""The official OpenAI SDK against /v1/responses over HTTP, with a scripted model behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.cpu.fakes import FakeFront, Script, default_script, fake_app, serving
from tests.cpu.test_server_anthropic import CALLS
from thalweg.config.server import ServerOptions
from thalweg.server.responses.background import BackgroundRun
from thalweg.server.responses.encoder import CustomToolInput
from thalweg.server.responses.protocol import ResponsesResponse
from thalweg.server.responses.store import ResponseStore, StoredResponse

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


def custom(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "calculator", "description": "Computes.", "format": grammar}


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
        assert shelf.put(str(i), StoredResponse(messages, [b"z"] * 50, b"y" * 50))
        assert shelf.size <= 1000
    assert 1 < len(shelf) < 5 and shelf.get("9") and not shelf.get("0")
    assert not shelf.put("big", StoredResponse(messages, (), b"y" * 2000))
    assert not shelf.get("big") and shelf.get("9"), "what can never fit displaces nothing"
    run = BackgroundRun(cast(ResponsesResponse, None), lambda extra: True, keeps_events=False)
    assert shelf.put("running", StoredResponse(None, run=run, extra=300))
    for i in range(10):
        assert shelf.put(str(i), StoredResponse(messages, (), b"y" * 100)) and shelf.size <= 1000
    assert not shelf.put("big", StoredResponse((), (), b"y" * 800)) and shelf.get("9"), "it has no room beside it"
    assert shelf.grow("running", 500) and len(shelf) == 1 and not shelf.grow("running", 500)
    run.done = True
    assert shelf.put("next", StoredResponse(messages, (), b"y" * 500)) and not shelf.get("running")
    shelf.remove("next")
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
        ({"background": True, "store": False}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 100}, "top_logprobs"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [custom("lark", "start: (")]}, "tools[0].format.definition"),
        ({"tools": [custom("regex", "(?<=a)b")]}, "tools[0].format.definition"),
        ({"tools": [custom("yaml", "x")]}, "tools[0].format.syntax"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "other"}}, "tool_choice.name"),
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


LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.mark.parametrize("calls", ["", "\n\n" + CALLS.partition("\n\n")[2]], ids=["a text", "a text and calls"])
def test_log_probabilities_are_those_of_the_text(calls: str) -> None:
    text = "Grüße: 2 + 2 = 4."
    with client_of(lambda prompt, choice: f"It is 4.</think>{text}{calls}") as (client, front):
        more = ask(reasoning={"effort": "high"}, tools=TOOLS, **LOGPROBS)
        whole = client.responses.create(**more)
        events = list(client.responses.create(stream=True, **more))
        for response in (whole, events[-1].response):
            (part,) = response.output[1].content
            assert part.text == text and bytes(byte for one in part.logprobs for byte in one.bytes) == text.encode()
            for one in part.logprobs:  # what the scripted model says of a token
                assert one.logprob == one.top_logprobs[0].logprob == pytest.approx(-0.5 - one.bytes[0] / 1000)
                assert len(one.top_logprobs) == 2
            assert response.top_logprobs == 2
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert [len(event.logprobs) for event in deltas] == [len(event.delta.encode()) for event in deltas]
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert [one.token for one in done.logprobs] == [one.token for event in deltas for one in event.logprobs]
        assert not client.responses.create(**ask()).output[0].content[0].logprobs


def test_input_items_are_listed_in_pages() -> None:
    with client_of(lambda prompt, choice: "Good.") as (client, _):
        message = {
            "type": "message",
            "id": "msg_mine",
            "role": "user",
            "content": [{"type": "input_text", "text": "One"}],
        }
        items = [message, {"role": "assistant", "content": "Two"}, {"role": "user", "content": "Three"}]
        first = client.responses.create(**ask(input=items))
        listed = list(client.responses.input_items.list(first.id, order="asc", limit=1))  # the SDK asks for each page
        assert [item.content[0].text for item in listed] == ["One", "Two", "Three"]
        assert [item.role for item in listed] == ["user", "assistant", "user"] and listed[0].id == "msg_mine"
        assert len({item.id for item in listed}) == 3
        page = client.responses.input_items.list(first.id)
        assert [item.id for item in page.data] == [item.id for item in reversed(listed)] and not page.has_more
        assert (page.first_id, page.last_id) == (listed[2].id, "msg_mine")  # type: ignore[attr-defined]
        after = client.responses.input_items.list(first.id, after=listed[1].id, order="asc")
        assert [item.content[0].text for item in after] == ["Three"]
        second = client.responses.create(**ask(input="Four", previous_response_id=first.id))
        texts = [item.content[0].text for item in client.responses.input_items.list(second.id, order="asc")]
        assert texts == ["One", "Two", "Three", "Good.", "Four"]
        for wrong in ({"after": "nothing"}, {"limit": 0}, {"limit": 101}):
            with pytest.raises(openai.BadRequestError) as bad:
                client.responses.input_items.list(first.id, **wrong)  # type: ignore[arg-type]
            assert bad.value.param == next(iter(wrong))
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list("resp_0")


def test_input_tokens_are_those_of_the_answer() -> None:
    with client_of() as (client, _):
        more: dict[str, Any] = {"instructions": "Be brief.", "tools": TOOLS, "reasoning": {"effort": "high"}}
        first = client.responses.create(**ask(**more))
        count = client.responses.input_tokens.count(**ask(**more))
        assert count.object == "response.input_tokens" and count.input_tokens == first.usage.input_tokens
        more |= {"previous_response_id": first.id}
        again = client.responses.input_tokens.count(**ask(**more)).input_tokens
        assert again == client.responses.create(**ask(**more)).usage.input_tokens > count.input_tokens


INPUT = 'say("hé\\n")\nprint(1 < 2)'


def custom_script(prompt: str, choice: int) -> str:
    if "<result>" in prompt:
        return "Done."
    call = '<｜DSML｜invoke name="calculator">\n<｜DSML｜parameter name="input" string="true">'
    call += INPUT + "</｜DSML｜parameter>\n</｜DSML｜invoke>"
    return f"I run it.\n\n<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>"


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_custom_tools_make_a_loop(kept: bool, stream: bool) -> None:
    with client_of(custom_script) as (client, front):
        tools = [*TOOLS, {"type": "custom", "name": "calculator", "description": "Computes."}]
        if stream:
            with client.responses.stream(**ask(tools=tools)) as events:
                seen = list(events)
                response = events.get_final_response()
            deltas = [event for event in seen if event.type == "response.custom_tool_call_input.delta"]
            (done,) = [event for event in seen if event.type == "response.custom_tool_call_input.done"]
            assert "".join(event.delta for event in deltas) == done.input == INPUT and len(deltas) > 10
            added = [event.item for event in seen if event.type == "response.output_item.added"]
            assert added[1].type == "custom_tool_call" and added[1].input == "" and added[1].id == done.item_id
        else:
            response = client.responses.create(**ask(tools=tools))
        message, call = response.output
        assert message.content[0].text == "I run it." and call.type == "custom_tool_call"
        assert (call.name, call.input) == ("calculator", INPUT) and call.id.startswith("ctc_")
        assert '"description": "Computes."' in prompt_of(front)
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "1"}
        more: dict[str, Any] = {"previous_response_id": response.id, "input": [result]}
        if not kept:
            history = [{"role": "user", "content": "Go."}, *(item.model_dump() for item in response.output)]
            more = {"input": [*history, result]}
        last = client.responses.create(**ask(tools=tools, **more))
        assert last.output_text == "Done." and f'string="true">{INPUT}</｜DSML｜parameter>' in prompt_of(front)
        kinds = [item.type for item in client.responses.input_items.list(last.id, order="asc")]
        assert kinds == ["message", "message", "custom_tool_call", "custom_tool_call_output"]


@pytest.mark.parametrize(("syntax", "definition"), [("lark", 'start: "a" /[0-9]+/'), ("regex", "a[0-9]+")])
def test_the_input_of_a_custom_tool_is_held_to_its_grammar(syntax: str, definition: str) -> None:
    def allows(value: str) -> bool:
        is_text = syntax == "lark"
        text = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="calculator">\n<｜DSML｜parameter name="input" string='
        text += f'"{str(is_text).lower()}">{value if is_text else json.dumps(value)}</｜DSML｜parameter>\n'
        text += "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
        matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(front.grammars[-1].source))
        return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()

    with client_of() as (client, front):
        tools = [custom(syntax, definition), *TOOLS]
        for choice in (
            {"type": "custom", "name": "calculator"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "calculator"}]},
        ):
            client.responses.create(**ask(tools=tools, tool_choice=choice))
            assert allows("a12") and not allows("12") and not allows("a1b")
            assert "weather" not in front.grammars[-1].source
        assert json.dumps(definition)[1:-1] in prompt_of(front), "the model reads the grammar"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("text", ["", 'a"b\\c\n\t\u0007é', "😀 \ud83d!", "日本"])
def test_a_custom_input_is_read_in_any_pieces(text: str, size: int) -> None:
    for ascii in (False, True):
        arguments = ' { "input" : ' + json.dumps(text, ensure_ascii=ascii) + ' , "more": 1}'
        reader = CustomToolInput()
        pieces = [reader.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)]
        expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert "".join(pieces) == reader.text == expected and reader.finish() == ""
    other = CustomToolInput()
    assert other.feed('{"x": 1}') == "" and other.finish() == other.text == '{"x": 1}'
