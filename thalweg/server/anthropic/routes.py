"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from thalweg.server.anthropic.convert import chat_of
from thalweg.server.anthropic.protocol import Conversation, MessagesRequest, TokenCount
from thalweg.server.anthropic.stream import MessagesStreamEncoder
from thalweg.server.chat import prepare_chat, render
from thalweg.server.context import AppContext, reply
from thalweg.server.conversion import ChatConversion
from thalweg.server.parsing import renamed
from thalweg.server.stream import respond

_NAMES = {  # of the chat request's fields, in this API
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "tool_choice.function": "tool_choice",
}


async def messages(ctx: AppContext, request: Request, body: MessagesRequest) -> Response:
    """Anthropic's Messages API: an answer to a conversation."""
    model, conversion = ctx.model(body.model), ChatConversion("input_schema", _NAMES)
    chat = chat_of(body, conversion)
    job, new_parser = await prepare_chat(ctx, request, chat, conversion.client_field)
    encoder = MessagesStreamEncoder(f"msg_{job.prompts[0].rid}", model, new_parser())
    return await respond(ctx, request, job, encoder, body.stream)


async def count_tokens(ctx: AppContext, request: Request, body: Conversation) -> Response:
    """The number of prompt tokens of a conversation."""
    ctx.model(body.model)
    conversion = ChatConversion("input_schema", _NAMES)
    chat = chat_of(body, conversion)
    with renamed(conversion.client_field):
        _, ids, _ = await render(ctx, chat)
    return reply(TokenCount(len(ids)))
