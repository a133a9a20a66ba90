"""Responses and chunks that both OpenAI routes share. A field that is UNSET is not sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.errors import InvalidRequest
from thalweg.engine.streams import Piece
from thalweg.server.generation import GenerationJob, PromptJob
from thalweg.server.logprobs import TokenNames, prompt_logprobs
from thalweg.server.protocol import OpenAIRequest, StreamOptions
from thalweg.server.stream import StreamEncoder
from thalweg.text.tokenizer import Tokenizer

PromptLogprobs = list[dict[str, Any] | None]
BodyT = TypeVar("BodyT", bound=OpenAIRequest)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    # with `return_draft_usage`: draft tokens have OpenAI's names for predicted tokens
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET
    spec_verify_ct: int | UnsetType = UNSET  # verifications, under SGLang's name

    def add_drafts(self, drafts: AcceptanceCounts) -> None:
        self.accepted_prediction_tokens = given_count(self.accepted_prediction_tokens) + drafts.accepted
        self.rejected_prediction_tokens = (
            given_count(self.rejected_prediction_tokens) + drafts.drafted - drafts.accepted
        )
        self.spec_verify_ct = given_count(self.spec_verify_ct) + drafts.verifications


def given_count(value: int | UnsetType) -> int:
    return 0 if value is UNSET else value


class ChatUsage(msgspec.Struct):
    """`usage` of both OpenAI routes."""

    prompt_tokens: int = 0  # counts a prompt once, however many choices it has
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)

    def add(self, piece: Piece, reasoning_tokens: int, counts_drafts: bool) -> None:
        """Adds a choice by its latest piece. The first choice stands for the prompt: the others find it in the
        cache.
        """
        if not piece.is_sibling:
            self.prompt_tokens += piece.prompt_tokens
            self.prompt_tokens_details.cached_tokens += piece.cached_tokens
        self.completion_tokens += piece.completion_tokens
        self.total_tokens = self.prompt_tokens + self.completion_tokens
        self.completion_tokens_details.reasoning_tokens += reasoning_tokens
        if counts_drafts:
            self.completion_tokens_details.add_drafts(piece.drafted or AcceptanceCounts())


class OpenAIChoice(msgspec.Struct, kw_only=True):
    """Fields of a choice of both routes, streamed or whole."""

    index: int
    finish_reason: str | None = None
    matched_stop: str | int | None = None  # the stop string, expression or token (its id) that ended it
    token_ids: list[int] | UnsetType = UNSET


class PromptChoice(OpenAIChoice, kw_only=True):
    """Fields of the prompt too: in the first chunk of a stream."""

    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET


ChoiceT = TypeVar("ChoiceT", bound=OpenAIChoice)


class OpenAIResponse(msgspec.Struct, Generic[ChoiceT]):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChoiceT]
    usage: ChatUsage
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET  # of chat completions
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET  # parts of a schema that are not enforced; of a stream in the first chunk


class ChoiceEncoder(ABC, Generic[BodyT]):
    """Writes one choice."""

    def __init__(self, tokenizer: Tokenizer, body: BodyT, index: int, prompt: PromptJob) -> None:
        self.tokenizer, self.body, self.index, self.prompt = tokenizer, body, index, prompt
        self.first = True  # nothing is written yet
        self.names = TokenNames(tokenizer, bool(body.return_tokens_as_token_ids))

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the thought so far."""
        return 0

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
            if isinstance(first, PromptChoice):
                first.prompt_token_ids = list(self.prompt.ids) if body.return_token_ids else None
                first.prompt_logprobs = self.prompt_logprobs(piece)
        if piece.finish is not None:
            last.finish_reason = piece.finish
            ended_by_eos = piece.finish == "stop" and piece.stop is None and piece.ids
            last.matched_stop = piece.ids[-1] if ended_by_eos else piece.stop

    def prompt_logprobs(self, piece: Piece) -> PromptLogprobs | None:
        """Of the first piece."""
        top = self.body.prompt_logprobs
        return None if top is None else prompt_logprobs(self.tokenizer, self.prompt.ids, piece.prompt_logprobs, top)


class OpenAIStreamEncoder(StreamEncoder):
    def __init__(
        self,
        id: str,
        object: str,
        model: str,
        body: OpenAIRequest,
        job: GenerationJob,
        choices: Sequence[ChoiceEncoder[Any]],
        adds_usage: bool,
    ) -> None:
        """adds_usage: to each chunk, as if the client asked for that."""
        self._id, self._created, self._model, self._object = id, int(job.accounting.began), model, object
        self._choices = choices
        self._is_chat = object == "chat.completion"
        self._prompt = list(job.prompts[0].ids) if body.return_token_ids and self._is_chat else UNSET
        self._counts_drafts = bool(body.return_draft_usage)
        self._latest: dict[int, Piece] = {}  # of each choice
        options = body.stream_options or StreamOptions()
        self._includes_usage = adds_usage or bool(options.include_usage)
        self._repeats_usage = adds_usage or self._includes_usage and bool(options.continuous_usage_stats)
        chunk = "chat.completion.chunk" if object == "chat.completion" else object
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options", "needs stream: true")
        head = msgspec.json.encode({"id": id, "object": chunk, "created": self._created, "model": model})
        self._warnings = list(job.warnings) or UNSET
        self._head = b"data: " + head[:-1] + b',"choices":['  # encoded once for all chunks
        self._first_head = b"data: " + head[:-1]
        self._begun = False
        self._tail = b'],"usage":null}\n\n' if self._includes_usage else b"]}\n\n"
        self._encode = msgspec.json.Encoder().encode

    async def feed(self, piece: Piece) -> bytes:
        self._latest[piece.index] = piece
        chunks = self._choices[piece.index].feed(piece)
        heads = [self._head] * len(chunks)
        if chunks and not self._begun:
            self._begun, heads[0] = True, self._first_head + self._once(piece) + b',"choices":['
        tail = b"]" + self._usage_member() if self._repeats_usage and chunks else self._tail
        return b"".join([head + self._encode(chunk) + tail for head, chunk in zip(heads, chunks, strict=True)])

    def _once(self, piece: Piece) -> bytes:
        """Members of the first chunk alone. piece: its own."""
        once: dict[str, Any] = {"warnings": self._warnings, "prompt_token_ids": self._prompt}
        if self._is_chat and (scores := self._choices[piece.index].prompt_logprobs(piece)) is not None:
            once["prompt_logprobs"] = scores
        members = {name: value for name, value in once.items() if value is not UNSET}
        return b"," + self._encode(members)[1:-1] if members else b""

    async def response(self, pieces: Sequence[Piece]) -> OpenAIResponse[OpenAIChoice]:
        choices = [choice.whole(piece) for choice, piece in zip(self._choices, pieces, strict=True)]
        self._latest = dict(enumerate(pieces))
        scores = self._choices[0].prompt_logprobs(pieces[0]) if self._is_chat else UNSET
        head = self._id, self._object, self._created, self._model
        return OpenAIResponse(*head, choices, self._usage(), scores, self._prompt, self._warnings)

    def end(self) -> bytes:
        return (self._head + b"]" + self._usage_member() if self._includes_usage else b"") + super().end()

    def _usage(self) -> ChatUsage:
        """Of all choices so far."""
        usage = ChatUsage()
        for index, piece in sorted(self._latest.items()):
            usage.add(piece, self._choices[index].reasoning_tokens, self._counts_drafts)
        return usage

    def _usage_member(self) -> bytes:
        return b',"usage":' + self._encode(self._usage()) + b"}\n\n"
