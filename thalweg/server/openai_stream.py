"""Responses and chunks that both OpenAI routes share. A field that is UNSET is not sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from thalweg.engine.streams import Piece
from thalweg.server.generation import GenerationJob, PromptJob
from thalweg.server.logprobs import prompt_logprobs
from thalweg.server.protocol import OpenAIRequest
from thalweg.server.stream import StreamEncoder
from thalweg.text.tokenizer import Tokenizer

PromptLogprobs = list[dict[str, Any] | None]
BodyT = TypeVar("BodyT", bound=OpenAIRequest)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    spec_verify_ct: int = 0  # verifications, under SGLang's name


class ChatUsage(msgspec.Struct):
    """`usage` of both OpenAI routes. Draft tokens have OpenAI's names for predicted tokens."""

    prompt_tokens: int = 0  # counts a prompt once, however many choices it has
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    def add(self, piece: Piece) -> None:
        """Adds a choice by its last piece. The first choice stands for the prompt: the others find it in the cache."""
        if not piece.is_sibling:
            self.prompt_tokens += piece.prompt_tokens
            self.prompt_tokens_details.cached_tokens += piece.cached_tokens
        self.completion_tokens += piece.completion_tokens
        self.total_tokens = self.prompt_tokens + self.completion_tokens
        details, drafts = self.completion_tokens_details, piece.drafted
        if details is not UNSET and drafts is not None:
            details.accepted_prediction_tokens += drafts.accepted
            details.rejected_prediction_tokens += drafts.drafted - drafts.accepted
            details.spec_verify_ct += drafts.verifications


class OpenAIChoice(msgspec.Struct, kw_only=True):
    """Fields of a choice of both routes, streamed or whole."""

    index: int
    finish_reason: str | None = None
    matched_stop: str | int | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class PromptChoice(OpenAIChoice, kw_only=True):
    prompt_token_ids: list[int] | UnsetType = UNSET  # of the prompt: in the first chunk of a stream


ChoiceT = TypeVar("ChoiceT", bound=OpenAIChoice)


class OpenAIResponse(msgspec.Struct, Generic[ChoiceT]):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: ChatUsage
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET  # parts of a schema that are not enforced; of a stream in the first chunk


class ChoiceEncoder(ABC, Generic[BodyT]):
    """Writes one choice."""

    def __init__(self, tokenizer: Tokenizer, body: BodyT, index: int, prompt: PromptJob) -> None:
        self.tokenizer, self.body, self.index, self.prompt = tokenizer, body, index, prompt
        self.first = True  # nothing is written yet

    @abstractmethod
    def feed(self, piece: Piece) -> Sequence[OpenAIChoice]:
        """The `choices` entries of the chunks that a piece makes."""

    @abstractmethod
    def whole(self, piece: Piece) -> OpenAIChoice:
        """The choice of a response, from its only piece."""

    def fill(self, first: OpenAIChoice, last: OpenAIChoice, piece: Piece) -> None:
        """Sets the shared fields in the first and the last chunk of a piece."""
        body = self.body
        if body.return_token_ids:
            first.token_ids = list(piece.ids)
        if self.first:
            self.first = False
            if body.return_token_ids and isinstance(first, PromptChoice):
                first.prompt_token_ids = list(self.prompt.ids)
            if (top := body.prompt_logprobs) is not None:
                first.prompt_logprobs = prompt_logprobs(self.tokenizer, self.prompt.ids, piece.prompt_logprobs, top)
        if piece.finish is not None:
            last.finish_reason = piece.finish
            last.matched_stop = UNSET if piece.stop is None else piece.stop


class OpenAIStreamEncoder(StreamEncoder):
    def __init__(
        self,
        id: str,
        object: str,
        model: str,
        body: OpenAIRequest,
        job: GenerationJob,
        choices: Sequence[ChoiceEncoder[Any]],
    ) -> None:
        self._id, self._created, self._model, self._object = id, int(job.accounting.began), model, object
        self._choices = choices
        self._prompt = list(job.prompts[0].ids) if body.return_token_ids and object == "chat.completion" else UNSET
        self._usage = ChatUsage(
            completion_tokens_details=CompletionTokensDetails() if body.return_draft_usage else UNSET
        )
        self._includes_usage = bool(body.stream_options and body.stream_options.include_usage)
        chunk = "chat.completion.chunk" if object == "chat.completion" else object
        head = msgspec.json.encode({"id": id, "object": chunk, "created": self._created, "model": model})
        self._warnings = list(job.warnings) or UNSET
        self._head = b"data: " + head[:-1] + b',"choices":['  # encoded once for all chunks
        told = b',"warnings":' + msgspec.json.encode(job.warnings) if job.warnings else b""
        self._next_head = b"data: " + head[:-1] + told + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._includes_usage else b"]}\n\n"
        self._encode = msgspec.json.Encoder().encode

    async def feed(self, piece: Piece) -> bytes:
        if piece.finish is not None:
            self._usage.add(piece)
        chunks = self._choices[piece.index].feed(piece)
        heads = (self._next_head, *[self._head] * (len(chunks) - 1)) if chunks else ()
        self._next_head = self._head if chunks else self._next_head
        return b"".join([head + self._encode(chunk) + self._tail for head, chunk in zip(heads, chunks, strict=True)])

    async def response(self, pieces: Sequence[Piece]) -> OpenAIResponse[OpenAIChoice]:
        for piece in pieces:
            self._usage.add(piece)
        choices = [choice.whole(piece) for choice, piece in zip(self._choices, pieces, strict=True)]
        head = self._id, self._object, self._created, self._model
        return OpenAIResponse(*head, choices, self._usage, self._prompt, self._warnings)

    def end(self) -> bytes:
        usage = self._head + b'],"usage":' + self._encode(self._usage) + b"}\n\n" if self._includes_usage else b""
        return usage + super().end()
