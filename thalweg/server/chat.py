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
from thalweg.server.account import account_of
from thalweg.server.contract import Piece
from thalweg.server.desk import Desk, Job, allowance_of, check, collect, gone, prompt_fields, reply, run, salt_of
from thalweg.server.protocol import ChatRequest, TokenizeRequest
from thalweg.server.reading import named, read
from thalweg.server.replies import Answer, Envelope, Tally
from thalweg.server.sampling import given, openai_params
from thalweg.server.speaker import Speaker
from thalweg.server.stream import EventStream, Writer
from thalweg.server.structure import chat_grammar, forced_name, schema_of
from thalweg.text.chat import wants_thinking
from thalweg.text.messages import read_tools
from thalweg.text.parser import Parser, opens_thought

MAX_MESSAGES = 16384
MAX_TOOLS = 1024
MANY_MESSAGES = 256  # from which a conversation is rendered on a thread
MAX_TOKENIZED = 1 << 18  # tokens that one request to /tokenize or /detokenize may have
_decoder = msgspec.json.Decoder(ChatRequest)
_tokenize = msgspec.json.Decoder(TokenizeRequest)


async def chat_completions(desk: Desk, request: Request) -> Response:
    started = time.time()
    body = read(await request.body(), _decoder)
    model = desk.model(body.model)
    turn = await prepare(desk, body, request, started)
    rid, prompt, n = turn.rid, turn.prompt, turn.params.n
    speakers = [Speaker(desk.front.tokenizer, body, i, prompt, turn.parser()) for i in range(n)]
    tally = Tally(n, body.return_draft_usage)
    id, created, include_usage = f"chatcmpl-{rid}", int(started), body.usage_wanted

    async def stream(writer: Writer) -> None:
        envelope = Envelope(id, "chat.completion.chunk", created, model, include_usage)

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

        await run(desk, turn.job, take)
        if include_usage:
            writer.hold(envelope.usage(tally.usage))

    if body.stream:
        return EventStream(desk.meters, stream)
    ended = await collect(desk, turn.job, request.receive)
    if ended is None:
        return gone()
    for i, piece in enumerate(ended):
        tally.ended(i, piece)
    choices = [speaker.whole(piece) for speaker, piece in zip(speakers, ended, strict=True)]
    answer = Answer(id, "chat.completion", created, model, choices, tally.usage)
    if body.return_token_ids:
        answer.prompt_token_ids = list(prompt)
    return reply(answer)


@dataclass(frozen=True, slots=True)
class Turn:
    """An answer that a conversation asks for, checked. prompt: token ids. parser: makes the parser of each choice."""

    job: Job
    rid: str
    prompt: Sequence[int]
    params: SamplingParams
    parser: Callable[[], Parser]


async def prepare(desk: Desk, body: ChatRequest, request: Request, started: float) -> Turn:
    """What every API that talks in messages asks of the front. Raises InvalidRequest, Overloaded, EngineDead."""
    params = _params(desk, body)
    text, prompt, tools = await render(desk, body)
    rid = desk.rid(body.rid, request)
    grammar = chat_grammar(body, desk.chat.formats, desk.front.tokenizer.mark_id, text)
    await desk.examiner.check(grammar)
    salt = salt_of(request, body.cache_salt)
    job = Job(
        (prompt,),
        (params,),
        (rid,),
        ("messages",),
        given(body.priority, 0),
        salt,
        started,
        (grammar,),
        allowance_of(request),
        account_of(request),
        desk.history.keep(text, body.chat_template_kwargs, bool(tools)),
    )
    with named(
        max_tokens="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs="top_logprobs",
    ):
        check(desk, job)
    return Turn(job, rid, prompt, params, _parser(desk, body, text, tools))


async def render(desk: Desk, body: ChatRequest) -> tuple[str, list[int], Sequence[dict[str, Any]]]:
    """The prompt as text and as token ids, and the tools that it offers. Raises InvalidRequest."""
    tools = _tools(desk, body)
    _check_many(body.messages, body.tools)
    text = await _aside_if_long(desk, body.messages, partial(_encode, desk, body, tools))
    return text, await desk.tokens(text, True, "messages", desk.context), tools


async def tokenize(desk: Desk, request: Request) -> Response:
    body = read(await request.body(), _tokenize)
    desk.model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "give either prompt or messages, and not both")
    context = None if desk.front.ready is None else desk.front.ready.context
    special = body.add_special_tokens is not False
    if isinstance(body.prompt, list):
        fields, room = prompt_fields("prompt", len(body.prompt)), MAX_TOKENIZED
        lists: list[list[int]] = []
        for one, field in zip(body.prompt, fields, strict=True):
            lists.append(await desk.tokens(one, special, field, room))
            room = max(room - len(lists[-1]), 0)
        return reply({"tokens": lists, "count": [len(ids) for ids in lists], "max_model_len": context})
    text, field = body.prompt, "prompt"
    if text is None:
        messages, field = given(body.messages, []), "messages"
        _check_many(messages, body.tools)
        rendering = partial(
            desk.chat.encoder.encode,
            messages,
            body.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
        )
        text = await _aside_if_long(desk, messages, rendering)
    ids = await desk.tokens(text, special, field, MAX_TOKENIZED)
    return reply({"tokens": ids, "count": len(ids), "max_model_len": context})


def _check_many(messages: Sequence[Any], tools: Sequence[Any] | None) -> None:
    for name, values, most in (("messages", messages, MAX_MESSAGES), ("tools", tools or (), MAX_TOOLS)):
        if len(values) > most:
            raise InvalidRequest(name, f"are {len(values)}: at most {most} in one request")


async def _aside_if_long(desk: Desk, messages: Sequence[Any], rendering: Callable[[], str]) -> str:
    return await desk.aside(rendering) if len(messages) > MANY_MESSAGES else rendering()


def _params(desk: Desk, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    max_tokens = given(body.max_completion_tokens, body.max_tokens)
    logprobs = given(body.top_logprobs, 0) if body.logprobs else None
    params = openai_params(body, desk.defaults, max_tokens, logprobs, body.prompt_logprobs)
    formats = desk.chat.formats
    if formats.reasoning or formats.tools:  # the parsers read the markup, which is made of special tokens
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    return params


def _tools(desk: Desk, body: ChatRequest) -> Sequence[dict[str, Any]]:
    """The tools that the model may call. Raises InvalidRequest for what would not be honoured."""
    forced_name(body)
    if not body.tools or body.tool_choice == "none":
        return ()
    if not desk.chat.encoder.renders_tools:
        raise InvalidRequest(
            "tools",
            "this model's chat template has no place for tools: leave them out, or give another --chat-template",
        )
    return body.tools


def _encode(desk: Desk, body: ChatRequest, tools: Sequence[dict[str, Any]]) -> str:
    return desk.chat.encoder.encode(
        body.messages,
        tools or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        response_format=schema_of(body),
        template_kwargs=body.chat_template_kwargs,
    )


def _parser(desk: Desk, body: ChatRequest, text: str, tools: Sequence[dict[str, Any]]) -> Callable[[], Parser]:
    """Makes the parsers of the answers to a prompt. Where no tools were offered a call is text, without its special
    tokens.
    """
    formats = desk.chat.formats
    return partial(
        Parser,
        None if body.separate_reasoning is False else formats.reasoning,
        formats.tools,
        thinking=wants_thinking(None, body.chat_template_kwargs),
        inside=opens_thought(text)
        or (False if body.continue_final_message else None),  # what is continued is no thought
        functions=read_tools(tools),
        offered=bool(tools),
        hold=not body.stream,
    )
