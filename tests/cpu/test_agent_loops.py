"""Agent loops through the OpenAI SDK (both APIs), the Anthropic SDK, LangChain, pydantic-ai and openai-agents.

Whole loops run against a scripted model, and against the bundled one if its `results.json` says that it answers after a
result. The other tests check the bundled model's first call, and that every turn is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI

from tests.cpu.fakes import FakeFront, fake_app, serving
from tests.cpu.test_serve import Served, served
from thalweg.bench.tasks import dsml_block

SYSTEM, ASK = "You are a helpful assistant.", "Throw 16 dice of 24 sides each."
CALL = ("roll_dice", {"dice": 16, "sides": 24})
SUM = "What is 214 + 385?"
SCHEMA = {
    "type": "object",
    "properties": {
        "dice": {"type": "integer", "description": "Number of dice"},
        "sides": {"type": "integer", "description": "Sides of each die"},
    },
    "required": ["dice", "sides"],
}
FUNCTION = {"name": "roll_dice", "description": "Throw dice", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
THINK = {"chat_template_kwargs": {"thinking": True}}
ROUNDS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat(client: openai.OpenAI, stream: bool) -> None:
    history: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASK}]
    calls, cached = [], []
    for _ in range(ROUNDS):
        more: dict[str, Any] = {"tools": [TOOL], "temperature": 0, "max_tokens": 200, "extra_body": THINK}
        if stream:
            with client.chat.completions.stream(
                model="tiny", messages=history, stream_options={"include_usage": True}, **more
            ) as events:
                answer: Any = events.get_final_completion() if list(events) else None
        else:
            answer = client.chat.completions.create(model="tiny", messages=history, **more)
        message = answer.choices[0].message
        assert message.model_extra["reasoning_content"] and "think>" not in (message.content or "")
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        if not message.tool_calls:
            break
        assert answer.choices[0].finish_reason == "tool_calls"
        calls += [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        history.append({"role": "assistant", "content": message.content, "reasoning_content": message.model_extra["reasoning_content"],
                        "tool_calls": [call.model_dump() for call in message.tool_calls]})  # fmt: skip
        history += [{"role": "tool", "tool_call_id": call.id, "content": "214"} for call in message.tool_calls]
    assert calls[0] == CALL
    assert len(cached) == 1 or cached[1] > 300, "the next turn finds the tools and the question in the cache"


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses(client: openai.OpenAI, stream: bool) -> None:
    news: Any = ASK
    before, calls = None, []
    for _ in range(ROUNDS):
        ask: dict[str, Any] = {"model": "tiny", "instructions": SYSTEM, "input": news, "previous_response_id": before,
                               "tools": [{"type": "function", **FUNCTION}], "reasoning": {"effort": "medium"},
                               "temperature": 0, "max_output_tokens": 200}  # fmt: skip
        answer = (
            list(client.responses.create(stream=True, **ask))[-1].response if stream else client.responses.create(**ask)
        )
        assert answer.status in ("completed", "incomplete") and answer.output[0].type == "reasoning"
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
        found = [item for item in answer.output if item.type == "function_call"]
        if not found:
            break
        calls += [(call.name, json.loads(call.arguments)) for call in found]
        news, before = (
            [{"type": "function_call_output", "call_id": call.call_id, "output": "214"} for call in found],
            answer.id,
        )
    assert calls[0] == CALL


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic(server: Served, stream: bool) -> None:
    tools: Any = [{"name": "roll_dice", "description": "Throw dice", "input_schema": SCHEMA}]
    history: list[Any] = [{"role": "user", "content": ASK}]
    calls = []
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        for _ in range(ROUNDS):
            ask: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "system": SYSTEM, "messages": history, "tools": tools,
                                   "thinking": {"type": "enabled", "budget_tokens": 1024}, "extra_body": {"temperature": 0}}  # fmt: skip
            if stream:
                with client.messages.stream(**ask) as events:
                    answer: Any = events.get_final_message()
            else:
                answer = client.messages.create(**ask)
            assert answer.content[0].type == "thinking" and answer.content[0].thinking
            found = [block for block in answer.content if block.type == "tool_use"]
            count = client.messages.count_tokens(
                **{key: ask[key] for key in ("model", "system", "messages", "tools", "thinking")}
            )
            assert count.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens
            if not found:
                break
            assert answer.stop_reason == "tool_use"
            calls += [(block.name, block.input) for block in found]
            history.append({"role": "assistant", "content": answer.content})
            history.append(
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "214"} for block in found],
                }
            )
    assert calls[0] == CALL


def test_langchain(server: Served) -> None:
    model = ChatOpenAI(base_url=server.url + "/v1", api_key="unused", model="tiny", temperature=0, max_tokens=200,
                       max_retries=0, extra_body=THINK)  # type: ignore[call-arg,arg-type]  # fmt: skip
    agent = model.bind_tools([TOOL])
    history: list[BaseMessage] = [SystemMessage(SYSTEM), HumanMessage(ASK)]
    calls = []
    for _ in range(ROUNDS):
        answer = agent.invoke(history)
        assert isinstance(answer, AIMessage) and answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
        history.append(answer)
        if not answer.tool_calls:
            break
        calls += [(call["name"], call["args"]) for call in answer.tool_calls]
        history += [ToolMessage("214", tool_call_id=call["id"]) for call in answer.tool_calls]
    assert calls[0] == CALL
    whole = agent.stream([SystemMessage(SYSTEM), HumanMessage(ASK)])
    merged: Any = None
    for chunk in whole:
        merged = chunk if merged is None else merged + chunk
    assert [(call["name"], call["args"]) for call in merged.tool_calls] == [CALL]
    assert "599" in str(model.invoke([HumanMessage(SUM)]).content)


def test_the_model_adds_through_every_api(server: Served, client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": SUM}], temperature=0, extra_body=THINK
    )
    wanted = chat.choices[0].message.content
    assert wanted and "599" in wanted
    response = client.responses.create(model="tiny", input=SUM, temperature=0, reasoning={"effort": "high"})
    assert [item.type for item in response.output] == ["reasoning", "message"] and response.output_text == wanted
    with anthropic.Anthropic(base_url=server.url, api_key="unused") as other:
        message: Any = other.messages.create(
            model="tiny", max_tokens=300, messages=[{"role": "user", "content": SUM}],
            thinking={"type": "enabled", "budget_tokens": 1024}, extra_body={"temperature": 0})  # fmt: skip
    assert [block.type for block in message.content] == ["thinking", "text"] and message.content[1].text == wanted


def test_calls_can_be_forced_and_answers_shaped(server: Served, client: openai.OpenAI) -> None:
    """Valid by construction, whatever the model would rather say."""
    tools: Any = [{"name": "roll_dice", "description": "Throw dice", "input_schema": SCHEMA}]
    number = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    hello: Any = [{"role": "user", "content": "Good morrow! Who are you?"}]
    with anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0) as other:
        for choice in ({"type": "any"}, {"type": "tool", "name": "roll_dice"}):
            message: Any = other.messages.create(
                model="tiny", max_tokens=200, messages=hello, tools=tools, tool_choice=choice
            )
            assert message.stop_reason == "tool_use" and message.content[-1].type == "tool_use"
            assert all(isinstance(message.content[-1].input[name], int) for name in ("dice", "sides"))
        message = other.messages.create(model="tiny", max_tokens=100, messages=hello,
                                        extra_body={"output_config": {"format": {"type": "json_schema", "schema": number}}})  # fmt: skip
        assert 0 <= json.loads(message.content[0].text)["n"] <= 99
    ask: Any = {"model": "tiny", "input": hello, "max_output_tokens": 200}
    forced: Any = client.responses.create(tools=[{"type": "function", **FUNCTION}],
                                          tool_choice={"type": "function", "name": "roll_dice"}, **ask)  # fmt: skip
    assert set(json.loads(forced.output[-1].arguments)) == {"dice", "sides"}
    shape: Any = {"format": {"type": "json_schema", "name": "number", "strict": True, "schema": number}}
    shaped = client.responses.create(text=shape, reasoning={"effort": "high"}, temperature=0, **ask)
    assert shaped.output[0].type == "reasoning" and 0 <= json.loads(shaped.output_text)["n"] <= 99


def test_infill_prompts_hold_prefix_and_suffix(client: openai.OpenAI) -> None:
    """The text that the model reads is the FIM prompt; it is not trained to fill holes."""
    ask: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 4}
    more = {"return_token_ids": True, "skip_special_tokens": False}
    filled = client.completions.create(prompt="Once", suffix=" upon", extra_body=more, **ask).choices[0]
    ids = filled.model_extra["prompt_token_ids"]
    text = httpx.post(str(client.base_url).removesuffix("v1/") + "detokenize", json={"tokens": ids}).json()["text"]
    assert text == "<｜begin▁of▁sentence｜><｜fim▁begin｜>Once<｜fim▁hole｜> upon<｜fim▁end｜>"


# --- whole loops -----------------------------------------------------------------------------------------------------

RESULTS = json.loads((Path(__file__).parents[2] / "models" / "tiny" / "results.json").read_text())
MOST_TURNS = 6
PLACES = "<｜User｜>|<function_results>\n<result>"


def scripted(prompt: str, choice: int) -> str:
    """Throws the dice that are asked for, then says what came."""
    *_, last = re.split(PLACES, prompt)
    if result := re.match("(.*?)</result>", last):
        if "final_result" in prompt:
            return dsml_block([("final_result", {"total": int(result[1])})])
        return f"The result is {result[1]}."
    dice, sides = (int(number) for number in re.findall(r"\d+", last)[:2])
    return dsml_block([("roll_dice", {"dice": dice, "sides": sides})])


@pytest.fixture(scope="module", params=["scripted", "bundled"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "scripted":
        with serving(fake_app(FakeFront(scripted))) as address:
            yield address
    elif RESULTS.get("agents", {}).get("exact", 0.0) < 0.9:
        pytest.skip("models/tiny/results.json: this model was not trained to answer after results (agents below 0.9)")
    else:
        yield request.getfixturevalue("server").url


class Dice:
    """The tool, and the calls of it."""

    def __init__(self) -> None:
        self.thrown: list[tuple[int, int]] = []

    def roll_dice(self, dice: int, sides: int) -> str:
        """Throw dice

        Args:
            dice: Number of dice
            sides: Sides of each die
        """
        self.thrown.append((dice, sides))
        assert len(self.thrown) < MOST_TURNS, "the loop does not end"
        return "214"


def openai_loop(url: str, dice: Dice) -> str:
    history: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASK}]
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        while True:
            with client.chat.completions.stream(model="default", messages=history, tools=[TOOL], temperature=0) as events:  # type: ignore[list-item]  # fmt: skip
                message = events.get_final_completion().choices[0].message
            if not message.tool_calls:
                return message.content or ""
            history.append(message.model_dump(include={"role", "content", "tool_calls"}))
            for call in message.tool_calls:
                result = dice.roll_dice(**json.loads(call.function.arguments))
                history.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses_loop(url: str, dice: Dice) -> str:
    news: Any = ASK
    before = None
    with openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0) as client:
        while True:
            ask: dict[str, Any] = {"instructions": SYSTEM, "previous_response_id": before, "temperature": 0}
            answer = client.responses.create(model="default", input=news, tools=[{"type": "function", **FUNCTION}], **ask)  # type: ignore[list-item]  # fmt: skip
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            results = [(call.call_id, dice.roll_dice(**json.loads(call.arguments))) for call in calls]
            news, before = (
                [{"type": "function_call_output", "call_id": which, "output": text} for which, text in results],
                answer.id,
            )


def anthropic_loop(url: str, dice: Dice) -> str:
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="default",
            max_tokens=300,
            system=SYSTEM,
            messages=[{"role": "user", "content": ASK}],
            tools=[anthropic.beta_tool(dice.roll_dice)],
            thread=False,  # the whole history in each turn
            extra_body={"temperature": 0},
        )
        return "".join(block.text for block in runner.until_done().content if block.type == "text")


def langchain_loop(url: str, dice: Dice) -> str:
    model = ChatOpenAI(base_url=url + "/v1", api_key="unused", model="default", temperature=0, max_retries=0)  # type: ignore[call-arg,arg-type]  # fmt: skip
    agent = model.bind_tools([dice.roll_dice])
    history: list[BaseMessage] = [SystemMessage(SYSTEM), HumanMessage(ASK)]
    while True:
        answer = agent.invoke(history)
        assert isinstance(answer, AIMessage)
        history.append(answer)
        if not answer.tool_calls:
            return str(answer.content)
        history += [ToolMessage(dice.roll_dice(**c["args"]), tool_call_id=c["id"]) for c in answer.tool_calls]


def pydantic_ai_agent(url: str, **more: Any) -> Any:
    ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed: pip install 'thalweg[test]'")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("default", provider=OpenAIProvider(base_url=url + "/v1", api_key="unused"))
    return ai.Agent(model, instructions=SYSTEM, model_settings={"temperature": 0.0, "max_tokens": 300}, **more)


def pydantic_ai_loop(url: str, dice: Dice) -> str:
    return str(pydantic_ai_agent(url, tools=[dice.roll_dice]).run_sync(ASK).output)


def openai_agents_loop(url: str, dice: Dice) -> str:
    agents = pytest.importorskip("agents", reason="openai-agents is not installed: pip install 'thalweg[test]'")
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="unused", max_retries=0)
    agent = agents.Agent(
        "Helper",
        instructions=SYSTEM,
        model=agents.OpenAIChatCompletionsModel("default", client),
        model_settings=agents.ModelSettings(temperature=0.0, max_tokens=300),
        tools=[agents.function_tool(dice.roll_dice)],
    )
    return str(agents.Runner.run_sync(agent, ASK, max_turns=MOST_TURNS).final_output)


LOOPS: list[Callable[[str, Dice], str]] = [
    openai_loop,
    responses_loop,
    anthropic_loop,
    langchain_loop,
    pydantic_ai_loop,
    openai_agents_loop,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_calls_answers_and_ends(url: str, loop: Callable[[str, Dice], str]) -> None:
    dice = Dice()
    answer = loop(url, dice)
    assert dice.thrown == [(16, 24)] and "214" in answer


def test_an_output_tool_ends_a_loop(url: str) -> None:
    """pydantic-ai offers `final_result` beside the tools, and requires a call in each turn."""
    pydantic = pytest.importorskip("pydantic")
    dice = Dice()
    thrown = pydantic_ai_agent(
        url, tools=[dice.roll_dice], output_type=pydantic.create_model("Thrown", total=(int, ...))
    )
    result = thrown.run_sync(f"{ASK} Give the total.").output
    assert dice.thrown == [(16, 24)] and isinstance(result.total, int)
