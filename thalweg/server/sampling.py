"""From request bodies to `SamplingParams`; ranges are checked by the front, which knows the vocabulary and the
context.
"""

from __future__ import annotations

from typing import TypeVar

from thalweg.core.sampling import SamplingParams
from thalweg.server.protocol import Common, NativeSampling

T = TypeVar("T")


def given(value: T | None, default: T) -> T:
    return default if value is None else value


def openai_params(
    body: Common, default: SamplingParams, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The parameters that both OpenAI routes share. Raises InvalidRequest for what this server cannot honour."""
    body.refuse()
    return SamplingParams(
        temperature=given(body.temperature, default.temperature),
        top_k=given(body.top_k, default.top_k),
        top_p=given(body.top_p, default.top_p),
        min_p=given(body.min_p, default.min_p),
        repetition_penalty=given(body.repetition_penalty, default.repetition_penalty),
        frequency_penalty=given(body.frequency_penalty, default.frequency_penalty),
        presence_penalty=given(body.presence_penalty, default.presence_penalty),
        logit_bias=tuple((body.logit_bias or {}).items()),
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=given(body.min_tokens, 0),
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        n=given(body.n, 1),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def native_params(
    body: NativeSampling, default: SamplingParams, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """The parameters of /generate. Raises InvalidRequest for what this server cannot honour."""
    body.refuse("sampling_params.")
    return SamplingParams(
        temperature=given(body.temperature, default.temperature),
        top_k=given(body.top_k, default.top_k),
        top_p=given(body.top_p, default.top_p),
        min_p=given(body.min_p, default.min_p),
        repetition_penalty=given(body.repetition_penalty, default.repetition_penalty),
        frequency_penalty=given(body.frequency_penalty, default.frequency_penalty),
        presence_penalty=given(body.presence_penalty, default.presence_penalty),
        logit_bias=tuple((body.logit_bias or {}).items()),
        seed=given(body.sampling_seed, body.seed),
        max_tokens=max_tokens,
        min_tokens=given(body.min_new_tokens, 0),
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False,
        n=given(body.n, 1),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())
