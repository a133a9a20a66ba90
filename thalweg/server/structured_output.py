"""Reads the fields that ask for a structure (OpenAI's, SGLang's and vLLM's names) into a `Grammar`, and checks that it
compiles before it reaches the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from msgspec import structs

from thalweg.core.errors import InvalidRequest, Overloaded
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.server.protocol import ChatRequest, ResponseFormat, StructuredFields, StructuredOutputs
from thalweg.text.chat import ParserNames, wants_thinking
from thalweg.text.grammar import check, json_rule
from thalweg.text.messages import read_tools
from thalweg.text.parser import REASONING_FORMATS, is_in_thought
from thalweg.text.tool_grammar import ToolGrammarSpec, tool_grammar

MarkId = Callable[[str], int | None]
_KINDS = {  # field → kind of grammar
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "choice": "choice",
    "structural_tag": "structural_tag",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
_OUTPUT_KINDS = {  # the same for the fields of structured_outputs
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
}


def grammar_of(body: StructuredFields, response_format: ResponseFormat | None = None, where: str = "") -> Grammar:
    """The structure that a body asks for. Raises InvalidRequest, also for more than one."""
    grammars = []
    if response_format is not None and response_format.type != "text":
        grammars.append(_format_grammar(response_format))
    outputs = body.structured_outputs or StructuredOutputs()
    for values, prefix, kinds in (body, where, _KINDS), (outputs, f"{where}structured_outputs.", _OUTPUT_KINDS):
        for name, kind in kinds.items():
            value = getattr(values, name)
            if value is not None and (value or kind != "json_object"):
                grammars.append(_grammar(kind, prefix + name, value))
    if len(grammars) > 1:
        message = f"asks for a second structure beside {grammars[0].field}: give one"
        raise InvalidRequest(grammars[1].field, message)
    return grammars[0] if grammars else NO_GRAMMAR


def chat_grammar(body: ChatRequest, formats: ParserNames, mark_id: MarkId, prompt: str) -> Grammar:
    """The grammar of the answer after its thought: a structure, or tool calls that are forced or strict.

    Raises InvalidRequest.
    """
    content = grammar_of(body, body.response_format)
    functions = read_tools(body.tools) if body.tools and body.tool_choice != "none" else ()
    name = forced_name(body)
    forced = name is not None
    if forced and content.is_set:
        raise InvalidRequest(content.field, "contradicts a forced tool call: give one of the two")
    strict = any(function.get("strict") is True for function in functions)
    grammar = content
    if functions and (forced or content.is_set or strict or body.parallel_tool_calls is False):
        allowed = [function for function in functions if not name or function["name"] == name]
        if not allowed:
            raise InvalidRequest("tool_choice.function.name", f"is {name!r}, which is none of the tools")
        single = bool(name) or body.parallel_tool_calls is False
        spec = ToolGrammarSpec(allowed, forced, single, mark_id, _content_rule(content))
        grammar = _tool_grammar(spec, formats)
    return _after_thought(grammar, body, formats, mark_id, prompt)


def forced_name(body: ChatRequest) -> str | None:
    """The function that must be called, "" for any, None for none. Raises InvalidRequest for an unknown tool_choice."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if not body.tools:
        raise InvalidRequest("tool_choice", "forces a call, but there are no tools")
    match choice:
        case "required":
            return ""
        case {"type": "function", "function": {"name": str(name)}} if name:
            return name
    message = 'must be auto, none, required, or {"type": "function", "function": {"name": …}}'
    raise InvalidRequest("tool_choice", message)


def _tool_grammar(spec: ToolGrammarSpec, formats: ParserNames) -> Grammar:
    if formats.tools is None:
        raise InvalidRequest("tools", "the tool call format of this model is unknown: start with --tool-call-parser")
    return Grammar("lark", tool_grammar(formats.tools, spec), field="tools")


def _content_rule(content: Grammar) -> str:
    """The rule of an answer without calls; "" for any text."""
    match content.kind:
        case "":
            return ""
        case "json_object":
            return json_rule({"type": "object"})
        case "json_schema":
            try:
                return json_rule(json.loads(content.source))
            except ValueError as error:
                raise InvalidRequest(content.field, f"is not JSON ({error})") from None
    raise InvalidRequest(content.field, "goes with tools only as a JSON object or schema")


def _after_thought(grammar: Grammar, body: ChatRequest, formats: ParserNames, mark_id: MarkId, prompt: str) -> Grammar:
    if not grammar.is_set:
        return grammar
    is_inside = is_in_thought(prompt)
    begins = "inside" if is_inside else "outside"
    if is_inside is None and formats.reasoning is not None and not body.continue_final_message:
        begins = REASONING_FORMATS[formats.reasoning][wants_thinking(None, body.chat_template_kwargs)]
    if begins == "outside":
        return grammar
    start, end = mark_id("<think>"), mark_id("</think>")
    if start is None or end is None:
        message = "does not work with thinking here: this model's <think> and </think> are not single tokens"
        raise InvalidRequest(grammar.field, message)
    inside = begins == "inside"
    return structs.replace(grammar, starts_in_thought=inside, think_start_id=-1 if inside else start, think_end_id=end)


def _format_grammar(response_format: ResponseFormat) -> Grammar:
    match response_format.type:
        case "json_object" if response_format.schema is not None:
            return _grammar("json_schema", "response_format.schema", response_format.schema)
        case "json_object":
            return Grammar("json_object", field="response_format")
        case "json_schema":
            field, schema = "response_format.json_schema.schema", response_format.json_schema or {}
            if "schema" not in schema:
                raise InvalidRequest(field, "is missing")
            return _grammar("json_schema", field, schema["schema"])
        case "structural_tag":
            tags = {"structures": response_format.structures, "triggers": response_format.triggers}
            return _grammar("structural_tag", "response_format", tags)
        case kind:
            message = f"is {kind!r}; there is text, json_object, json_schema, structural_tag"
            raise InvalidRequest("response_format.type", message)


def schema_of(body: ChatRequest) -> Any:
    """The JSON schema of response_format, for templates that show it to the model; None where there is none."""
    form = body.response_format
    if form is None:
        return None
    schema = form.schema if form.type == "json_object" else (form.json_schema or {}).get("schema")
    return schema if isinstance(schema, dict) else None


def _grammar(kind: str, field: str, value: Any) -> Grammar:
    if kind == "json_object":
        return Grammar(kind, field=field)
    if kind in ("regex", "ebnf") and (not isinstance(value, str) or not value):
        raise InvalidRequest(field, "must be a text that is not empty")
    return Grammar(kind, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), field=field)


KNOWN = 4096  # results that are kept, by the grammar's digest
THREADS = 2
WAITING = 64  # grammars that may wait for their check, which takes up to a second each


class GrammarChecker:
    """Checks each grammar once, on a thread. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar-check")
        self._checks: OrderedDict[bytes, asyncio.Future[str]] = OrderedDict()  # the latest used last

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest naming the grammar's field if it does not compile within the limits, Overloaded if too
        many wait for their check.
        """
        if not grammar.is_set:
            return
        key = hashlib.blake2b(f"{grammar.kind}\0{grammar.source}".encode("utf-8", "surrogatepass")).digest()
        if key not in self._checks:
            if sum(not check.done() for check in self._checks.values()) >= WAITING:
                raise Overloaded(f"{WAITING} grammars wait to be compiled: try again later")
            self._checks[key] = asyncio.get_running_loop().run_in_executor(self._pool, _error_of, grammar)
            if len(self._checks) > KNOWN:
                self._checks.popitem(last=False)
        self._checks.move_to_end(key)
        if error := await asyncio.shield(self._checks[key]):  # others may wait for it too
            raise InvalidRequest(grammar.field, error)


def _error_of(grammar: Grammar) -> str:
    """Why a grammar does not compile; "" if it does."""
    try:
        check(grammar)
    except InvalidRequest as error:
        return error.message
    return ""
