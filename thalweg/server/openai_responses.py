"""Answers of the OpenAI routes. A field that is UNSET is not sent at all."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from thalweg.core.acceptance import AcceptanceCounts
from thalweg.engine.streams import Piece


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    """Drafts that were verified, under OpenAI's names for predicted tokens; the number of verifications under
    SGLang's.
    """

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    spec_verify_ct: int = 0

    def add(self, drafted: AcceptanceCounts) -> None:
        self.accepted_prediction_tokens += drafted.accepted
        self.rejected_prediction_tokens += drafted.drafted - drafted.accepted
        self.spec_verify_ct += drafted.verifications


class UsageInfo(msgspec.Struct):
    """prompt_tokens counts a prompt once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails = msgspec.field(default_factory=PromptDetails)
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class LegacyLogprobs(msgspec.Struct):
    """logprobs of /v1/completions: one entry a token; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


PromptLogprobs = list[dict[str, Any] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class DeltaFunctionCall(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str = ""


class DeltaToolCall(msgspec.Struct):
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: DeltaFunctionCall = msgspec.field(default_factory=DeltaFunctionCall)


class ChatMessage(msgspec.Struct):
    """A whole answer."""

    role: str
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] | None = None


class ChatDelta(msgspec.Struct):
    """What is new in an answer."""

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
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class OpenAIResponse(msgspec.Struct):
    """A whole response of either route."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice] | list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | UnsetType = UNSET


class UsageCounter:
    """Adds up the usage of a request as its choices end. n: choices of each prompt. drafts: whether it tells what
    became of drafts.
    """

    def __init__(self, n: int, drafts: bool | None) -> None:
        self.usage = UsageInfo(completion_tokens_details=CompletionDetails() if drafts else UNSET)
        self._n = n

    def ended(self, choice: int, piece: Piece) -> None:
        """The last piece of a choice came. A prompt's first choice stands for the prompt: the others find it in the
        cache.
        """
        if choice % self._n == 0:
            self.usage.prompt_tokens += piece.prompt_tokens
            self.usage.prompt_tokens_details.cached_tokens += piece.cached_tokens
        self.usage.completion_tokens += piece.completion_tokens
        if self.usage.completion_tokens_details is not UNSET and piece.drafted is not None:
            self.usage.completion_tokens_details.add(piece.drafted)
        self.usage.total_tokens = self.usage.prompt_tokens + self.usage.completion_tokens


class ChunkEnvelope:
    """The bytes around the choice of every chunk of a stream, encoded once."""

    def __init__(self, id: str, object: str, created: int, model: str, usage: bool) -> None:
        head = msgspec.json.encode({"id": id, "object": object, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._encode = msgspec.json.Encoder().encode

    def chunk(self, choice: CompletionChoice | ChatChunkChoice) -> bytes:
        return self._head + self._encode(choice) + self._tail

    def usage(self, usage: UsageInfo) -> bytes:
        """The chunk after the last choice that stream_options.include_usage asks for."""
        return self._head + b'],"usage":' + self._encode(usage) + b"}\n\n"
