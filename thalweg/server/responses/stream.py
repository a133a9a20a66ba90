"""Stream encoder of the Responses API: numbered events around output items; the last has the whole response."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from thalweg.engine.streams import Piece
from thalweg.server.content_parts import ContentPart, PartBuilder, PartEvent, PartKind
from thalweg.server.errors import ErrorInfo
from thalweg.server.responses.protocol import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponsesError,
    ResponsesOutput,
    ResponsesResponse,
    ResponsesUsage,
    Status,
)
from thalweg.server.stream import StreamEncoder

_encode = msgspec.json.Encoder().encode
_PREFIXES = {PartKind.TEXT: "msg_", PartKind.REASONING: "rs_", PartKind.CALL: "fc_"}
_NAMES = {PartKind.TEXT: "output_text", PartKind.REASONING: "reasoning_text", PartKind.CALL: "function_call_arguments"}
_STATUSES: dict[str | None, Status] = {"stop": "completed", "length": "incomplete"}


class ResponsesStreamEncoder(StreamEncoder):
    def __init__(
        self,
        state: ResponsesResponse,
        answer: PartBuilder,
        count_tokens: Callable[[str], Awaitable[int]],
        store: Callable[[], None],
    ) -> None:
        """state: the response before the first token. count_tokens: of the reasoning. store: runs when it is done."""
        self.state, self._answer = state, answer
        self._count_tokens, self._store = count_tokens, store
        self._ids: list[str] = []
        self._sequence = 0

    async def feed(self, choice: int, piece: Piece) -> bytes:
        out: list[bytes] = []
        if self._sequence == 0:
            out += (self._event(name, response=self.state) for name in ("response.created", "response.in_progress"))
        out += map(self._part_event, self._answer.feed(piece))
        if piece.finish is not None:
            await self._finish(piece)
            name = "response.completed" if self.state.status == "completed" else "response.incomplete"
            out.append(self._event(name, response=self.state))
        return b"".join(out)

    async def response(self, pieces: Sequence[Piece]) -> ResponsesResponse:
        await self.feed(0, pieces[0])
        return self.state

    def end(self) -> bytes:
        return b""

    def failed(self, info: ErrorInfo) -> bytes:
        self.state.status, self.state.error = "failed", ResponsesError(info.message)
        self.state.output = [self._item(part, "incomplete") for part in self._answer.parts]
        return self._event("response.failed", response=self.state)

    async def _finish(self, piece: Piece) -> None:
        reasoning_tokens = await self._count_tokens(self._answer.text(PartKind.REASONING))
        state, status = self.state, _STATUSES.get(piece.finish, "cancelled")
        state.status = status
        state.incomplete_details = IncompleteDetails() if status == "incomplete" else None
        state.output = [self._item(part, "completed") for part in self._answer.parts]
        if state.output and status != "completed":
            state.output[-1].status = "incomplete"
        state.usage = ResponsesUsage(
            piece.prompt_tokens,
            InputTokensDetails(piece.cached_tokens),
            piece.completion_tokens,
            OutputTokensDetails(reasoning_tokens),
            piece.prompt_tokens + piece.completion_tokens,
        )
        self._store()

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = _encode({"type": name, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"

    def _part_event(self, event: PartEvent) -> bytes:
        part, name = event.part, f"response.{_NAMES[event.part.kind]}"
        logprobs = {"logprobs": ()} if part.kind is PartKind.TEXT else {}
        if event.type == "delta":
            return self._inner_event(part, f"{name}.delta", delta=event.text, **logprobs)
        if event.type == "open":
            self._ids.append(_PREFIXES[part.kind] + uuid.uuid4().hex)
            item = self._item(part, "in_progress")
            if not isinstance(item, OutputCall):
                item.content = []
            added = self._event("response.output_item.added", output_index=part.index, item=item)
            return added + self._content_event("response.content_part.added", part, "")
        is_call = part.kind is PartKind.CALL
        value = {"name": part.name, "arguments": part.text} if is_call else {"text": part.text, **logprobs}
        done = self._inner_event(part, f"{name}.done", **value)
        done += self._content_event("response.content_part.done", part, part.text)
        item = self._item(part, "completed")
        return done + self._event("response.output_item.done", output_index=part.index, item=item)

    def _content_event(self, name: str, part: ContentPart, text: str) -> bytes:
        if part.kind is PartKind.CALL:
            return b""
        content = OutputText(text) if part.kind is PartKind.TEXT else ReasoningText(text)
        return self._inner_event(part, name, part=content)

    def _inner_event(self, item: ContentPart, event: str, /, **fields: Any) -> bytes:
        """An event about the content of an item."""
        place = {} if item.kind is PartKind.CALL else {"content_index": 0}
        return self._event(event, item_id=self._ids[item.index], output_index=item.index, **place, **fields)

    def _item(self, part: ContentPart, status: Status) -> ResponsesOutput:
        id = self._ids[part.index]
        match part.kind:
            case PartKind.TEXT:
                return OutputMessage(id, [OutputText(part.text)], status)
            case PartKind.REASONING:
                return OutputReasoning(id, [ReasoningText(part.text)], status)
        return OutputCall(id, part.id, part.name, part.text, status)
