"""POST /v1/chat/completions, and what it shares with the other APIs that have messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Piece
from thalweg.server.context import AppContext
from thalweg.server.generation import (
    MAX_TRUNCATED,
    GenerationJob,
    Prompt,
    PromptJob,
    asked_tokens,
    check_fits,
    make_job,
    read_truncation,
)
from thalweg.server.logprobs import ChatLogprobs, chat_logprobs
from thalweg.server.openai_stream import ChoiceEncoder, OpenAIChoice, OpenAIStreamEncoder
from thalweg.server.parsing import given, listed_ids, renamed, sampling_params
from thalweg.server.protocol import ChatRequest, ReasoningOption
from thalweg.server.stream import respond
from thalweg.server.structured_output import (
    after_thought,
    call_grammar,
    chat_grammar,
    read_tool_choice,
    schema_of,
    with_budget,
)
from thalweg.text.chat import wants_thinking, with_thinking
from thalweg.text.events import Event, PartKind
from thalweg.text.messages import read_tools
from thalweg.text.parser import AnswerParser, is_in_thought
from thalweg.text.tokenizer import Tokenizer

MAX_MESSAGES = 16384
MAX_TOOLS = 1024
MANY_MESSAGES = 256  # a longer conversation is rendered on a thread


async def chat_completions(ctx: AppContext, request: Request, body: ChatRequest) -> Response:
    model = ctx.model(body.model)
    job, new_parser = await prepare_chat(ctx, request, body)
    (prompt,) = job.prompts
    choices = [ChatChoiceEncoder(ctx.front.tokenizer, body, i, prompt, new_parser()) for i in range(job.choices)]
    adds_usage = ctx.options.enable_force_include_usage
    encoder = OpenAIStreamEncoder(f"chatcmpl-{prompt.rid}", "chat.completion", model, body, job, choices, adds_usage)
    return await respond(ctx, request, job, encoder, body.stream)


async def prepare_chat(
    ctx: AppContext,
    request: Request,
    body: ChatRequest,
    rename: Callable[[str], str] = str,
    may_cut: bool = False,
    lark: Mapping[str, str] | None = None,
) -> tuple[GenerationJob, Callable[..., AnswerParser]]:
    """The job of a conversation, for every API that has messages, and what makes the parser of a choice.

    rename: a field of `body` → the client's field. may_cut: an output too long for the context is cut, not refused.
    lark: see `chat_grammar`.

    Raises InvalidRequest, Overloaded, EngineDead.
    """
    names = {"max_tokens": asked_tokens(body)[0], "logprobs": "top_logprobs"}

    def client_field(field: str) -> str:
        return rename(names.get(field, field))

    with renamed(rename):
        params = _params(ctx, body)
        text, ids, tools = await render(ctx, body)
        rid = ctx.rid(body.rid, request)
        shared = body, ctx.chat.formats, ctx.front.tokenizer.mark_id, text
        read_grammar = partial(chat_grammar, *shared, ctx.any_whitespace, lark)
        grammar = await ctx.on_thread(read_grammar) if body.tools else read_grammar()
        if body.tools and not grammar.is_set and given(body.tool_strict_level, ctx.options.tool_strict_level) != "off":
            grammar = await ctx.grammar_checker.if_it_compiles(await ctx.on_thread(partial(call_grammar, *shared)))
        if (limited := with_budget(grammar, body.thinking_token_budget)) is not grammar:
            continues = bool(body.continue_final_message)
            grammar = after_thought(limited, *shared[1:], body.chat_template_kwargs, continues)
    prompts = [PromptJob("messages", ids, text, params, rid, grammar)]
    if not may_cut:
        with renamed(client_field):
            check_fits(ctx, prompts, body)
    job = await make_job(
        ctx,
        request,
        prompts,
        body.priority,
        body.cache_salt,
        retention=ctx.retention.keep(text, body.chat_template_kwargs, bool(tools)),
        rename=client_field,
    )
    return job, _parser(ctx, body, text, tools)


def _read_deepseeks_fields(body: ChatRequest) -> None:
    """What says whether to think becomes template arguments: off where anything says so. A last message with `prefix`
    is continued. Raises InvalidRequest.
    """
    option = body.reasoning or ReasoningOption()
    body.thinking_token_budget = given(body.thinking_token_budget, option.max_tokens)
    effort = given(body.reasoning_effort, option.effort)
    switch = None if body.thinking is None else body.thinking.type == "enabled"
    budget = False if body.thinking_token_budget == 0 else None
    body.chat_template_kwargs = with_thinking(body.chat_template_kwargs, effort, option.enabled, switch, budget) or None
    for i, message in enumerate(body.messages):
        if isinstance(message, dict) and message.get("prefix") is True:
            if i != len(body.messages) - 1 or message.get("role") != "assistant":
                raise InvalidRequest(f"messages[{i}].prefix", "goes with a last message of the assistant only")
            body.continue_final_message = True


async def render(ctx: AppContext, body: ChatRequest) -> tuple[str, Sequence[int], Sequence[dict[str, Any]]]:
    """The prompt as text and as token ids, and the offered tools. Raises InvalidRequest and EngineDead."""
    _read_deepseeks_fields(body)
    _check_count("tools", body.tools, MAX_TOOLS)  # those that tool_choice hides too
    tools = _tools(ctx, body)
    text = await render_text(
        ctx,
        body.messages,
        tools,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        response_format=schema_of(body),
        template_kwargs=body.chat_template_kwargs,
    )
    truncation = read_truncation(ctx, body)
    ids = await ctx.tokenize(text, True, "messages", None if truncation is None else MAX_TRUNCATED)
    if truncation is None:
        return text, ids, tools
    cut = truncation.cut(Prompt("messages", ids, text), ctx.front.tokenizer)
    return cut.text or "", cut.ids, tools


async def render_text(ctx: AppContext, messages: Sequence[Any], tools: Sequence[Any] | None, **options: Any) -> str:
    """options: of `ChatEncoder.encode`. Raises InvalidRequest."""
    _check_count("messages", messages, MAX_MESSAGES)
    _check_count("tools", tools, MAX_TOOLS)
    encode = partial(ctx.chat.encoder.encode, messages, tools or None, **options)
    return await ctx.on_thread(encode) if len(messages) > MANY_MESSAGES else encode()


def _check_count(field: str, values: Sequence[Any] | None, limit: int) -> None:
    if values and len(values) > limit:
        raise InvalidRequest(field, f"are {len(values)}: at most {limit} in one request")


def _params(ctx: AppContext, body: ChatRequest) -> SamplingParams:
    if body.logprobs not in (None, 0, 1):
        raise InvalidRequest("logprobs", f"must be true or false (top_logprobs is the number), got {body.logprobs}")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    parsed = ctx.chat.formats.reasoning or ctx.chat.formats.tools  # the parsers read special tokens
    return sampling_params(
        body,
        ctx.defaults,
        max_tokens=asked_tokens(body)[1],
        min_tokens=given(body.min_tokens, 0),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False and not parsed,
        logprobs=given(body.top_logprobs, 0) if body.logprobs else None,
        logprob_token_ids=listed_ids(body),
        prompt_logprobs=body.prompt_logprobs,
    )


def _tools(ctx: AppContext, body: ChatRequest) -> Sequence[dict[str, Any]]:
    """The tools that the model may call. Raises InvalidRequest for tools that the prompt cannot show."""
    read_tool_choice(body)
    if not body.tools or body.tool_choice == "none":
        return ()
    if why := ctx.chat.no_tools:
        raise InvalidRequest("tools", why)
    return body.tools


def _parser(
    ctx: AppContext, body: ChatRequest, text: str, tools: Sequence[dict[str, Any]]
) -> Callable[..., AnswerParser]:
    """Makes the parsers of the answers. Without tools a call is text, without its special tokens."""
    inside = is_in_thought(text)
    inside = False if inside is None and body.continue_final_message else inside  # a continued text is no thought
    return partial(
        AnswerParser,
        None if body.separate_reasoning is False else ctx.chat.formats.reasoning,
        ctx.chat.formats.tools,
        thinking=wants_thinking(None, body.chat_template_kwargs),
        inside=inside,
        functions=read_tools(tools),
        offered=bool(tools),
        hold=not body.stream,
    )


class DeltaFunctionCall(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class DeltaToolCall(msgspec.Struct):
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: DeltaFunctionCall = msgspec.field(default_factory=DeltaFunctionCall)


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None
    reasoning: str | None = None  # the thought, under vLLM's and OpenRouter's name
    reasoning_content: str | None = None  # the same, under DeepSeek's and SGLang's
    tool_calls: list[DeltaToolCall] | None = None


class DeltaMessage(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChatChoice(OpenAIChoice, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(OpenAIChoice, kw_only=True):
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None


class ChatChoiceEncoder(ChoiceEncoder[ChatRequest]):
    """parser: of this choice alone."""

    def __init__(
        self, tokenizer: Tokenizer, body: ChatRequest, index: int, prompt: PromptJob, parser: AnswerParser
    ) -> None:
        super().__init__(tokenizer, body, index, prompt)
        self._parser = parser
        self._thought = ThoughtCounter(tokenizer, parser)
        self._hides_thought, self._hidden = body.include_reasoning is False, 0  # tokens of the piece

    @property
    def reasoning_tokens(self) -> int:
        return self._thought.tokens

    @property
    def _echo(self) -> str:
        """The text that the content begins with."""
        last = self.body.messages[-1]
        content = last.get("content") if self.body.echo and last.get("role") == "assistant" else None
        return content if isinstance(content, str) else ""

    def _parse(self, piece: Piece) -> list[Event]:
        events = self._parser.feed(piece.text, piece.finish)
        thought = self._thought.add(piece.ids)
        if self._hides_thought:
            self._hidden = thought
            events = [event for event in events if event.part.kind is not PartKind.REASONING]
        return events

    def feed(self, piece: Piece) -> list[ChatChunkChoice]:
        """Empty while the parser holds its text back. The first chunk has the role."""
        deltas, logprobs = _deltas(self._parse(piece)), self._logprobs(piece)
        has_more = self.first or piece.finish is not None or logprobs is not None or self.body.return_token_ids
        if not deltas and has_more:
            deltas = [DeltaMessage()]
        chunks = [ChatChunkChoice(index=self.index, delta=delta) for delta in deltas]
        if chunks:
            if self.first:
                delta = chunks[0].delta
                delta.role = "assistant"
                if delta.content is UNSET and delta.reasoning is UNSET or self._echo:
                    delta.content = self._echo + (delta.content or "")
            chunks[0].logprobs = logprobs
            self.fill(chunks[0], chunks[-1], piece)
        return chunks

    def whole(self, piece: Piece) -> ChatChoice:
        self._parse(piece)
        answer = self._parser.answer
        calls = [
            DeltaToolCall(id=call.id, type="function", function=DeltaFunctionCall(call.name, call.arguments))
            for call in answer.calls
        ]
        reasoning = None if self._hides_thought else answer.reasoning
        content = answer.content if reasoning or calls else answer.content or ""
        content = self._echo + (content or "") if self._echo else content
        message = ChatMessage("assistant", content, reasoning, reasoning, calls or None)
        choice = ChatChoice(index=self.index, message=message, logprobs=self._logprobs(piece))
        self.fill(choice, choice, piece)
        return choice

    def fill(self, first: OpenAIChoice, last: OpenAIChoice, piece: Piece) -> None:
        super().fill(first, last, piece)
        if piece.finish == "stop" and self._parser.answer.has_calls:
            last.finish_reason = "tool_calls"

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        ids, scores = piece.ids[self._hidden :], piece.logprobs[self._hidden :]
        if not self.body.logprobs or not ids:
            return None
        listed = len(self.body.logprob_token_ids or ())
        top = listed or given(self.body.top_logprobs, 0)
        return chat_logprobs(self.names, ids, scores, top, has_own=bool(listed))


class ThoughtCounter:
    """Counts the tokens of one choice's thought, without its marks."""

    def __init__(self, tokenizer: Tokenizer, parser: AnswerParser) -> None:
        self.tokens = 0
        self._tokenizer, self._parser, self._ended = tokenizer, parser, not parser.is_thinking
        self._marks = [tokenizer.mark_id(mark) for mark in ("<think>", "</think>")]

    def add(self, ids: Sequence[int]) -> int:
        """ids: the tokens that the parser has just been fed. Returns how many are the thought's or its marks."""
        if self._ended:
            return 0
        (start, end), before = self._marks, self.tokens
        thought = ids[: ids.index(end)] if end in ids else ids
        self.tokens += len(thought) - (start in thought)
        self._ended = end in ids or not self._parser.is_thinking
        if self._ended:
            answer = self._parser.answer.reasoning
            if end not in ids:  # there was no thought, a tool call ended it, or its marks are several tokens
                self.tokens = len(self._tokenizer.encode(answer, False)) if answer else 0
            else:
                return ids.index(end) + 1
        return max(self.tokens - before, 0) if self._ended else len(ids)


def _deltas(events: Sequence[Event]) -> list[DeltaMessage]:
    """One delta for the text, then one for each changed call: some clients read only the first call of a chunk."""
    if len(events) == 1 and events[0].type == "delta" and events[0].part.kind is PartKind.TEXT:  # nearly always
        return [DeltaMessage(content=events[0].text)]
    texts = {PartKind.TEXT: "", PartKind.REASONING: ""}
    calls: dict[int, DeltaToolCall] = {}
    for event in events:
        part = event.part
        if part.kind is not PartKind.CALL:
            texts[part.kind] += event.text
        elif event.type == "open":
            calls[part.number] = DeltaToolCall(part.number, part.id, "function", DeltaFunctionCall(part.name))
        elif event.type == "delta":
            calls.setdefault(part.number, DeltaToolCall(part.number)).function.arguments += event.text
    content, reasoning = texts.values()
    thought = reasoning or UNSET
    text = [DeltaMessage(UNSET, content or UNSET, thought, thought)] if content or reasoning else []
    return [*text, *(DeltaMessage(tool_calls=[call]) for call in calls.values())]


_SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "cache_salt",
    "priority",
)


class ChatConversion:
    """parameters: the API's name for the schema of a tool. names: the chat request's fields → the API's."""

    def __init__(self, parameters: str, names: Mapping[str, str]) -> None:
        self._parameters, self._names = parameters, names
        self.messages: list[dict[str, Any]] = []
        self.fields: list[str] = []  # where each message comes from

    def add(self, field: str, role: str, **rest: Any) -> None:
        self.messages.append({"role": role, **rest})
        self.fields.append(field)

    def chat_request(self, body: msgspec.Struct, **different: Any) -> ChatRequest:
        """The chat request with the messages so far. different: the fields that the API spells differently."""
        same = {name: getattr(body, name) for name in _SAME if name in body.__struct_fields__}
        return ChatRequest(messages=self.messages, **same, **different)

    def client_field(self, field: str) -> str:
        """The client's name of a field of the chat request."""
        if field.startswith("messages["):
            return self.fields[int(field[len("messages[") :].partition("]")[0])]
        if field.startswith("tools["):
            return field.replace(".function.parameters", "." + self._parameters).replace(".function", "")
        known = max((name for name in self._names if f"{field}.".startswith(f"{name}.")), key=len, default="")
        return self._names[known] + field.removeprefix(known) if known else field


def tool_call(id: str, name: str, arguments: object) -> dict[str, Any]:
    """A call in an assistant's message. arguments: an object, or its JSON."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(**function: Any) -> dict[str, Any]:
    """A tool of a chat request. Fields that are None are left out."""
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
