"""A response as OpenAI writes it: numbered events around output items, each stream closing with the whole response."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from thalweg.server.contract import Piece
from thalweg.server.errors import Problem
from thalweg.server.parts import Change, Closed, Composer, Grew, Kind, Opened, Part
from thalweg.server.responses.protocol import (
    CallAnswer,
    Incomplete,
    InputDetails,
    ItemAnswer,
    MessageAnswer,
    OutputDetails,
    OutputText,
    ReasoningAnswer,
    ReasoningText,
    ResponseAnswer,
    ResponseError,
    Status,
    Usage,
)
from thalweg.text.parser import Parser

_encode = msgspec.json.Encoder().encode
_PREFIXES = {Kind.TEXT: "msg_", Kind.THOUGHT: "rs_", Kind.CALL: "fc_"}
_NAMES = {Kind.TEXT: "output_text", Kind.THOUGHT: "reasoning_text", Kind.CALL: "function_call_arguments"}
_ENDS: dict[str | None, Status] = {"stop": "completed", "length": "incomplete"}


class Narrator:
    """Writes one response. response: as it stands before the first token. parser: fresh, for this answer alone."""

    def __init__(self, response: ResponseAnswer, parser: Parser) -> None:
        self.response = response
        self._composer = Composer(parser)
        self._ids: list[str] = []
        self._sequence = 0

    @property
    def parts(self) -> list[Part]:
        return self._composer.parts

    @property
    def thought(self) -> str:
        return "".join(part.text for part in self.parts if part.kind is Kind.THOUGHT)

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
        response.usage = Usage(
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

    def failed(self, problem: Problem) -> bytes:
        """The last event of a stream that an error ended."""
        self.response.status, self.response.error = "failed", ResponseError(problem.message)
        self.response.output = [self._item(part, "incomplete") for part in self.parts]
        return self._event("response.failed", response=self.response)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = _encode({"type": name, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"

    def _change(self, change: Change) -> bytes:
        part = change.part
        if isinstance(change, Opened):
            self._ids.append(_new_id(part))
            item = self._item(part, "in_progress")
            if not isinstance(item, CallAnswer):
                item.content = []
            added = self._event("response.output_item.added", output_index=part.index, item=item)
            return added + self._content("response.content_part.added", part, "")
        if isinstance(change, Grew):
            more = {"logprobs": ()} if part.kind is Kind.TEXT else {}
            return self._of(part, f"response.{_NAMES[part.kind]}.delta", delta=change.text, **more)
        return self._close(change)

    def _close(self, change: Closed) -> bytes:
        part, name = change.part, f"response.{_NAMES[change.part.kind]}.done"
        if part.kind is Kind.CALL:
            done = self._of(part, name, name=part.name, arguments=part.text)
        else:
            done = self._of(part, name, text=part.text, **({"logprobs": ()} if part.kind is Kind.TEXT else {}))
        done += self._content("response.content_part.done", part, part.text)
        item = self._item(part, "completed")
        return done + self._event("response.output_item.done", output_index=part.index, item=item)

    def _content(self, name: str, part: Part, text: str) -> bytes:
        if part.kind is Kind.CALL:
            return b""
        content = OutputText(text) if part.kind is Kind.TEXT else ReasoningText(text)
        return self._of(part, name, part=content)

    def _of(self, part: Part, event: str, /, **fields: Any) -> bytes:
        """An event about the inside of an item."""
        place = {} if part.kind is Kind.CALL else {"content_index": 0}
        return self._event(event, item_id=self._ids[part.index], output_index=part.index, **place, **fields)

    def _item(self, part: Part, status: Status) -> ItemAnswer:
        id = self._ids[part.index]
        if part.kind is Kind.TEXT:
            return MessageAnswer(id, [OutputText(part.text)], status)
        if part.kind is Kind.THOUGHT:
            return ReasoningAnswer(id, [ReasoningText(part.text)], status)
        return CallAnswer(id, part.id, part.name, part.text, status)


def _new_id(part: Part) -> str:
    return _PREFIXES[part.kind] + uuid.uuid4().hex
