"""A response as OpenAI writes it: numbered events around output items, each stream closing with the whole response."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from thalweg.engine.streams import Piece
from thalweg.server.content_parts import (
    ContentPart,
    PartBuilder,
    PartClosed,
    PartDelta,
    PartEvent,
    PartKind,
    PartOpened,
)
from thalweg.server.errors import ErrorInfo
from thalweg.server.responses.protocol import (
    CallAnswer,
    Incomplete,
    InputDetails,
    ItemAnswer,
    OutputDetails,
    OutputMessage,
    OutputText,
    ReasoningAnswer,
    ReasoningText,
    ResponseAnswer,
    ResponseError,
    ResponsesUsage,
    Status,
)
from thalweg.text.parser import AnswerParser

_encode = msgspec.json.Encoder().encode
_PREFIXES = {PartKind.TEXT: "msg_", PartKind.THOUGHT: "rs_", PartKind.CALL: "fc_"}
_NAMES = {PartKind.TEXT: "output_text", PartKind.THOUGHT: "reasoning_text", PartKind.CALL: "function_call_arguments"}
_ENDS: dict[str | None, Status] = {"stop": "completed", "length": "incomplete"}


class ResponsesStreamEncoder:
    """Writes one response. response: as it stands before the first token. parser: fresh, for this answer alone."""

    def __init__(self, response: ResponseAnswer, parser: AnswerParser) -> None:
        self.response = response
        self._composer = PartBuilder(parser)
        self._ids: list[str] = []
        self._sequence = 0

    @property
    def parts(self) -> list[ContentPart]:
        return self._composer.parts

    @property
    def thought(self) -> str:
        return "".join(part.text for part in self.parts if part.kind is PartKind.THOUGHT)

    def feed(self, piece: Piece) -> bytes:
        """The events that a piece makes, but for the last one."""
        begin = b""
        if self._sequence == 0:
            begin = self._event("response.created", response=self.response)
            begin += self._event("response.in_progress", response=self.response)
        return begin + b"".join([self._change(change) for change in self._composer.feed(piece)])

    def take(self, piece: Piece) -> None:
        """Takes an answer that came in one piece."""
        self._composer.feed(piece)
        self._ids = [_new_id(part) for part in self.parts]

    def end(self, piece: Piece, reasoning_tokens: int) -> None:
        """Makes `response` what it is after the last piece."""
        response, status = self.response, _ENDS.get(piece.finish, "cancelled")
        response.status = status
        response.incomplete_details = Incomplete() if status == "incomplete" else None
        response.output = [self._item(part, "completed") for part in self.parts]
        if response.output and status != "completed":
            response.output[-1].status = "incomplete"
        response.usage = ResponsesUsage(
            piece.prompt_tokens,
            InputDetails(piece.cached_tokens),
            piece.completion_tokens,
            OutputDetails(reasoning_tokens),
            piece.prompt_tokens + piece.completion_tokens,
        )

    def last(self) -> bytes:
        """The last event of a stream, after `end`."""
        name = "response.completed" if self.response.status == "completed" else "response.incomplete"
        return self._event(name, response=self.response)

    def failed(self, problem: ErrorInfo) -> bytes:
        """The last event of a stream that an error ended."""
        self.response.status, self.response.error = "failed", ResponseError(problem.message)
        self.response.output = [self._item(part, "incomplete") for part in self.parts]
        return self._event("response.failed", response=self.response)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = _encode({"type": name, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"

    def _change(self, change: PartEvent) -> bytes:
        part = change.part
        if isinstance(change, PartOpened):
            self._ids.append(_new_id(part))
            item = self._item(part, "in_progress")
            if not isinstance(item, CallAnswer):
                item.content = []
            added = self._event("response.output_item.added", output_index=part.index, item=item)
            return added + self._content("response.content_part.added", part, "")
        if isinstance(change, PartDelta):
            more = {"logprobs": ()} if part.kind is PartKind.TEXT else {}
            return self._of(part, f"response.{_NAMES[part.kind]}.delta", delta=change.text, **more)
        return self._close(change)

    def _close(self, change: PartClosed) -> bytes:
        part, name = change.part, f"response.{_NAMES[change.part.kind]}.done"
        if part.kind is PartKind.CALL:
            done = self._of(part, name, name=part.name, arguments=part.text)
        else:
            done = self._of(part, name, text=part.text, **({"logprobs": ()} if part.kind is PartKind.TEXT else {}))
        done += self._content("response.content_part.done", part, part.text)
        item = self._item(part, "completed")
        return done + self._event("response.output_item.done", output_index=part.index, item=item)

    def _content(self, name: str, part: ContentPart, text: str) -> bytes:
        if part.kind is PartKind.CALL:
            return b""
        content = OutputText(text) if part.kind is PartKind.TEXT else ReasoningText(text)
        return self._of(part, name, part=content)

    def _of(self, part: ContentPart, event: str, /, **fields: Any) -> bytes:
        """An event about the inside of an item."""
        place = {} if part.kind is PartKind.CALL else {"content_index": 0}
        return self._event(event, item_id=self._ids[part.index], output_index=part.index, **place, **fields)

    def _item(self, part: ContentPart, status: Status) -> ItemAnswer:
        id = self._ids[part.index]
        if part.kind is PartKind.TEXT:
            return OutputMessage(id, [OutputText(part.text)], status)
        if part.kind is PartKind.THOUGHT:
            return ReasoningAnswer(id, [ReasoningText(part.text)], status)
        return CallAnswer(id, part.id, part.name, part.text, status)


def _new_id(part: ContentPart) -> str:
    return _PREFIXES[part.kind] + uuid.uuid4().hex
