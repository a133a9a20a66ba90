"""Stream encoder of /v1/chat/completions: the parser's events as deltas, or as one message."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from thalweg.engine.streams import Piece
from thalweg.server.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs
from thalweg.server.openai_stream import PromptLogprobs
from thalweg.server.parsing import given
from thalweg.server.protocol import ChatRequest
from thalweg.text.events import ArgumentDelta, CallStart, ContentDelta, Event, ReasoningDelta, collect
from thalweg.text.parser import AnswerParser
from thalweg.text.tokenizer import Tokenizer


class DeltaFunctionCall(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class DeltaToolCall(msgspec.Struct):
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: DeltaFunctionCall = msgspec.field(default_factory=DeltaFunctionCall)


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class DeltaMessage(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChoiceEncoder:
    """Writes one choice with a parser of its own."""

    def __init__(
        self, tokenizer: Tokenizer, body: ChatRequest, index: int, prompt: Sequence[int], parser: AnswerParser
    ) -> None:
        self._tokenizer, self._body, self._index, self._prompt = tokenizer, body, index, prompt
        self._parser = parser
        self._first, self._called = True, False

    def feed(self, piece: Piece) -> list[ChatChunkChoice]:
        """Empty while the parser holds its text back. The first chunk has the role."""
        deltas = _deltas(self._events(piece))
        logprobs, ids = self._logprobs(piece), self._ids(piece)
        if not deltas and (self._first or piece.finish is not None or logprobs is not None or ids is not UNSET):
            deltas = [DeltaMessage()]
        chunks = [ChatChunkChoice(self._index, delta) for delta in deltas]
        if not chunks:
            return chunks
        chunks[0].logprobs, chunks[0].token_ids = logprobs, ids
        if self._first:
            self._first = False
            self._begin(chunks[0], piece)
        if piece.finish is not None:
            chunks[-1].finish_reason, chunks[-1].matched_stop = self._finish(piece), _matched_stop(piece)
        return chunks

    def whole(self, piece: Piece) -> ChatChoice:
        parsed = collect(self._events(piece))
        calls = [
            DeltaToolCall(id=call.id, type="function", function=DeltaFunctionCall(call.name, call.arguments))
            for call in parsed.calls
        ]
        content = parsed.content if parsed.reasoning or calls else parsed.content or ""
        message = ChatMessage("assistant", content, parsed.reasoning, calls or None)
        return ChatChoice(
            self._index,
            message,
            self._logprobs(piece),
            self._finish(piece),
            _matched_stop(piece),
            self._ids(piece),
            self._prompt_logprobs(piece),
        )

    def _events(self, piece: Piece) -> list[Event]:
        events = self._parser.feed(piece.text)
        if piece.finish is not None:
            events = [*events, *self._parser.finish()]
        self._called = self._called or any(isinstance(event, CallStart) for event in events)
        return events

    def _finish(self, piece: Piece) -> str | None:
        return "tool_calls" if self._called and piece.finish == "stop" else piece.finish

    def _begin(self, chunk: ChatChunkChoice, piece: Piece) -> None:
        chunk.delta.role = "assistant"
        if chunk.delta.content is UNSET and chunk.delta.reasoning_content is UNSET:
            chunk.delta.content = ""
        if self._body.return_token_ids:
            chunk.prompt_token_ids = list(self._prompt)
        chunk.prompt_logprobs = self._prompt_logprobs(piece)

    def _ids(self, piece: Piece) -> list[int] | UnsetType:
        return list(piece.ids) if self._body.return_token_ids else UNSET

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs or not piece.ids:
            return None
        return chat_logprobs(self._tokenizer, piece.ids, piece.logprobs, given(self._body.top_logprobs, 0))

    def _prompt_logprobs(self, piece: Piece) -> PromptLogprobs | UnsetType:
        top = self._body.prompt_logprobs
        return UNSET if top is None else prompt_logprobs(self._tokenizer, self._prompt, piece.prompt_logprobs, top)


def _matched_stop(piece: Piece) -> str | int | UnsetType:
    return UNSET if piece.stop is None else piece.stop


def _deltas(events: Sequence[Event]) -> list[DeltaMessage]:
    """One delta for the text, then one for each changed call: some clients read only the first call of a chunk."""
    if len(events) == 1 and isinstance(events[0], ContentDelta):  # nearly always
        return [DeltaMessage(content=events[0].text)]
    content = "".join([event.text for event in events if isinstance(event, ContentDelta)])
    reasoning = "".join([event.text for event in events if isinstance(event, ReasoningDelta)])
    calls: dict[int, DeltaToolCall] = {}
    for event in events:
        if isinstance(event, CallStart):
            calls[event.index] = DeltaToolCall(event.index, event.id, "function", DeltaFunctionCall(event.name))
        elif isinstance(event, ArgumentDelta):
            call = calls.setdefault(event.index, DeltaToolCall(event.index))
            call.function.arguments += event.text
    text = [DeltaMessage(UNSET, content or UNSET, reasoning or UNSET)] if content or reasoning else []
    return [*text, *(DeltaMessage(tool_calls=[call]) for call in calls.values())]
