"""POST /generate: SGLang's native route. A stream's events carry the whole text so far, as its clients expect."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.core.sampling import SamplingParams
from thalweg.engine.streams import Piece
from thalweg.server.context import AppContext
from thalweg.server.generation import GenerationJob, Prompt, PromptJob, make_job, read_prompts
from thalweg.server.logprobs import native_logprobs, native_tops, prompt_scores
from thalweg.server.parsing import given, native_params
from thalweg.server.protocol import GenerateRequest, NativeSampling
from thalweg.server.stream import StreamEncoder, respond
from thalweg.server.structured_output import grammar_of
from thalweg.text.tokenizer import Tokenizer

SHORT = 4096  # tokens, scored prompt tokens included, up to which every piece makes an event
_NAMES = {name: f"sampling_params.{name}" for name in SamplingParams.__struct_fields__} | {
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "include_stop_str_in_output": "sampling_params.no_stop_trim",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
}


class GenerateMeta(msgspec.Struct):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | UnsetType = UNSET
    spec_verify_ct: int | UnsetType = UNSET
    spec_draft_token_num: int | UnsetType = UNSET
    spec_accept_token_num: int | UnsetType = UNSET
    spec_accept_length: float | UnsetType = UNSET
    spec_accept_rate: float | UnsetType = UNSET
    spec_accept_histogram: list[int] | UnsetType = UNSET
    input_token_logprobs: list[Any] | UnsetType = UNSET
    output_token_logprobs: list[Any] | UnsetType = UNSET
    input_top_logprobs: list[Any] | UnsetType = UNSET
    output_top_logprobs: list[Any] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET  # parts of a schema that are not enforced


class GenerateResponse(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: GenerateMeta
    index: int | UnsetType = UNSET  # of the choice, in a stream of several


async def generate(ctx: AppContext, request: Request, body: GenerateRequest) -> Response:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("text", "give either text or input_ids, and not both")
    field, value = ("text", body.text) if body.text is not None else ("input_ids", body.input_ids or ())
    prompts = await read_prompts(ctx, field, value)
    samplings = _each(given(body.sampling_params, NativeSampling()), "sampling_params", len(prompts))
    rids = [ctx.rid(rid, request) for rid in _each(body.rid, "rid", len(prompts))]
    intervals = [_interval(sampling) for sampling in samplings]
    grammars = _grammars(body, samplings, ctx.any_whitespace)
    jobs = [_prompt_job(ctx, body, *each) for each in zip(prompts, samplings, grammars, rids, strict=True)]
    salt = given(body.cache_salt, body.extra_key)
    job = await make_job(ctx, request, jobs, body.priority, salt, rename=lambda field: _NAMES.get(field, field))
    choices = [
        GenerateChoiceEncoder(ctx.front.tokenizer, body, prompt, job, interval)
        for prompt, interval in zip(jobs, intervals, strict=True)
        for _ in range(prompt.params.n)
    ]
    is_batch = isinstance(body.text, list) or body.input_ids is not None and isinstance(body.input_ids[0], list)
    encoder = GenerateStreamEncoder(choices, is_batch or len(choices) > 1)
    return await respond(ctx, request, job, encoder, body.stream)


def _interval(sampling: NativeSampling) -> int:
    """Tokens from one event to the next, at least. Raises InvalidRequest."""
    if (interval := given(sampling.stream_interval, 1)) < 1:
        raise InvalidRequest("sampling_params.stream_interval", f"must be at least 1, got {interval}")
    return interval


def _each(value: Any, field: str, count: int) -> list[Any]:
    """One value for each prompt. Raises InvalidRequest for a list of another length."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(field, f"has {len(value)} entries for {count} prompts: give one for each, or one for all")
    return value


def _grammars(body: GenerateRequest, samplings: Sequence[NativeSampling], any_whitespace: bool) -> list[Grammar]:
    """The grammar of each prompt. A structure is in the sampling parameters, as SGLang has it, or beside them for all
    prompts. Prompts that share their parameters share one object.
    """
    shared, own = grammar_of(body, any_whitespace=any_whitespace), {}
    for sampling in samplings:
        if id(sampling) not in own:
            sampling.refuse("sampling_params.")
            grammar = own[id(sampling)] = grammar_of(sampling, where="sampling_params.", any_whitespace=any_whitespace)
            if shared.is_set and grammar.is_set:
                raise InvalidRequest(grammar.field, f"asks for a second structure beside {shared.field}: give one")
    return [shared if shared.is_set else own[id(sampling)] for sampling in samplings]


def _prompt_job(
    ctx: AppContext, body: GenerateRequest, prompt: Prompt, sampling: NativeSampling, grammar: Grammar, rid: str
) -> PromptJob:
    logprobs = given(body.top_logprobs_num, 0) if body.return_logprob else None
    params = native_params(
        sampling,
        ctx.defaults,
        logprobs=logprobs,
        prompt_logprobs=logprobs if 0 <= given(body.logprob_start_len, -1) < len(prompt.ids) else None,
    )
    return PromptJob(*prompt, params, rid, grammar)


class GenerateStreamEncoder(StreamEncoder):
    """listed: events have the index of their choice, and the whole response is a list."""

    def __init__(self, choices: Sequence[GenerateChoiceEncoder], listed: bool) -> None:
        self._choices, self._listed = choices, listed

    async def feed(self, piece: Piece) -> bytes:
        encoder = self._choices[piece.index]
        encoder.add(piece)
        if not encoder.is_due(piece):
            return b""
        event = encoder.event(piece)
        event.index = piece.index if self._listed else UNSET
        return b"data: " + msgspec.json.encode(event) + b"\n\n"

    async def response(self, pieces: Sequence[Piece]) -> object:
        values = []
        for encoder, piece in zip(self._choices, pieces, strict=True):
            encoder.add(piece)
            values.append(encoder.event(piece))
        return values if self._listed else values[0]


class GenerateChoiceEncoder:
    """Makes the events of one choice. Each is complete and replaces the one before."""

    def __init__(
        self, tokenizer: Tokenizer, body: GenerateRequest, prompt: PromptJob, job: GenerationJob, interval: int
    ) -> None:
        self._tokenizer, self._body, self._prompt, self._started = tokenizer, body, prompt, job.accounting.began
        self._warnings = list(job.warnings) or UNSET
        self._text = ""
        self._ids: list[int] = []
        self._logprobs: dict[str, Any] = {}
        self._new_tokens = 0  # since the last event
        self._interval = interval

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
        return piece.finish is not None or self._new_tokens >= max(self._interval, 0 if size <= SHORT else size / 256)

    def event(self, piece: Piece) -> GenerateResponse:
        """Everything so far. piece: the latest."""
        self._new_tokens = 0
        meta = GenerateMeta(
            self._prompt.rid,
            self._finish(piece),
            piece.prompt_tokens,
            piece.completion_tokens,
            piece.cached_tokens,
            UNSET if piece.finish is None else time.time() - self._started,
            **self._logprobs,
            warnings=self._warnings,
            **(_speculation(piece.drafted) if piece.drafted is not None else {}),
        )
        return GenerateResponse(self._text, self._ids, meta)

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
    """Counts of a sequence's drafts, under SGLang's names."""
    return {
        "spec_verify_ct": drafted.verifications,
        "spec_draft_token_num": drafted.drafted,
        "spec_accept_token_num": drafted.accepted,
        "spec_accept_length": drafted.mean_length,
        "spec_accept_rate": drafted.rate,
        "spec_accept_histogram": drafted.histogram,
    }
