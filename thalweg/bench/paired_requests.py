"""Compares the text of each stream with its pair: the same request, answered in one piece.

A lost, doubled or reordered token would change the text. Where two texts differ, the model is asked for
log-probabilities: a near-tie (NEAR_TIE, the rounding of another batch) at that place explains the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from thalweg.bench.backends import RequestOptions
from thalweg.bench.datasets import Prompt
from thalweg.bench.http_client import HttpClient
from thalweg.bench.metrics import Record
from thalweg.bench.statistics import common_length

NEAR_TIE = 1e-3  # in logits


class _Logprobs(msgspec.Struct):
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct):
    text: str
    logprobs: _Logprobs


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@dataclass(slots=True)
class PairedTexts:
    """Counts of pairs."""

    compared: int = 0
    equal: int = 0
    excused: int = 0  # differ at a near-tie
    wrong: list[str] = field(default_factory=list)  # a line for each other pair
    asked_tokens: int = 0  # output tokens of the requests for log-probabilities


def margin_at(answer: bytes, place: int) -> float:
    """The difference, in logits, of the two best tokens where the character `place` of an answer was decided: the
    smallest of the tokens that begin there or are the last to begin before it. inf beyond the answer.
    """
    choice = msgspec.json.decode(answer, type=_Completion).choices[0]
    log = choice.logprobs
    if place > len(choice.text) or not log.text_offset:
        return math.inf
    begins = max((offset for offset in log.text_offset if offset <= place), default=0)
    margins = [math.inf]
    for offset, logprobs in zip(log.text_offset, log.top_logprobs, strict=True):
        if offset == begins and logprobs and len(logprobs) > 1:
            first, second = sorted(logprobs.values(), reverse=True)[:2]
            margins.append(first - second)
    return min(margins)


async def compare(
    client: HttpClient,
    options: RequestOptions,
    prompts: Sequence[Prompt],
    streams: Sequence[Record],
    wholes: Sequence[Record],
) -> PairedTexts:
    """Compares the texts pair by pair. Failed requests are not compared: they are counted as failures."""
    texts = PairedTexts()
    for i, (prompt, stream, whole) in enumerate(zip(prompts, streams, wholes, strict=True)):
        if not (stream.ok and whole.ok):
            continue
        texts.compared += 1
        if stream.text == whole.text:
            texts.equal += 1
            continue
        place = common_length(stream.text, whole.text)
        sampling = options.sampling(prompt, "max_tokens")
        body = {"model": options.model, "prompt": prompt.as_ids_or_text(), "logprobs": 2, **sampling}
        reply = await client.request("POST", "/v1/completions", msgspec.json.encode(body))
        margin = margin_at(bytes(reply.body), place) if reply.status == 200 else math.inf
        texts.asked_tokens += prompt.output_len
        if margin < NEAR_TIE:
            texts.excused += 1
        else:
            shown = f"{stream.text[place : place + 24]!r}, its pair {whole.text[place : place + 24]!r}"
            texts.wrong.append(f"stream {i} has at character {place} {shown}; the choice led by {margin:.3g}")
    return texts
