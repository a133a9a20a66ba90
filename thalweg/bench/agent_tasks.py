"""Conversations with made-up tools for the task `agents`: calls, results and answers, and JSON for a schema.

Names, schemas and values are random, so a model must read what it is offered. Schemas are written as the OpenAI,
Anthropic, LangChain, pydantic-ai and openai-agents SDKs send them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thalweg.bench.agent_tools import Parameter, Tool, ToolMaker, compact, plain_value, spaced
from thalweg.bench.task_pools import CITIES, PEOPLE

Json = Any
Message = dict[str, Json]

_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful agent.",
    "Be concise.",
    "Use the tools to answer.",
    "Answer the user's questions with the tools that you have.",
    "You are {person}'s assistant.",
    "You work for a {key} shop in {city}.",
    "Extract the {key}.",
    "Help with the {key}. Reply in one sentence.",
)
_GREETINGS = (
    ("Hello", "Good day to you! What shall we talk about?"),
    ("Thank you", "You are most welcome."),
    ("Who are you?", "I am the little model that comes with Thalweg."),
    ("How are you?", "I am well, I thank you. And how are you?"),
)
_HANDOFFS = (
    "I want to talk to the {a}.",
    "I want {n}",
    "{N}, please.",
    "I need help with my {n}.",
    "Send me to the {a}.",
)
_NO_TOOL = "None of my tools can do that."
_FINAL = "final_result"
_FINAL_TEXT = ("The final response which ends this conversation", "A {noun}.", "The answer.")
_MOST_TOOLS = 6


@dataclass
class ToolConversation:
    """Messages in OpenAI's form, which end with the assistant's."""

    messages: list[Message] = field(default_factory=list)
    tools: tuple[Mapping[str, Json], ...] = ()
    response_format: Mapping[str, Json] | None = None  # the schema that the prompt shows
    given: int = 0  # the assistant's first turns, which were another agent's

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def call(self, calls: Sequence[tuple[str, Mapping[str, Json]]]) -> None:
        first = len(self.messages)
        self.messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": f"call_{first}_{i}",
                        "type": "function",
                        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
                    }
                    for i, (name, arguments) in enumerate(calls)
                ],
            }
        )

    def results(self, texts: Sequence[str]) -> None:
        calls = self.messages[-1]["tool_calls"]
        for call, text in zip(calls, texts, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def answer_to(results: Sequence[str]) -> str:
    """What the assistant says after the results of its calls: it repeats them, text in quotation marks."""
    said = [_quoted(text) for text in results]
    if len(said) == 1:
        return f"The result is {said[0]}."
    return f"The results are {', '.join(said[:-1])} and {said[-1]}."


def _quoted(text: str) -> str:
    try:
        json.loads(text)
        return text
    except ValueError:
        return f'"{text}"' if text else "empty"


class Maker(ToolMaker):
    """Draws conversations."""

    no_call_share = 0.12  # of the requests of a loop

    def opened(self, tools: Sequence[Tool]) -> ToolConversation:
        """A conversation with these tools, in some order, and perhaps a system prompt."""
        shown = list(tools)
        self.rng.shuffle(shown)
        conversation = ToolConversation(tools=tuple(tool.offered for tool in shown))
        if self.chance(0.7):
            words = {"person": self.rng.choice(PEOPLE), "key": self.noun(), "city": self.rng.choice(CITIES)}
            conversation.say("system", self.rng.choice((*_SYSTEM, "")).format(**words))
        return conversation

    def toolbox(self) -> tuple[list[Tool], int]:
        style = self.rng.randrange(4)
        count = self.rng.choices(range(1, _MOST_TOOLS + 1), (28, 25, 20, 12, 8, 7))[0]
        taken: set[str] = set()
        return [self.tool(style, taken) for _ in range(count)], style

    def loop(self) -> ToolConversation:
        """Requests, calls, results and answers."""
        tools, _ = self.toolbox()
        talk = self.opened(tools)
        for _ in range(self.rng.choices((1, 2, 3), (70, 22, 8))[0]):
            if self.chance(self.no_call_share):
                self._without_call(talk, tools)
            elif self.chance(0.22):
                self._in_steps(talk, tools)
            else:
                self._at_once(talk, tools)
        return talk

    def _at_once(self, talk: ToolConversation, tools: Sequence[Tool]) -> None:
        count = self.rng.choices((1, 2, 3), (70, 24, 6))[0]
        asked = [(tool, *self.ask(tool)) for tool in (self.redrawn(self.rng.choice(tools)) for _ in range(count))]
        talk.say("user", self.rng.choice((" Then: ", " Also: ")).join(text for _, text, _ in asked))
        self._run(talk, [(tool.name, arguments) for tool, _, arguments in asked])
        talk.say("assistant", answer_to(self._last_results(talk)))

    def _run(self, talk: ToolConversation, calls: Sequence[tuple[str, dict[str, Json]]]) -> None:
        talk.call(calls)
        talk.results([self.result() for _ in calls])

    def _last_results(self, talk: ToolConversation) -> list[str]:
        results: list[str] = []
        for message in reversed(talk.messages):
            if message["role"] != "tool":
                break
            results.insert(0, message["content"])
        return results

    def _in_steps(self, talk: ToolConversation, tools: Sequence[Tool]) -> None:
        """A second call after the first one's result, of which it may take a value."""
        first, second = (self.redrawn(self.rng.choice(tools)) for _ in range(2))
        (request, arguments), (after, later) = self.ask(first), self.ask(second)
        result = self.result()
        numbers = [p for p in second.parameters if p.schema.get("type") == "integer" and p.required]
        if len(second.parameters) == len(numbers) == 1 and self.chance(0.8):
            value = self.integer()
            result, later = str(value), {numbers[0].name: value}
            after = (
                f"{(second.action or f'use {second.name}').capitalize()} with the result as {spaced(numbers[0].name)}."
            )
        talk.say("user", f"{request} After that: {after}")
        talk.call([(first.name, arguments)])
        talk.results([result])
        self._run(talk, [(second.name, later)])
        talk.say("assistant", answer_to(self._last_results(talk)))

    def _without_call(self, talk: ToolConversation, tools: Sequence[Tool]) -> None:
        """Small talk, or a request that no tool fits."""
        if self.chance(0.4):
            said, answer = self.rng.choice(_GREETINGS)
            talk.say("user", said + self.rng.choice(("", ".", "!")) if said[-1] != "?" else said)
            talk.say("assistant", answer)
            return
        known = {word for tool in tools for word in (*spaced(tool.name).split(), *tool.description.lower().split())}
        while True:
            other = self.tool(3, set())
            if other.action and not known & (set(other.action.split()) - {"the", "a"}):
                break
        request = self.ask(other)[0]
        talk.say("user", f"{other.action.capitalize()}." if other.name in request else request)
        talk.say("assistant", _NO_TOOL)

    def extraction(self) -> ToolConversation:
        """pydantic-ai's output tool: the call of `final_result` ends the conversation."""
        style = self.rng.choice((0, 1))
        taken = {_FINAL}
        tools = [self.tool(style, taken) for _ in range(self.rng.choices((0, 1, 2), (35, 45, 20))[0])]
        about = self.rng.choice(_FINAL_TEXT).format(noun=self.noun())
        name = _FINAL if self.chance(0.75) else self.noun().capitalize()
        final = self.offer(name, about, self.parameters(self.rng.randint(1, 4)), "", style)
        talk = self.opened([*tools, final])
        text, arguments = self.facts(final.parameters)
        if not tools or self.chance(0.3):
            talk.say("user", text)
        else:
            tool = self.rng.choice(tools)
            request, given = self.ask(tool)
            found = {key: arguments[key] for key in list(arguments)[: self.rng.randint(0, len(arguments))]}
            rest = tuple(p for p in final.parameters if p.name not in found)
            if found:
                text, arguments = self.facts(rest)
                arguments = {
                    p.name: (found | arguments)[p.name] for p in final.parameters if p.name in found | arguments
                }
            talk.say("user", f"{request} {text}".strip())
            talk.call([(tool.name, given)])
            talk.results([self.dumped(found) if found else self.result()])
        talk.call([(name, arguments)])
        return talk

    def facts(self, parameters: Sequence[Parameter]) -> tuple[str, dict[str, Json]]:
        """A text that gives values for these members, and the members; what it does not give has a plain value."""
        if self.chance(0.15) and parameters:
            text = self.rng.choice(
                (
                    self.rng.choice(_GREETINGS)[0],
                    f"What is the {self.noun()}?",
                    f"Tell me about {self.rng.choice(CITIES)}.",
                )
            )
            return text, {p.name: plain_value(p.schema) for p in parameters if p.required}
        kinds = [p.schema.get("type") for p in parameters if "enum" not in p.schema]
        if kinds == ["string", "integer"] and len(parameters) == 2 and self.chance(0.6):
            who, many = self.rng.choice((*PEOPLE, *CITIES)), self.integer()
            text = self.rng.choice(("{w} is {n}", "{w} is {n} years old.", "{w} has {n}.", "{w}, {n}")).format(
                w=who, n=many
            )
            return text, dict(zip((p.name for p in parameters), (who, many), strict=True))
        said = [p for p in parameters if p.required or self.chance(0.5)]
        form = self.rng.choice(("{n} {v}", "{n}: {v}", "{n} = {v}", "the {n} is {v}"))
        spoken = [form.format(n=self.rng.choice((spaced(p.name), p.name)), v=p.spoken) for p in said]
        self.rng.shuffle(spoken)
        lead = self.rng.choice(("", "", "Make it JSON: ", "I have ", "Here it is: "))
        return lead + ", ".join(spoken) + ("." if spoken else ""), {p.name: p.value for p in said}

    def handoff(self) -> ToolConversation:
        """openai-agents' handoffs: a call without arguments, after which another agent answers."""
        who = [f"{self.noun()} agent" for _ in range(self.rng.randint(1, 3))]
        empty = {"additionalProperties": False, "type": "object", "properties": {}, "required": []}
        tools = [
            Tool("", "", (), "", {"type": "function", "function": {
                "name": f"transfer_to_{name.replace(' ', '_')}",
                "description": f"Handoff to the {name.capitalize()} agent to handle the request. ",
                "parameters": empty, "strict": True}})
            for name in dict.fromkeys(who)
        ]  # fmt: skip
        taken: set[str] = set()
        extra = [self.tool(2, taken) for _ in range(self.rng.choice((0, 0, 1, 2)))]
        talk = self.opened([*tools, *extra])
        chosen = self.rng.choice(who)
        noun = chosen.removesuffix(" agent")
        talk.say("user", self.rng.choice(_HANDOFFS).format(a=chosen, n=noun, N=noun.capitalize()))
        talk.call([(f"transfer_to_{chosen.replace(' ', '_')}", {})])
        talk.results([json.dumps({"assistant": chosen.capitalize()})])
        talk.say("assistant", f"This is the {chosen.capitalize()}. What can I do for you?")
        if self.chance(0.5):  # as the other agent gets it: with its own instructions and tools
            talk.messages = [m for m in talk.messages if m["role"] != "system"]
            talk.messages.insert(0, {"role": "system", "content": f"You are the {chosen}."})
            talk.tools, talk.given = tuple(tool.offered for tool in extra), 1
        return talk

    def shaped(self) -> ToolConversation:
        """JSON for a schema that the prompt shows, as structured output or in words."""
        parameters = self.parameters(self.rng.randint(1, 5))
        schema = self.schema(parameters, self.rng.randrange(4))
        if self.chance(0.2):
            schema["description"] = f"A {self.noun()}."
        text, value = self.facts(parameters)
        shown = self.rng.random()
        talk = self.opened(())
        if shown < 0.6:
            talk.response_format = schema
        elif shown < 0.8:
            words = "Always respond with a JSON object that's compatible with this schema:"
            note = f"\n{words}\n\n{json.dumps(schema)}\n\nDon't include any text or Markdown fencing before or after.\n"
            talk.messages = [{"role": "system", "content": note}]
        else:
            text = f"{text}\nAnswer as JSON with this schema: {json.dumps(schema)}"
        if schema.get("title") or set(schema["required"]) - value.keys():  # openai-agents requires every member
            value = {
                p.name: value.get(p.name, plain_value(p.schema))
                for p in parameters
                if p.name in schema["required"] or p.name in value
            }
        value = {p.name: value[p.name] for p in parameters if p.name in value}
        talk.say("user", text)
        talk.say("assistant", compact(value))
        return talk

    def draw(self) -> ToolConversation:
        """A conversation of any kind but JSON."""
        kind = self.rng.choices((self.loop, self.extraction, self.handoff), (76, 18, 6))[0]
        return kind()
