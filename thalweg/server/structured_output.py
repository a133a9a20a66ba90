"""From the fields in which clients ask for structure (OpenAI's, SGLang's and vLLM's names) to a `Grammar`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.server.protocol import ChatRequest, ResponseFormat, Structured, StructuredOutputs
from thalweg.text.chat import ParserNames, wants_thinking
from thalweg.text.grammar import json_rule
from thalweg.text.messages import read_tools
from thalweg.text.parser import REASONING_FORMATS, opens_thought
from thalweg.text.tool_grammar import ToolGrammarSpec, tool_grammar

MarkId = Callable[[str], int | None]


def grammar_of(body: Structured, response_format: ResponseFormat | None = None, where: str = "") -> Grammar:
    """The one structure that a body asks for, FREE where it asks for none. Raises InvalidRequest, also for more than
    one.
    """
    outputs = body.structured_outputs or StructuredOutputs()
    asked = [
        ("json_schema", "json_schema", body.json_schema),
        ("regex", "regex", body.regex),
        ("ebnf", "ebnf", body.ebnf),
        ("choice", "choice", body.choice),
        ("structural_tag", "structural_tag", body.structural_tag),
        ("json_schema", "guided_json", body.guided_json),
        ("regex", "guided_regex", body.guided_regex),
        ("choice", "guided_choice", body.guided_choice),
        ("ebnf", "guided_grammar", body.guided_grammar),
        ("json_schema", "structured_outputs.json", outputs.json),
        ("regex", "structured_outputs.regex", outputs.regex),
        ("choice", "structured_outputs.choice", outputs.choice),
        ("ebnf", "structured_outputs.grammar", outputs.grammar),
        ("structural_tag", "structured_outputs.structural_tag", outputs.structural_tag),
        ("json_object", "structured_outputs.json_object", outputs.json_object or None),
    ]
    found = [_grammar(kind, where + name, value) for kind, name, value in asked if value is not None]
    if response_format is not None and response_format.type != "text":
        found.insert(0, _of_format(response_format))
    if len(found) > 1:
        raise InvalidRequest(found[1].field, f"asks for a second structure beside {found[0].field}: give one")
    return found[0] if found else NO_GRAMMAR


def chat_grammar(body: ChatRequest, formats: ParserNames, mark_id: MarkId, prompt: str) -> Grammar:
    """What the answer to `prompt` must match, behind its thought: a structure, or tool calls that are forced or strict.
    Raises InvalidRequest.
    """
    content = grammar_of(body, body.response_format)
    functions = read_tools(body.tools) if body.tools and body.tool_choice != "none" else ()
    name = forced_name(body)
    forced = name is not None
    if forced and content.is_set:
        raise InvalidRequest(content.field, "contradicts a forced tool call: give one of the two")
    strict = any(function.get("strict") is True for function in functions)
    if functions and (forced or content.is_set or strict or body.parallel_tool_calls is False):
        wanted = [function for function in functions if not name or function["name"] == name]
        if not wanted:
            raise InvalidRequest("tool_choice.function.name", f"is {name!r}, which is none of the tools")
        grammar = _calls(wanted, formats, mark_id, forced, bool(name) or body.parallel_tool_calls is False, content)
    else:
        grammar = content
    return _behind_thought(grammar, body, formats, mark_id, prompt)


def forced_name(body: ChatRequest) -> str | None:
    """The function that must be called, "" for any, None where none must. Raises InvalidRequest for a tool_choice that
    means nothing.
    """
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if not body.tools:
        raise InvalidRequest("tool_choice", "forces a call, but there are no tools")
    if choice == "required":
        return ""
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            "tool_choice", 'must be auto, none, required, or {"type": "function", "function": {"name": …}}'
        )
    return name


def _calls(
    functions: Sequence[Mapping[str, Any]],
    formats: ParserNames,
    mark_id: MarkId,
    forced: bool,
    single: bool,
    content: Grammar,
) -> Grammar:
    if formats.tools is None:
        raise InvalidRequest("tools", "no format of tool calls is known for this model: start with --tool-call-parser")
    text = ""
    if content.is_set:
        if content.kind not in ("json_object", "json_schema"):
            raise InvalidRequest(content.field, "goes with tools only as a JSON object or schema")
        text = json_rule({"type": "object"} if content.kind == "json_object" else _value(content.source, content.field))
    source = tool_grammar(formats.tools, ToolGrammarSpec(functions, forced, single, mark_id, text))
    return Grammar("lark", source, field="tools")


def _behind_thought(grammar: Grammar, body: ChatRequest, formats: ParserNames, mark_id: MarkId, prompt: str) -> Grammar:
    if not grammar.is_set:
        return grammar
    begins = "outside"
    if opens_thought(prompt):
        begins = "inside"
    elif formats.reasoning is not None and not body.continue_final_message:
        begins = REASONING_FORMATS[formats.reasoning].begins[wants_thinking(None, body.chat_template_kwargs)]
    if begins == "outside":
        return grammar
    opens, closes = mark_id("<think>"), mark_id("</think>")
    if opens is None or closes is None:
        why = "cannot hold behind a thought here: this model's <think> and </think> are not single tokens"
        raise InvalidRequest(grammar.field, why)
    inside = begins == "inside"
    return structs.replace(
        grammar, starts_in_thought=inside, think_start_id=-1 if inside else opens, think_end_id=closes
    )


def _of_format(response_format: ResponseFormat) -> Grammar:
    kind, field = response_format.type, "response_format"
    if kind == "json_object":
        return Grammar("json_object", field=field)
    if kind == "json_schema":
        given = response_format.json_schema
        if given is None or "schema" not in given:
            raise InvalidRequest("response_format.json_schema.schema", "is missing")
        return _grammar("json_schema", "response_format.json_schema.schema", given["schema"])
    if kind == "structural_tag":
        tags = {"structures": response_format.structures, "triggers": response_format.triggers}
        return _grammar("structural_tag", field, tags)
    raise InvalidRequest(
        "response_format.type", f"is {kind!r}; there is text, json_object, json_schema, structural_tag"
    )


def schema_of(body: ChatRequest) -> Any:
    """The JSON schema of response_format, for templates that show it to the model; None where there is none."""
    given = body.response_format
    if given is None or given.type != "json_schema" or given.json_schema is None:
        return None
    schema = given.json_schema.get("schema")
    return schema if isinstance(schema, dict) else None


def _grammar(kind: str, field: str, value: Any) -> Grammar:
    if kind in ("regex", "ebnf"):
        if not isinstance(value, str) or not value:
            raise InvalidRequest(field, "must be a text that is not empty")
        return Grammar(kind, value, field=field)
    if kind == "json_object":
        return Grammar(kind, field=field)
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), field=field)


def _value(source: str, field: str) -> Any:
    try:
        return json.loads(source)
    except ValueError as error:
        raise InvalidRequest(field, f"is not JSON ({error})") from None
