"""Is the text of each stream that of its twin, the same request answered in one piece?

A lost, doubled or reordered token would change the text. Where two texts differ, the model is asked once more with
log-probabilities: only where its own choice was a near-tie at that place (EPSILON, a rounding of another batch) may
they go apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from thalweg.bench.backends import Options
from thalweg.bench.client import Client
from thalweg.bench.datasets import Prompt
from thalweg.bench.metrics import Record

EPSILON = 1e-3  # in logits: of a near-tie


class _Log(msgspec.Struct):
    text_offset: list[int]
    top_logprobs: list[dict[str, float] | None]


class _Choice(msgspec.Struct):
    text: str
    logprobs: _Log


class _Answer(msgspec.Struct):
    choices: list[_Choice]


@dataclass(slots=True)
class Verdict:
    """compared: pairs. equal: of them, with the same text. excused: went apart at a near-tie. wrong: a line for each
    other pair. asked_tokens: output tokens of the requests that found that out.
    """

    compared: int = 0
    equal: int = 0
    excused: int = 0
    wrong: list[str] = field(default_factory=list)
    asked_tokens: int = 0


def parting(one: str, other: str) -> int:
    """How many characters two different texts have in common in front."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def margin_at(answer: bytes, place: int) -> float:
    """How far, in logits, the two best tokens were apart where the character `place` of an answer was decided: the
    least of the tokens that begin there or are the last to begin before it. inf where the answer does not reach that
    far.
    """
    choice = msgspec.json.decode(answer, type=_Answer).choices[0]
    log = choice.logprobs
    if place > len(choice.text) or not log.text_offset:
        return float("inf")
    begins = max((offset for offset in log.text_offset if offset <= place), default=0)
    margins = [float("inf")]
    for offset, tops in zip(log.text_offset, log.top_logprobs, strict=True):
        if offset == begins and tops and len(tops) > 1:
            first, second = sorted(tops.values(), reverse=True)[:2]
            margins.append(first - second)
    return min(margins)


async def compare(
    client: Client, options: Options, prompts: Sequence[Prompt], streams: Sequence[Record], twins: Sequence[Record]
) -> Verdict:
    """Compares the texts pair by pair. options: those of the requests. Failed requests are not compared: they are
    counted as failures.
    """
    verdict = Verdict()
    for i, (prompt, stream, twin) in enumerate(zip(prompts, streams, twins, strict=True)):
        if not (stream.ok and twin.ok):
            continue
        verdict.compared += 1
        if stream.text == twin.text:
            verdict.equal += 1
            continue
        place = parting(stream.text, twin.text)
        margin = await _margin(client, options, prompt, place)
        verdict.asked_tokens += prompt.output_len
        if margin < EPSILON:
            verdict.excused += 1
        else:
            shown = f"{stream.text[place : place + 24]!r}, its twin {twin.text[place : place + 24]!r}"
            verdict.wrong.append(f"stream {i} says at character {place} {shown}; the choice led by {margin:.3g}")
    return verdict


async def _margin(client: Client, options: Options, prompt: Prompt, place: int) -> float:
    """inf when the model cannot be asked."""
    body = {
        "model": options.model,
        "prompt": prompt.as_ids_or_text(),
        **options.sampling(prompt, "max_tokens"),
        "logprobs": 2,
    }
    reply = await client.request("POST", "/v1/completions", msgspec.json.encode(body))
    return margin_at(bytes(reply.body), place) if reply.status == 200 else float("inf")
