"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from thalweg.server.anthropic.convert import chat_of
from thalweg.server.anthropic.events import Narrator, error_event
from thalweg.server.anthropic.protocol import Conversation, MessagesRequest, TokenCount
from thalweg.server.chat import prepare, render
from thalweg.server.contract import Piece
from thalweg.server.desk import Desk, collect, gone, reply, run
from thalweg.server.draft import Draft
from thalweg.server.reading import read
from thalweg.server.stream import EventStream, Writer

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


async def messages(desk: Desk, request: Request) -> Response:
    """Anthropic's Messages API: an answer to a conversation."""
    started = time.time()
    body = read(await request.body(), _messages)
    model, draft = desk.model(body.model), Draft("input_schema", _NAMES)
    chat = chat_of(body, draft)
    with draft.named():
        turn = await prepare(desk, chat, request, started)
    narrator = Narrator(f"msg_{turn.rid}", model, turn.parser())

    async def stream(writer: Writer) -> None:
        async def take(choice: int, piece: Piece) -> None:
            if events := narrator.feed(piece):
                await writer.write(events, piece.at)

        with draft.named():
            await run(desk, turn.job, take)

    if body.stream:
        return EventStream(desk.meters, stream, done=b"", failed=error_event)
    with draft.named():
        ended = await collect(desk, turn.job, request.receive)
    return gone() if ended is None else reply(narrator.whole(ended[0]))


async def count_tokens(desk: Desk, request: Request) -> Response:
    """How many tokens the model would read of a conversation."""
    body = read(await request.body(), _conversation)
    desk.model(body.model)
    draft = Draft("input_schema", _NAMES)
    chat = chat_of(body, draft)
    with draft.named():
        _, ids, _ = await render(desk, chat)
    return reply(TokenCount(len(ids)))
