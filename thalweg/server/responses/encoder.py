"""Writes an answer in the format of the Responses API, whole or as events."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from thalweg.core.plan import TokenLogprob
from thalweg.engine.streams import Piece
from thalweg.server.chat import tool_call
from thalweg.server.errors import ApiError
from thalweg.server.logprobs import ChatLogprob, TokenNames, chat_logprobs
from thalweg.server.responses.protocol import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputCustomCall,
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
from thalweg.server.stream import PartsEncoder, named_event
from thalweg.text.events import Event, ParsedAnswer, Part, PartKind
from thalweg.text.parser import AnswerParser
from thalweg.text.tokenizer import Tokenizer

_PREFIXES = {PartKind.TEXT: "msg_", PartKind.REASONING: "rs_", PartKind.CALL: "fc_"}
_NAMES = {PartKind.TEXT: "output_text", PartKind.REASONING: "reasoning_text", PartKind.CALL: "function_call_arguments"}
_STATUSES: dict[str | None, Status] = {"stop": "completed", "length": "incomplete"}


def message_of(answer: ParsedAnswer) -> dict[str, Any]:
    """An answer as a message of the conversation that continues it."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or ""}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.has_calls:  # one that broke off was never made
        message["tool_calls"] = [tool_call(c.id, c.name, c.arguments) for c in answer.calls if c.complete]
    return message


class ResponsesStreamEncoder(PartsEncoder):
    def __init__(
        self,
        state: ResponsesResponse,
        parser: AnswerParser,
        count_tokens: Callable[[str], Awaitable[int]],
        custom: Collection[str] = (),
        logprobs: MessageLogprobs | None = None,
    ) -> None:
        """state: the response before the first token. count_tokens: of the reasoning. custom: names of custom tools."""
        super().__init__(parser)
        self.state = state
        self.on_end: Callable[[], object] = lambda: None  # called before the last event
        self._count_tokens, self._custom, self._logprobs = count_tokens, custom, logprobs
        self._ids: list[str] = []
        self._inputs: dict[int, CustomToolInput] = {}  # by part
        self._scores: dict[int, list[ChatLogprob]] = {}  # by part
        self._sequence = 0

    def queued(self) -> bytes:
        """The first events of a background response."""
        self.state.status = "queued"
        return b"".join(self._event(f"response.{name}", response=self.state) for name in ("created", "queued"))

    def begin(self, piece: Piece) -> bytes:
        created = b"" if self._sequence else self._event("response.created", response=self.state)
        self.state.status = "in_progress"
        return created + self._event("response.in_progress", response=self.state)

    async def feed(self, piece: Piece) -> bytes:
        if self._logprobs is not None:
            self._logprobs.add(piece)
        return await super().feed(piece)

    async def response(self, pieces: Sequence[Piece]) -> ResponsesResponse:
        await self.feed(pieces[0])
        return self.state

    def failed(self, info: ApiError) -> bytes:
        return self._end("failed", error=ResponsesError(info.message), incomplete=True)

    def cancelled(self) -> bytes:
        """The last events of a response that was cancelled before its first token."""
        return self._end("cancelled")

    async def finish(self, piece: Piece) -> bytes:
        reasoning_tokens = await self._count_tokens(self.parser.answer.reasoning or "")
        usage = ResponsesUsage(
            piece.prompt_tokens,
            InputTokensDetails(piece.cached_tokens),
            piece.completion_tokens,
            OutputTokensDetails(reasoning_tokens),
            piece.prompt_tokens + piece.completion_tokens,
        )
        status = _STATUSES.get(piece.finish, "cancelled")
        details = IncompleteDetails() if status == "incomplete" else None
        return self._end(status, usage=usage, incomplete_details=details)

    def _end(self, status: Status, incomplete: bool = False, **values: Any) -> bytes:
        """incomplete: all items are."""
        state, self.state.status = self.state, status
        state.completed_at = int(time.time()) if status == "completed" else None
        for name, value in values.items():
            setattr(state, name, value)
        state.output = [self._item(part, "incomplete" if incomplete else None) for part in self.parser.parts]
        if state.output and status != "completed":
            state.output[-1].status = "incomplete"
        self.on_end()
        name = state.status if state.status in ("completed", "failed") else "incomplete"
        return self._event(f"response.{name}", response=state)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        self._sequence += 1
        return named_event(name, sequence_number=self._sequence - 1, **fields)

    def part_event(self, event: Event) -> bytes:
        part = event.part
        delta, logprobs = event.text, self._text_logprobs(event)
        if event.type == "open":
            is_custom = part.kind is PartKind.CALL and part.name in self._custom
            self._ids.append(("ctc_" if is_custom else _PREFIXES[part.kind]) + uuid.uuid4().hex)
            if is_custom:
                self._inputs[part.index] = CustomToolInput()
            item = self._item(part, "in_progress", is_empty=True)
            added = self._event("response.output_item.added", output_index=part.index, item=item)
            return added + self._content_event("response.content_part.added", part, is_empty=True)
        if (reader := self._inputs.get(part.index)) is not None:
            delta = reader.feed(delta) if event.type == "delta" else reader.finish()
        name = f"response.{_NAMES[part.kind] if reader is None else 'custom_tool_call_input'}"
        out = b"" if not delta else self._inner_event(part, f"{name}.delta", delta=delta, **logprobs)
        if event.type == "delta":
            return out
        if part.complete:
            value: dict[str, Any] = {"text": part.text, **logprobs}
            if part.kind is PartKind.CALL:
                value = {"name": part.name, "arguments": part.text} if reader is None else {"input": reader.text}
            out += self._inner_event(part, f"{name}.done", **value)
        out += self._content_event("response.content_part.done", part)
        item = self._item(part)
        return out + self._event("response.output_item.done", output_index=part.index, item=item)

    def _text_logprobs(self, event: Event) -> dict[str, Any]:
        """`logprobs` of an event about a text: those of its delta, at its end all of them."""
        part, entries = event.part, list[ChatLogprob]()
        if self._logprobs is not None and event.type == "delta":
            entries = self._logprobs.take(event.text, part.kind is PartKind.TEXT)
        if part.kind is not PartKind.TEXT:
            return {}
        scores = self._scores.setdefault(part.index, [])
        scores += entries
        return {"logprobs": scores if event.type == "close" else entries}

    def _content_event(self, name: str, part: Part, is_empty: bool = False) -> bytes:
        if part.kind is PartKind.CALL:
            return b""
        return self._inner_event(part, name, part=self._content(part, is_empty))

    def _content(self, part: Part, is_empty: bool = False) -> OutputText | ReasoningText:
        text = "" if is_empty else part.text
        is_text = part.kind is PartKind.TEXT
        return OutputText(text, logprobs=self._scores.get(part.index, ())) if is_text else ReasoningText(text)

    def _inner_event(self, item: Part, event: str, /, **fields: Any) -> bytes:
        """An event about the content of an item."""
        place = {} if item.kind is PartKind.CALL else {"content_index": 0}
        return self._event(event, item_id=self._ids[item.index], output_index=item.index, **place, **fields)

    def _item(self, part: Part, status: Status | None = None, is_empty: bool = False) -> ResponsesOutput:
        id, status = self._ids[part.index], status or ("completed" if part.complete else "incomplete")
        content: Any = [] if is_empty or part.kind is PartKind.CALL else [self._content(part)]
        match part.kind:
            case PartKind.TEXT:
                return OutputMessage(id, content, status)
            case PartKind.REASONING:
                return OutputReasoning(id, content, status)
        if (reader := self._inputs.get(part.index)) is not None:
            return OutputCustomCall(id, part.id, part.name, reader.text, status)
        return OutputCall(id, part.id, part.name, "" if is_empty else part.text, status)


class MessageLogprobs:
    """Finds the tokens of the texts of an answer among all its tokens. top: alternatives of each."""

    def __init__(self, tokenizer: Tokenizer, top: int) -> None:
        self._tokenizer, self._top = tokenizer, top
        self._held: list[tuple[bytes, int, TokenLogprob]] = []  # tokens that belong to no text yet

    def add(self, piece: Piece) -> None:
        for token, logprob in zip(piece.ids, piece.logprobs, strict=True):
            self._held.append((self._tokenizer.token_bytes(token), token, logprob))

    def take(self, text: str, is_message: bool) -> list[ChatLogprob]:
        """The tokens of the next text; those before it, markup and space, are dropped.

        A text that is not what its tokens spell has all of them (a broken character), or none if it is no message.
        """
        raw, whole = text.encode("utf-8", "replace"), b"".join(piece for piece, *_ in self._held)
        start = whole.find(raw)
        if start < 0 and not is_message:
            return []
        start, end = (0, len(whole)) if start < 0 else (start, start + len(raw))
        taken, at, count = list[tuple[int, TokenLogprob]](), 0, 0
        for piece, token, logprob in self._held:
            if at >= end:
                break
            if at + len(piece) > start and at < end:
                taken.append((token, logprob))
            at, count = at + len(piece), count + 1
        del self._held[:count]
        ids, logprobs = [token for token, _ in taken], [logprob for _, logprob in taken]
        return chat_logprobs(TokenNames(self._tokenizer), ids, logprobs, self._top).content


_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt])*')
_HALF = re.compile(r"\\u[dD][89abAB]..\Z")  # the first half of a surrogate pair


class CustomToolInput:
    """Reads the text in the arguments of a custom tool's call, {"input": TEXT}, as they come.

    Arguments of another form are the text themselves.
    """

    def __init__(self) -> None:
        self.text = ""  # so far
        self._rest = ""  # arguments that were not read yet
        self._is_inside = self._has_ended = False  # the text

    def feed(self, arguments: str) -> str:
        """More of the text."""
        if self._has_ended:
            return ""
        self._rest += arguments
        if not self._is_inside:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._rest, self._is_inside = self._rest[head.end() :], True
        match = _CHARACTERS.match(self._rest)
        assert match is not None, "it matches the empty text"
        raw, self._has_ended = match[0], self._rest[match.end() : match.end() + 1] == '"'
        if not self._has_ended and (half := _HALF.search(raw)):
            raw = raw[: half.start()]
        self._rest = self._rest[len(raw) :]
        return self._add(json.loads(f'"{raw}"', strict=False))

    def finish(self) -> str:
        """The rest of the text."""
        return "" if self._is_inside else self._add(self._rest)

    def _add(self, text: str) -> str:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        self.text += text
        return text
