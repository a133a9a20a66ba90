"""Reads the fields that ask for a structure (OpenAI's, SGLang's and vLLM's names) into a `Grammar`, and checks that it
compiles before it reaches the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from msgspec import structs

from thalweg.core.errors import InvalidRequest, Overloaded
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.sampling import StructuredOutputsParams
from thalweg.server.protocol import ChatRequest, ResponseFormat, StructuredFields
from thalweg.text.chat import ParserNames, wants_thinking
from thalweg.text.grammar import check, json_rule, read_schema
from thalweg.text.messages import read_tools
from thalweg.text.parser import REASONING_FORMATS, TOOL_FORMATS, is_in_thought
from thalweg.text.tokenizer import Tokenizer
from thalweg.text.tool_grammar import ToolGrammarSpec, after_trigger, tool_grammar

MarkId = Callable[[str], int | None]
BUDGET = "thinking_token_budget"
TAIL = 8  # tokens of a prompt that tell whether it ends in a thought
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


def grammar_of(
    body: StructuredFields,
    response_format: ResponseFormat | None = None,
    where: str = "",
    *,
    any_whitespace: bool = False,
) -> Grammar:
    """The structure that a body asks for. any_whitespace: where the body does not say. Raises InvalidRequest, also for
    more than one.
    """
    grammars = []
    if response_format is not None and response_format.type != "text":
        grammars.append(_format_grammar(response_format))
    outputs = body.structured_outputs
    grammars += [*_grammars(body, where, _KINDS), *_outputs_grammars(outputs, where)]
    return _single(grammars, outputs, any_whitespace)


def outputs_grammar(
    outputs: StructuredOutputsParams | None, where: str = "", *, any_whitespace: bool = False
) -> Grammar:
    """The structure of vLLM's `structured_outputs`. any_whitespace: where it does not say. Raises InvalidRequest, also
    for more than one.
    """
    return _single(_outputs_grammars(outputs, where), outputs, any_whitespace)


def _outputs_grammars(outputs: StructuredOutputsParams | None, where: str) -> list[Grammar]:
    return [] if outputs is None else _grammars(outputs, f"{where}structured_outputs.", _OUTPUT_KINDS)


def _grammars(values: object, prefix: str, kinds: Mapping[str, str]) -> list[Grammar]:
    named = [(kind, prefix + name, getattr(values, name)) for name, kind in kinds.items()]
    return [_grammar(*each) for each in named if each[2] is not None and (each[2] or each[0] != "json_object")]


def _single(grammars: Sequence[Grammar], outputs: StructuredOutputsParams | None, any_whitespace: bool) -> Grammar:
    if len(grammars) > 1:
        message = f"asks for a second structure beside {grammars[0].field}: give one"
        raise InvalidRequest(grammars[1].field, message)
    if outputs is not None and outputs.disable_any_whitespace is not None:
        any_whitespace = not outputs.disable_any_whitespace
    return structs.replace(grammars[0], any_whitespace=any_whitespace) if grammars else NO_GRAMMAR


def chat_grammar(
    body: ChatRequest,
    formats: ParserNames,
    mark_id: MarkId,
    prompt: str,
    any_whitespace: bool = False,
    lark: Mapping[str, str] | None = None,
) -> Grammar:
    """The grammar of the answer after its thought: a structure, or tool calls that are forced or strict.

    lark: function → Lark grammar of its only argument, a string. Raises InvalidRequest.
    """
    content = grammar_of(body, body.response_format, any_whitespace=any_whitespace)
    functions = read_tools(body.tools) if body.tools and body.tool_choice != "none" else ()
    choice = read_tool_choice(body)
    if choice.forced and content.is_set:
        raise InvalidRequest(content.field, "contradicts a forced tool call: give one of the two")
    strict = any(function.get("strict") is True for function in functions)
    grammar = content
    single = choice.single or body.parallel_tool_calls is False
    if functions and (choice.forced or choice.names or content.is_set or strict or single):
        rule, unenforced = _content_rule(content)
        spec = ToolGrammarSpec(functions, choice.forced, single, mark_id, rule, choice.names, lark or {})
        grammar = _tool_grammar(spec, formats)
        grammar = structs.replace(grammar, unenforced=unenforced + grammar.unenforced)
    continues = bool(body.continue_final_message)
    return after_thought(grammar, formats, mark_id, prompt, body.chat_template_kwargs, continues)


def call_grammar(body: ChatRequest, formats: ParserNames, mark_id: MarkId, prompt: str) -> Grammar:
    """Calls of the tools offered, from where the model begins one: for requests that ask for no structure.

    NO_GRAMMAR where calls have no mark, and where a tool is beyond what grammars can hold.
    """
    if not body.tools or body.tool_choice == "none" or body.ignore_eos or formats.tools is None:
        return NO_GRAMMAR
    if not TOOL_FORMATS[formats.tools].mark:
        return NO_GRAMMAR
    try:
        spec = ToolGrammarSpec(read_tools(body.tools), True, False, mark_id)
        grammar = after_trigger(tool_grammar(formats.tools, spec))
        if not grammar.is_set:  # the marks are text, which is read from the start on
            free = tool_grammar(formats.tools, spec._replace(forced=False))
            continues = bool(body.continue_final_message)
            grammar = after_thought(free, formats, mark_id, prompt, body.chat_template_kwargs, continues)
    except InvalidRequest:
        return NO_GRAMMAR
    return structs.replace(grammar, unenforced=())  # nobody asked for it


class AllowedCalls(NamedTuple):
    forced: bool = False  # the answer is calls
    names: frozenset[str] = frozenset()  # of the tools that may be called; empty: all
    single: bool = False  # at most one call


def read_tool_choice(body: ChatRequest) -> AllowedCalls:
    """Raises InvalidRequest for an unknown tool_choice, and for names of tools that there are not."""
    names: list[tuple[str, str]] = []  # (field, name)
    given: Any = body.tool_choice
    match given:
        case None | "auto" | "none":
            return AllowedCalls()
        case "required":
            choice = AllowedCalls(forced=True)
        case {"type": "function", "function": {"name": str(name)}} if name:
            names, choice = [("tool_choice.function.name", name)], AllowedCalls(forced=True, single=True)
        case {"type": "allowed_tools", "allowed_tools": {"tools": [_, *_] as tools} as allowed}:
            where = "tool_choice.allowed_tools"
            if (mode := allowed.get("mode", "auto")) not in ("auto", "required"):
                raise InvalidRequest(f"{where}.mode", f"is {mode!r}; there is auto and required")
            fields = [f"{where}.tools[{i}]" for i in range(len(tools))]
            names = [(field, _allowed_name(tool, field)) for tool, field in zip(tools, fields, strict=True)]
            choice = AllowedCalls(forced=mode == "required")
        case _:
            forms = '{"type": "function", …} or {"type": "allowed_tools", …}'
            raise InvalidRequest("tool_choice", f"must be auto, none, required, {forms}")
    if not body.tools:
        raise InvalidRequest("tool_choice", "forces or allows calls, but there are no tools")
    known = {function["name"] for function in read_tools(body.tools)}
    for field, name in names:
        if name not in known:
            raise InvalidRequest(field, f"is {name!r}, which is none of the tools")
    return choice._replace(names=frozenset(name for _, name in names))


def _allowed_name(tool: Any, field: str) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise InvalidRequest(field, 'must be {"type": "function", "function": {"name": …}}')


def _tool_grammar(spec: ToolGrammarSpec, formats: ParserNames) -> Grammar:
    if formats.tools is None:
        raise InvalidRequest("tools", "the tool call format of this model is unknown: start with --tool-call-parser")
    return tool_grammar(formats.tools, spec)


def _content_rule(content: Grammar) -> tuple[str, tuple[str, ...]]:
    """The rule of an answer without calls, "" for any text, and what it does not enforce."""
    match content.kind:
        case "":
            return "", ()
        case "json_object":
            return json_rule({"type": "object"}, content.any_whitespace), ()
        case "json_schema":
            schema, unenforced = read_schema(content.source, content.field, content.strict)
            return json_rule(schema, content.any_whitespace), unenforced
    raise InvalidRequest(content.field, "goes with tools only as a JSON object or schema")


def after_thought(
    grammar: Grammar,
    formats: ParserNames,
    mark_id: MarkId,
    prompt: str,
    template_kwargs: Mapping[str, Any] | None = None,
    continues: bool = False,
) -> Grammar:
    """The grammar, to hold after the thought that the prompt lets the model begin with. prompt: as rendered.
    template_kwargs: that it was rendered with. continues: it ends inside the answer. Raises InvalidRequest.
    """
    if not grammar.masks:
        return grammar
    is_inside = is_in_thought(prompt)
    begins = "inside" if is_inside else "outside"
    if is_inside is None and formats.reasoning is not None and not continues:
        begins = REASONING_FORMATS[formats.reasoning][wants_thinking(None, template_kwargs)]
    return _with_thought(grammar, begins, mark_id)


def with_budget(grammar: Grammar, budget: int | None) -> Grammar:
    """budget: tokens of a thought; None and -1: no limit. Raises InvalidRequest."""
    if budget is not None and budget < -1:
        raise InvalidRequest(BUDGET, f"must be a number of tokens, or -1 for no limit, got {budget}")
    return grammar if budget is None else structs.replace(grammar, thinking_budget=budget)


def limited_thought(tokenizer: Tokenizer, grammar: Grammar, ids: Sequence[int]) -> Grammar:
    """The grammar of a prompt without messages, with its thought's limit. Raises InvalidRequest."""
    if grammar.thinking_budget < 0:
        return grammar
    is_inside = is_in_thought(tokenizer.decode(ids[-TAIL:], skip_special_tokens=False))
    return _with_thought(grammar, {None: "maybe", True: "inside", False: "outside"}[is_inside], tokenizer.mark_id)


def _with_thought(grammar: Grammar, begins: str, mark_id: MarkId) -> Grammar:
    """begins: as in `REASONING_FORMATS`."""
    if begins == "outside":
        return structs.replace(grammar, thinking_budget=-1)
    start, end = mark_id("<think>"), mark_id("</think>")
    if start is None or end is None:
        message = "does not work with thinking here: this model's <think> and </think> are not single tokens"
        raise InvalidRequest(grammar.field if grammar.is_set else BUDGET, message)
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
            return structs.replace(
                _grammar("json_schema", field, schema["schema"]), strict=schema.get("strict") is True
            )
        case "structural_tag":
            tags: dict[str, Any] = {"format": response_format.format}
            if response_format.format is None:
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
        self._checks: OrderedDict[bytes, asyncio.Future[_Checked]] = OrderedDict()  # the latest used last

    async def if_it_compiles(self, grammar: Grammar) -> Grammar:
        """The grammar, or NO_GRAMMAR if it does not compile within the limits, or if too many wait for their check."""
        try:
            await self.check(grammar)
        except (InvalidRequest, Overloaded):
            return NO_GRAMMAR
        return grammar

    async def check(self, grammar: Grammar) -> tuple[str, ...]:
        """What the grammar does not enforce (see `Grammar`).

        Raises InvalidRequest naming the grammar's field if it does not compile within the limits, Overloaded if too
        many wait for their check.
        """
        if not grammar.is_set:
            return ()
        flags = f"{grammar.strict} {grammar.any_whitespace}"
        parts = grammar.kind, grammar.field, flags, *grammar.unenforced, grammar.source
        key = hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
        if key not in self._checks:
            if sum(not check.done() for check in self._checks.values()) >= WAITING:
                raise Overloaded(f"{WAITING} grammars wait to be compiled: try again later")
            self._checks[key] = asyncio.get_running_loop().run_in_executor(self._pool, _check, grammar)
            if len(self._checks) > KNOWN:
                self._checks.popitem(last=False)
        self._checks.move_to_end(key)
        checked = await asyncio.shield(self._checks[key])  # others may wait for it too
        if checked.message:
            raise InvalidRequest(checked.field, checked.message)
        return checked.unenforced


class _Checked(NamedTuple):
    unenforced: tuple[str, ...] = ()
    field: str = ""
    message: str = ""  # why the grammar does not compile; "" if it does


def _check(grammar: Grammar) -> _Checked:
    try:
        return _Checked(check(grammar))
    except InvalidRequest as error:
        return _Checked((), error.field, error.message)
