"""POST /v1/chat/completions, and /tokenize, which renders the same prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.errors import InvalidRequest
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Piece
from thalweg.server.accounting import accounting_of
from thalweg.server.chat_stream import ChatStreamEncoder
from thalweg.server.context import (
    AppContext,
    GenerationJob,
    check,
    collect,
    gone,
    prompt_fields,
    quota_of,
    reply,
    run,
    salt_of,
)
from thalweg.server.openai_responses import ChunkEnvelope, OpenAIResponse, UsageCounter
from thalweg.server.parsing import named, read
from thalweg.server.protocol import ChatRequest, TokenizeRequest
from thalweg.server.sampling import given, openai_params
from thalweg.server.stream import EventStream, EventWriter
from thalweg.server.structured_output import chat_grammar, forced_name, schema_of
from thalweg.text.chat import wants_thinking
from thalweg.text.messages import read_tools
from thalweg.text.parser import AnswerParser, opens_thought

MAX_MESSAGES = 16384
MAX_TOOLS = 1024
MANY_MESSAGES = 256  # from which a conversation is rendered on a thread
MAX_TOKENIZED = 1 << 18  # tokens that one request to /tokenize or /detokenize may have
_decoder = msgspec.json.Decoder(ChatRequest)
_tokenize = msgspec.json.Decoder(TokenizeRequest)


async def chat_completions(ctx: AppContext, request: Request) -> Response:
    started = time.time()
    body = read(await request.body(), _decoder)
    model = ctx.model(body.model)
    turn = await prepare(ctx, body, request, started)
    rid, prompt, n = turn.rid, turn.prompt, turn.params.n
    speakers = [ChatStreamEncoder(ctx.front.tokenizer, body, i, prompt, turn.parser()) for i in range(n)]
    tally = UsageCounter(n, body.return_draft_usage)
    id, created, include_usage = f"chatcmpl-{rid}", int(started), body.usage_wanted

    async def stream(writer: EventWriter) -> None:
        envelope = ChunkEnvelope(id, "chat.completion.chunk", created, model, include_usage)

        async def take(choice: int, piece: Piece) -> None:
            if piece.finish is not None:
                tally.ended(choice, piece)
            chunks = speakers[choice].feed(piece)
            if not chunks:
                return
            events = b"".join([envelope.chunk(chunk) for chunk in chunks])
            if piece.finish is not None and n == 1:
                writer.hold(events, piece.at)
            else:
                await writer.write(events, piece.at)

        await run(ctx, turn.job, take)
        if include_usage:
            writer.hold(envelope.usage(tally.usage))

    if body.stream:
        return EventStream(ctx.metrics, stream)
    ended = await collect(ctx, turn.job, request.receive)
    if ended is None:
        return gone()
    for i, piece in enumerate(ended):
        tally.ended(i, piece)
    choices = [speaker.whole(piece) for speaker, piece in zip(speakers, ended, strict=True)]
    answer = OpenAIResponse(id, "chat.completion", created, model, choices, tally.usage)
    if body.return_token_ids:
        answer.prompt_token_ids = list(prompt)
    return reply(answer)


@dataclass(frozen=True, slots=True)
class ChatJob:
    """An answer that a conversation asks for, checked. prompt: token ids. parser: makes the parser of each choice."""

    job: GenerationJob
    rid: str
    prompt: Sequence[int]
    params: SamplingParams
    parser: Callable[[], AnswerParser]


async def prepare(ctx: AppContext, body: ChatRequest, request: Request, started: float) -> ChatJob:
    """What every API that talks in messages asks of the front. Raises InvalidRequest, Overloaded, EngineDead."""
    params = _params(ctx, body)
    text, prompt, tools = await render(ctx, body)
    rid = ctx.rid(body.rid, request)
    grammar = chat_grammar(body, ctx.chat.formats, ctx.front.tokenizer.mark_id, text)
    await ctx.grammar_checker.check(grammar)
    salt = salt_of(request, body.cache_salt)
    job = GenerationJob(
        (prompt,),
        (params,),
        (rid,),
        ("messages",),
        given(body.priority, 0),
        salt,
        started,
        (grammar,),
        quota_of(request),
        accounting_of(request),
        ctx.history.keep(text, body.chat_template_kwargs, bool(tools)),
    )
    with named(
        max_tokens="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs="top_logprobs",
    ):
        check(ctx, job)
    return ChatJob(job, rid, prompt, params, _parser(ctx, body, text, tools))


async def render(ctx: AppContext, body: ChatRequest) -> tuple[str, list[int], Sequence[dict[str, Any]]]:
    """The prompt as text and as token ids, and the tools that it offers. Raises InvalidRequest."""
    tools = _tools(ctx, body)
    _check_many(body.messages, body.tools)
    text = await _aside_if_long(ctx, body.messages, partial(_encode, ctx, body, tools))
    return text, await ctx.tokens(text, True, "messages", ctx.context), tools


async def tokenize(ctx: AppContext, request: Request) -> Response:
    body = read(await request.body(), _tokenize)
    ctx.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "give either prompt or messages, and not both")
    context = None if ctx.front.ready is None else ctx.front.ready.context
    special = body.add_special_tokens is not False
    if isinstance(body.prompt, list):
        fields, room = prompt_fields("prompt", len(body.prompt)), MAX_TOKENIZED
        lists: list[list[int]] = []
        for one, field in zip(body.prompt, fields, strict=True):
            lists.append(await ctx.tokens(one, special, field, room))
            room = max(room - len(lists[-1]), 0)
        return reply({"tokens": lists, "count": [len(ids) for ids in lists], "max_model_len": context})
    text, field = body.prompt, "prompt"
    if text is None:
        messages, field = given(body.messages, []), "messages"
        _check_many(messages, body.tools)
        rendering = partial(
            ctx.chat.encoder.encode,
            messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
        )
        text = await _aside_if_long(ctx, messages, rendering)
    ids = await ctx.tokens(text, special, field, MAX_TOKENIZED)
    return reply({"tokens": ids, "count": len(ids), "max_model_len": context})


def _check_many(messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
    for name, values, most in (("messages", messages, MAX_MESSAGES), ("tools", tools or (), MAX_TOOLS)):
        if len(values) > most:
            raise InvalidRequest(name, f"are {len(values)}: at most {most} in one request")


async def _aside_if_long(ctx: AppContext, messages: Sequence[Any], rendering: Callable[[], str]) -> str:
    return await ctx.aside(rendering) if len(messages) > MANY_MESSAGES else rendering()


def _params(ctx: AppContext, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    max_tokens = given(body.max_completion_tokens, body.max_tokens)
    logprobs = given(body.top_logprobs, 0) if body.logprobs else None
    params = openai_params(body, ctx.defaults, max_tokens, logprobs, body.prompt_logprobs)
    formats = ctx.chat.formats
    if formats.reasoning or formats.tools:  # the parsers read the markup, which is made of special tokens
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    return params


def _tools(ctx: AppContext, body: ChatRequest) -> Sequence[dict[str, Any]]:
    """The tools that the model may call. Raises InvalidRequest for what would not be honoured."""
    forced_name(body)
    if not body.tools or body.tool_choice == "none":
        return ()
    if not ctx.chat.encoder.renders_tools:
        raise InvalidRequest(
            "tools",
            "this model's chat template has no place for tools: leave them out, or give another --chat-template",
        )
    return body.tools


def _encode(ctx: AppContext, body: ChatRequest, tools: Sequence[dict[str, Any]]) -> str:
    return ctx.chat.encoder.encode(
        body.messages,
        tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        response_format=schema_of(body),
        template_kwargs=body.chat_template_kwargs,
    )


def _parser(
    ctx: AppContext, body: ChatRequest, text: str, tools: Sequence[dict[str, Any]]
) -> Callable[[], AnswerParser]:
    """Makes the parsers of the answers to a prompt. Where no tools were offered a call is text, without its special
    tokens.
    """
    formats = ctx.chat.formats
    return partial(
        AnswerParser,
        None if body.separate_reasoning is False else formats.reasoning,
        formats.tools,
        thinking=wants_thinking(None, body.chat_template_kwargs),
        inside=opens_thought(text)
        or (False if body.continue_final_message else None),  # what is continued is no thought
        functions=read_tools(tools),
        offered=bool(tools),
        hold=not body.stream,
    )
