"""From the pieces of one choice to chat messages: the parser's events as deltas, or as one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from thalweg.engine.streams import Piece
from thalweg.server.logprobs import chat_logprobs, prompt_logprobs
from thalweg.server.openai_responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    DeltaFunctionCall,
    DeltaToolCall,
)
from thalweg.server.protocol import ChatRequest
from thalweg.server.sampling import given
from thalweg.text.events import ArgumentDelta, CallStart, ContentDelta, Event, ReasoningDelta, collect
from thalweg.text.parser import AnswerParser
from thalweg.text.tokenizer import Tokenizer


class ChatStreamEncoder:
    """Makes the chunks, or the whole message, of one choice. parser: fresh, for this choice alone."""

    def __init__(
        self, tokenizer: Tokenizer, body: ChatRequest, index: int, prompt: Sequence[int], parser: AnswerParser
    ) -> None:
        self._tokenizer, self._body, self._index, self._prompt = tokenizer, body, index, prompt
        self._parser = parser
        self._first, self._called = True, False

    def feed(self, piece: Piece) -> list[ChatChunkChoice]:
        """The chunks that a piece makes: none while the parser holds its text back. The first says whose turn it is."""
        deltas = _deltas(self._events(piece))
        logprobs, ids = self._logprobs(piece), list(piece.ids) if self._body.return_token_ids else UNSET
        if not deltas and (self._first or piece.finish is not None or logprobs is not None or ids is not UNSET):
            deltas = [ChatDelta()]
        chunks = [ChatChunkChoice(self._index, delta) for delta in deltas]
        if not chunks:
            return chunks
        chunks[0].logprobs, chunks[0].token_ids = logprobs, ids
        if self._first:
            self._first = False
            self._begin(chunks[0], piece)
        if piece.finish is not None:
            chunks[-1].finish_reason = self._finish(piece)
            chunks[-1].matched_stop = UNSET if piece.stop is None else piece.stop
        return chunks

    def whole(self, piece: Piece) -> ChatChoice:
        """The message of a choice that came in one piece."""
        parsed = collect(self._events(piece))
        bare = parsed.reasoning is None and not parsed.calls
        calls = [
            DeltaToolCall(id=call.id, type="function", function=DeltaFunctionCall(call.name, call.arguments))
            for call in parsed.calls
        ]
        message = ChatMessage(
            "assistant", "" if parsed.content is None and bare else parsed.content, parsed.reasoning, calls or None
        )
        choice = ChatChoice(self._index, message, self._logprobs(piece), self._finish(piece))
        choice.matched_stop = UNSET if piece.stop is None else piece.stop
        if self._body.return_token_ids:
            choice.token_ids = list(piece.ids)
        if self._body.prompt_logprobs is not None:
            choice.prompt_logprobs = self._prompt_logprobs(piece)
        return choice

    def _events(self, piece: Piece) -> list[Event]:
        events = self._parser.feed(piece.text)
        if piece.finish is not None:
            events = [*events, *self._parser.finish()]
        for event in events:
            if isinstance(event, CallStart):
                self._called = True
        return events

    def _finish(self, piece: Piece) -> str | None:
        return "tool_calls" if self._called and piece.finish == "stop" else piece.finish

    def _begin(self, chunk: ChatChunkChoice, piece: Piece) -> None:
        chunk.delta.role = "assistant"
        if chunk.delta.content is UNSET and chunk.delta.reasoning_content is UNSET:
            chunk.delta.content = ""
        if self._body.return_token_ids:
            chunk.prompt_token_ids = list(self._prompt)
        if self._body.prompt_logprobs is not None:
            chunk.prompt_logprobs = self._prompt_logprobs(piece)

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._body.logprobs or not piece.ids:
            return None
        return chat_logprobs(self._tokenizer, piece.ids, piece.logprobs, given(self._body.top_logprobs, 0))

    def _prompt_logprobs(self, piece: Piece) -> list[dict[str, Any] | None]:
        top = given(self._body.prompt_logprobs, 0)
        return prompt_logprobs(self._tokenizer, self._prompt, piece.prompt_logprobs, top)


def _deltas(events: Sequence[Event]) -> list[ChatDelta]:
    """One delta for the text, and one for each call that has news: some clients read only the first call of a chunk."""
    if len(events) == 1:  # nearly always
        only = events[0]
        if isinstance(only, ContentDelta):
            return [ChatDelta(content=only.text)]
        if isinstance(only, ReasoningDelta):
            return [ChatDelta(reasoning_content=only.text)]
    text = ChatDelta()
    calls: dict[int, DeltaToolCall] = {}
    for event in events:
        if isinstance(event, ContentDelta):
            text.content = event.text if text.content is UNSET else text.content + event.text
        elif isinstance(event, ReasoningDelta):
            text.reasoning_content = (
                event.text if text.reasoning_content is UNSET else text.reasoning_content + event.text
            )
        elif isinstance(event, CallStart):
            calls[event.index] = DeltaToolCall(event.index, event.id, "function", DeltaFunctionCall(event.name))
        elif isinstance(event, ArgumentDelta):
            call = calls.setdefault(event.index, DeltaToolCall(event.index, function=DeltaFunctionCall()))
            call.function.arguments += event.text
    spoken = text.content is not UNSET or text.reasoning_content is not UNSET
    return [*([text] if spoken else []), *(ChatDelta(tool_calls=[call]) for call in calls.values())]
