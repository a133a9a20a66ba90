"""POST /generate: SGLang's native route. A stream's events carry the whole text so far, as its clients expect."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Piece
from thalweg.server.context import AppContext
from thalweg.server.generation import PromptJob, make_job, prompt_fields
from thalweg.server.logprobs import native_logprobs, native_tops, prompt_scores
from thalweg.server.parsing import given, sampling_params
from thalweg.server.protocol import GenerateRequest, NativeSampling
from thalweg.server.stream import StreamEncoder, respond
from thalweg.server.structured_output import grammar_of
from thalweg.text.tokenizer import Tokenizer

SHORT = 4096  # tokens, scored prompt tokens included, up to which every piece makes an event
DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's, for this route only
_NAMES = {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__} | {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "include_stop": "sampling_params.no_stop_trim",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}
T = TypeVar("T")


async def generate(ctx: AppContext, request: Request, body: GenerateRequest) -> Response:
    field, prompts = await _prompts(ctx, body)
    count, params = len(prompts), NativeSampling() if body.sampling_params is None else body.sampling_params
    each = _each(params, "sampling_params", count)
    rids = [ctx.rid(rid, request) for rid in ([None] * count if body.rid is None else _each(body.rid, "rid", count))]
    jobs = [
        PromptJob(*parts)
        for parts in zip(
            prompts,
            _params(ctx, body, each, prompts),
            rids,
            prompt_fields(field, count),
            _grammars(body, each),
            strict=True,
        )
    ]
    for prompt in jobs:
        await ctx.grammar_checker.check(prompt.grammar)
    salt = given(body.cache_salt, body.extra_key)
    job = make_job(ctx, request, jobs, body.priority, salt, rename=lambda field: _NAMES.get(field, field))
    started = job.accounting.began
    choices = [
        GenerateChoiceEncoder(ctx.front.tokenizer, body, prompt, started)
        for prompt in jobs
        for _ in range(prompt.params.n)
    ]
    is_batch = isinstance(body.text, list) or body.input_ids is not None and isinstance(body.input_ids[0], list)
    encoder = GenerateStreamEncoder(choices, is_batch or len(choices) > 1)
    return await respond(ctx, request, job, encoder, body.stream)


async def _prompts(ctx: AppContext, body: GenerateRequest) -> tuple[str, Sequence[Sequence[int]]]:
    """The field with the prompts, and their token ids. Raises InvalidRequest."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("text", "give either text or input_ids, and not both")
    if body.input_ids is not None:
        return "input_ids", _id_lists(body.input_ids)
    texts = [body.text] if isinstance(body.text, str) else body.text
    if not texts:
        raise InvalidRequest("text", "is empty: give at least one text")
    fields = prompt_fields("text", len(texts))
    return "text", [await ctx.tokenize_prompt(text, field) for text, field in zip(texts, fields, strict=True)]


def _id_lists(ids: Sequence[Any]) -> Sequence[Sequence[int]]:
    if not ids:
        raise InvalidRequest("input_ids", "is empty: give at least one token id")
    if not any(isinstance(entry, list) for entry in ids):
        return [ids]
    for i, entry in enumerate(ids):
        if not isinstance(entry, list):
            raise InvalidRequest(f"input_ids[{i}]", "must be a list of token ids as the others are")
    return ids


def _each(value: T | list[T], field: str, count: int) -> list[T]:
    """One value for each prompt. Raises InvalidRequest for a list of another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(field, f"has {len(value)} entries for {count} prompts: give one for each, or one for all")
    return value


def _params(
    ctx: AppContext, body: GenerateRequest, each: Sequence[NativeSampling], prompts: Sequence[Sequence[int]]
) -> list[SamplingParams]:
    start, top = given(body.logprob_start_len, -1), given(body.top_logprobs_num, 0)
    logprobs = top if body.return_logprob else None
    for params in each:
        params.refuse("sampling_params.")
    return [
        sampling_params(
            params,
            ctx.defaults,
            seed=given(params.sampling_seed, params.seed),
            max_tokens=given(params.max_new_tokens, DEFAULT_MAX_NEW_TOKENS),
            min_tokens=given(params.min_new_tokens, 0),
            include_stop=bool(params.no_stop_trim),
            logprobs=logprobs,
            prompt_logprobs=logprobs if 0 <= start < len(prompt) else None,
        )
        for params, prompt in zip(each, prompts, strict=True)
    ]


def _grammars(body: GenerateRequest, each: Sequence[NativeSampling]) -> list[Grammar]:
    """A structure is in the sampling parameters, as SGLang has it, or beside them for all prompts."""
    shared, own = grammar_of(body), [grammar_of(params, where="sampling_params.") for params in each]
    if shared.is_set and (second := next((grammar for grammar in own if grammar.is_set), None)):
        raise InvalidRequest(second.field, f"asks for a second structure beside {shared.field}: give one")
    return [shared] * len(each) if shared.is_set else own


class GenerateStreamEncoder(StreamEncoder):
    """listed: events have the index of their choice, and the whole response is a list."""

    def __init__(self, choices: Sequence[GenerateChoiceEncoder], listed: bool) -> None:
        self._choices, self._listed = choices, listed

    async def feed(self, choice: int, piece: Piece) -> bytes:
        encoder = self._choices[choice]
        encoder.add(piece)
        if not encoder.is_due(piece):
            return b""
        index = {"index": choice} if self._listed else {}
        return b"data: " + msgspec.json.encode(encoder.event(piece) | index) + b"\n\n"

    async def response(self, pieces: Sequence[Piece]) -> object:
        values = []
        for encoder, piece in zip(self._choices, pieces, strict=True):
            encoder.add(piece)
            values.append(encoder.event(piece))
        return values if self._listed else values[0]


class GenerateChoiceEncoder:
    """Makes the events of one choice. Each is complete and replaces the one before."""

    def __init__(self, tokenizer: Tokenizer, body: GenerateRequest, prompt: PromptJob, started: float) -> None:
        self._tokenizer, self._body, self._prompt, self._started = tokenizer, body, prompt, started
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: dict[str, list[Any]] = {}
        self._new_tokens = 0  # since the last event

    def add(self, piece: Piece) -> None:
        self._text += piece.text
        self._ids += piece.ids
        self._new_tokens += len(piece.ids)
        if self._body.return_logprob:
            self._add_logprobs(piece)

    def is_due(self, piece: Piece) -> bool:
        """Whether to send an event. Each repeats everything, so a long answer sends one only when it has grown by a
        256th: the stream's bytes grow with its length, not with the square of it.
        """
        size = len(self._ids) + len(self._logprobs.get("input_token_logprobs", ()))
        return piece.finish is not None or size <= SHORT or self._new_tokens * 256 >= size

    def event(self, piece: Piece) -> dict[str, Any]:
        """Everything so far. piece: the latest."""
        self._new_tokens = 0
        meta: dict[str, Any] = {
            "id": self._prompt.rid,
            "finish_reason": self._finish(piece),
            "prompt_tokens": piece.prompt_tokens,
            "completion_tokens": piece.completion_tokens,
            "cached_tokens": piece.cached_tokens,
            **self._logprobs,
        }
        if piece.finish is not None:
            meta["e2e_latency"] = time.time() - self._started
        if piece.drafted is not None:
            meta |= _speculation(piece.drafted)
        return {"text": self._text, "output_ids": self._ids, "meta_info": meta}

    def _finish(self, piece: Piece) -> dict[str, Any] | None:
        match piece.finish:
            case None:
                return None
            case "length":
                return {"type": "length", "length": piece.completion_tokens}
            case "abort":
                return {"type": "abort", "message": "aborted"}
        return {"type": "stop", "matched": self._ids[-1] if piece.stop is None and self._ids else piece.stop}

    def _add_logprobs(self, piece: Piece) -> None:
        """input_token_logprobs from logprob_start_len on, output_token_logprobs, and the alternatives of both."""
        body, logprobs, ids = self._body, self._logprobs, self._prompt.ids
        top, text = given(body.top_logprobs_num, 0), bool(body.return_text_in_logprobs)

        def extend(prefix: str, tokens: Sequence[int], scores: Sequence[Any]) -> None:
            entries = native_logprobs(self._tokenizer, tokens, scores, text)
            logprobs.setdefault(f"{prefix}_token_logprobs", []).extend(entries)
            if top:
                tops = native_tops(self._tokenizer, scores, top, text)
                logprobs.setdefault(f"{prefix}_top_logprobs", []).extend(tops)

        if not logprobs:
            start = given(body.logprob_start_len, -1)
            start = start if 0 <= start < len(ids) else len(ids)
            extend("input", ids[start:], prompt_scores(ids, piece.prompt_logprobs)[start:])
        extend("output", piece.ids, piece.logprobs)


def _speculation(drafted: AcceptanceCounts) -> dict[str, Any]:
    """What became of a sequence's drafts, under SGLang's names."""
    return {
        "spec_verify_ct": drafted.verifications,
        "spec_draft_token_num": drafted.drafted,
        "spec_accept_token_num": drafted.accepted,
        "spec_accept_length": drafted.mean_length,
        "spec_accept_rate": drafted.rate,
        "spec_accept_histogram": drafted.histogram,
    }
