"""Stream encoder of Anthropic's Messages API: named events around content blocks, or one message."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from thalweg.engine.streams import Piece
from thalweg.server.anthropic.protocol import (
    MessageContent,
    MessagesResponse,
    MessagesUsage,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)
from thalweg.server.content_parts import ContentPart, PartBuilder, PartEvent, PartKind
from thalweg.server.errors import ErrorInfo
from thalweg.server.stream import StreamEncoder
from thalweg.text.parser import AnswerParser

_encode = msgspec.json.Encoder().encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **fields}) + b"\n\n"


class MessagesStreamEncoder(StreamEncoder):
    def __init__(self, id: str, model: str, parser: AnswerParser) -> None:
        self._id, self._model = id, model
        self._builder = PartBuilder(parser)
        self._started = False

    async def feed(self, choice: int, piece: Piece) -> bytes:
        out: list[bytes] = []
        if not self._started:
            self._started = True
            message = MessagesResponse(self._id, self._model, [], None, None, _usage(piece))
            out += _event("message_start", message=message), _PING
        out += map(_part_event, self._builder.feed(piece))
        if piece.finish is not None:
            delta = {"stop_reason": self._stop_reason(piece), "stop_sequence": _stop_sequence(piece)}
            out += _event("message_delta", delta=delta, usage=_usage(piece)), _event("message_stop")
        return b"".join(out)

    async def response(self, pieces: Sequence[Piece]) -> MessagesResponse:
        (piece,) = pieces
        self._builder.feed(piece)
        content = [_content(part, part.text) for part in self._builder.parts]
        reason, stop = self._stop_reason(piece), _stop_sequence(piece)
        return MessagesResponse(self._id, self._model, content, reason, stop, _usage(piece))

    def end(self) -> bytes:
        return b""

    def failed(self, info: ErrorInfo) -> bytes:
        return b"event: error\ndata: " + info.anthropic + b"\n\n"

    def _stop_reason(self, piece: Piece) -> StopReason:
        if piece.finish == "length":
            return "max_tokens"
        if _stop_sequence(piece) is not None:
            return "stop_sequence"
        return "tool_use" if self._builder.calls and piece.finish == "stop" else "end_turn"


def _stop_sequence(piece: Piece) -> str | None:
    return piece.stop if isinstance(piece.stop, str) else None


def _usage(piece: Piece) -> MessagesUsage:
    return MessagesUsage(piece.prompt_tokens - piece.cached_tokens, piece.completion_tokens, piece.cached_tokens)


def _content(part: ContentPart, text: str) -> MessageContent:
    """The part's block. text: of the part, "" in its start event."""
    match part.kind:
        case PartKind.TEXT:
            return TextContent(text)
        case PartKind.REASONING:
            return ThinkingContent(text, _signature(text))
    return ToolUseContent(part.id, part.name, msgspec.Raw((text or "{}").encode()))


def _part_event(event: PartEvent) -> bytes:
    part = event.part
    if event.type == "open":
        return _event("content_block_start", index=part.index, content_block=_content(part, ""))
    if event.type == "delta":
        match part.kind:
            case PartKind.TEXT:
                return _delta(part, type="text_delta", text=event.text)
            case PartKind.REASONING:
                return _delta(part, type="thinking_delta", thinking=event.text)
        return _delta(part, type="input_json_delta", partial_json=event.text)
    is_thought = part.kind is PartKind.REASONING
    signature = _delta(part, type="signature_delta", signature=_signature(part.text)) if is_thought else b""
    return signature + _event("content_block_stop", index=part.index)


def _delta(part: ContentPart, **delta: str) -> bytes:
    return _event("content_block_delta", index=part.index, delta=delta)


def _signature(text: str) -> str:
    """Not checked when it comes back. Some clients drop thoughts without one, which would break tool loops."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).hexdigest() if text else ""
