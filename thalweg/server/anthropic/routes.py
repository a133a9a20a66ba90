"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from thalweg.engine.streams import Piece
from thalweg.server.anthropic.convert import chat_of
from thalweg.server.anthropic.protocol import Conversation, MessagesRequest, TokenCount
from thalweg.server.anthropic.stream import MessagesStreamEncoder, error_event
from thalweg.server.chat import prepare, render
from thalweg.server.context import AppContext, collect, gone, reply, run
from thalweg.server.conversion import ChatConversion
from thalweg.server.parsing import read
from thalweg.server.stream import EventStream, EventWriter

_messages = msgspec.json.Decoder(MessagesRequest)
_conversation = msgspec.json.Decoder(Conversation)
_NAMES = {  # of the chat request's fields, in this API
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "tool_choice.function": "tool_choice",
}


async def messages(ctx: AppContext, request: Request) -> Response:
    """Anthropic's Messages API: an answer to a conversation."""
    started = time.time()
    body = read(await request.body(), _messages)
    model, conversion = ctx.model(body.model), ChatConversion("input_schema", _NAMES)
    chat = chat_of(body, conversion)
    with conversion.named():
        turn = await prepare(ctx, chat, request, started)
    narrator = MessagesStreamEncoder(f"msg_{turn.rid}", model, turn.parser())

    async def stream(writer: EventWriter) -> None:
        async def take(choice: int, piece: Piece) -> None:
            if events := narrator.feed(piece):
                await writer.write(events, piece.at)

        with conversion.named():
            await run(ctx, turn.job, take)

    if body.stream:
        return EventStream(ctx.metrics, stream, done=b"", failed=error_event)
    with conversion.named():
        ended = await collect(ctx, turn.job, request.receive)
    return gone() if ended is None else reply(narrator.whole(ended[0]))


async def count_tokens(ctx: AppContext, request: Request) -> Response:
    """How many tokens the model would read of a conversation."""
    body = read(await request.body(), _conversation)
    ctx.model(body.model)
    conversion = ChatConversion("input_schema", _NAMES)
    chat = chat_of(body, conversion)
    with conversion.named():
        _, ids, _ = await render(ctx, chat)
    return reply(TokenCount(len(ids)))
