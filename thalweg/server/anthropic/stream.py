"""An answer as Anthropic writes it: a stream of named events around content blocks, or one message."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from thalweg.engine.streams import Piece
from thalweg.server.anthropic.protocol import (
    BlockAnswer,
    MessagesResponse,
    MessagesUsage,
    StopReason,
    TextAnswer,
    ThinkingAnswer,
    ToolUseAnswer,
)
from thalweg.server.content_parts import ContentPart, PartBuilder, PartDelta, PartEvent, PartKind, PartOpened
from thalweg.server.errors import ErrorInfo
from thalweg.text.parser import AnswerParser

_encode = msgspec.json.Encoder().encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **fields}) + b"\n\n"


def error_event(problem: ErrorInfo) -> bytes:
    return b"event: error\ndata: " + problem.anthropic + b"\n\n"


class MessagesStreamEncoder:
    """Writes one answer. parser: fresh, for this answer alone."""

    def __init__(self, id: str, model: str, parser: AnswerParser) -> None:
        self._id, self._model = id, model
        self._composer = PartBuilder(parser)
        self._begun = False

    def feed(self, piece: Piece) -> bytes:
        """The events that a piece makes: none while the parser holds its text back."""
        out: list[bytes] = []
        if not self._begun:
            self._begun = True
            message = MessagesResponse(self._id, self._model, [], None, None, _usage(piece))
            out += event("message_start", message=message), _PING
        out += map(_change, self._composer.feed(piece))
        if piece.finish is not None:
            delta = {"stop_reason": self._reason(piece), "stop_sequence": _stop_sequence(piece)}
            out += event("message_delta", delta=delta, usage=_usage(piece)), event("message_stop")
        return b"".join(out)

    def whole(self, piece: Piece) -> MessagesResponse:
        """The message of an answer that came in one piece."""
        self._composer.feed(piece)
        content = [_block(part) for part in self._composer.parts]
        return MessagesResponse(
            self._id, self._model, content, self._reason(piece), _stop_sequence(piece), _usage(piece)
        )

    def _reason(self, piece: Piece) -> StopReason:
        if piece.finish == "length":
            return "max_tokens"
        if _stop_sequence(piece) is not None:
            return "stop_sequence"
        return "tool_use" if self._composer.called and piece.finish == "stop" else "end_turn"


def _stop_sequence(piece: Piece) -> str | None:
    return piece.stop if isinstance(piece.stop, str) else None


def _usage(piece: Piece) -> MessagesUsage:
    return MessagesUsage(piece.prompt_tokens - piece.cached_tokens, piece.completion_tokens, piece.cached_tokens)


def _block(part: ContentPart) -> BlockAnswer:
    if part.kind is PartKind.TEXT:
        return TextAnswer(part.text)
    if part.kind is PartKind.THOUGHT:
        return ThinkingAnswer(part.text, _signature(part))
    return ToolUseAnswer(part.id, part.name, msgspec.Raw((part.text or "{}").encode()))


def _change(change: PartEvent) -> bytes:
    part = change.part
    if isinstance(change, PartOpened):
        return event("content_block_start", index=part.index, content_block=_empty(part))
    if isinstance(change, PartDelta):
        return _delta(part, **_growth(part, change.text))
    signed = _delta(part, type="signature_delta", signature=_signature(part)) if part.kind is PartKind.THOUGHT else b""
    return signed + event("content_block_stop", index=part.index)


def _delta(part: ContentPart, **delta: str) -> bytes:
    return event("content_block_delta", index=part.index, delta=delta)


def _growth(part: ContentPart, text: str) -> dict[str, str]:
    if part.kind is PartKind.TEXT:
        return {"type": "text_delta", "text": text}
    if part.kind is PartKind.THOUGHT:
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "input_json_delta", "partial_json": text}


def _empty(part: ContentPart) -> BlockAnswer:
    """A block as it stands before its first delta."""
    if part.kind is PartKind.TEXT:
        return TextAnswer("")
    if part.kind is PartKind.THOUGHT:
        return ThinkingAnswer("", "")
    return ToolUseAnswer(part.id, part.name, msgspec.Raw(b"{}"))


def _signature(part: ContentPart) -> str:
    """Not looked at when it comes back: some clients drop thoughts that have none, and a tool loop would lose them."""
    return hashlib.blake2b(part.text.encode("utf-8", "replace"), digest_size=16).hexdigest()
