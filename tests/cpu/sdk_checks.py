"""What the official OpenAI SDK must get from any Thalweg server. Each check takes a client and the model's name.

`test_server_sdk.py` runs them against a scripted model, `test_serve.py` against a real engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

PROMPT = "The quick brown fox"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something about rivers."}]
GREEDY = {"temperature": 0.0, "max_tokens": 24}


def models(client: openai.OpenAI, model: str) -> None:
    assert model in [card.id for card in client.models.list()]
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-17")


def completion(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, **GREEDY)
    assert answer.object == "text_completion" and answer.model == model and answer.id.startswith("cmpl-")
    assert answer.choices[0].finish_reason in ("stop", "length") and answer.choices[0].index == 0
    usage = answer.usage
    assert usage and 0 < usage.completion_tokens <= 24 and usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def completion_stream_equals_whole(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt=PROMPT, **GREEDY)
    chunks = list(
        client.completions.create(
            model=model, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert len({c.id for c in chunks}) == 1
    last = chunks[-1]
    assert not last.choices and last.usage and whole.usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        whole.usage.prompt_tokens,
        whole.usage.completion_tokens,
    )
    assert all(c.usage is None for c in chunks[:-1])


def prompts_as_texts_and_ids(client: openai.OpenAI, model: str) -> None:
    texts = [PROMPT, "Another one begins here", "x"]
    alone = [
        client.completions.create(model=model, prompt=text, extra_body={"return_token_ids": True}, **GREEDY)
        for text in texts
    ]
    together = client.completions.create(model=model, prompt=texts, **GREEDY)
    assert [c.index for c in together.choices] == [0, 1, 2]
    assert [c.text for c in together.choices] == [a.choices[0].text for a in alone]
    ids = [a.choices[0].model_extra["prompt_token_ids"] for a in alone if a.choices[0].model_extra]
    assert [c.text for c in client.completions.create(model=model, prompt=ids, **GREEDY).choices] == [
        c.text for c in together.choices
    ]
    one = client.completions.create(model=model, prompt=ids[1], **GREEDY)
    assert one.choices[0].text == together.choices[1].text
    assert together.usage and together.usage.prompt_tokens == sum(map(len, ids))


def completion_n(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=[PROMPT, "x"], n=3, seed=7, max_tokens=8, temperature=1.0)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3, 4, 5]
    once = client.completions.create(model=model, prompt=[PROMPT, "x"], max_tokens=1)
    assert answer.usage and once.usage
    assert answer.usage.prompt_tokens == once.usage.prompt_tokens, "a prompt counts once, however many choices it has"
    streamed = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(
        model=model, prompt=[PROMPT, "x"], n=3, seed=7, max_tokens=8, temperature=1.0, stream=True
    ):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == {c.index: c.text for c in answer.choices}, "a seed gives the same tokens whatever runs beside it"


def shown(tokens: list[str], offsets: list[int], text: str) -> list[tuple[str, int]]:
    """The tokens that are in the text, each with its place: the next one stands behind it."""
    pairs = zip(tokens, offsets, [*offsets[1:], len(text)], strict=True)
    visible = [(name, at) for name, at, after in pairs if after > at and not name.startswith("bytes:")]
    assert visible
    return visible


def completion_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, logprobs=3, **GREEDY)
    choice, log = answer.choices[0], answer.choices[0].logprobs
    assert log and log.tokens and log.token_logprobs and log.top_logprobs and log.text_offset and answer.usage
    lengths = {len(log.tokens), len(log.token_logprobs), len(log.top_logprobs), len(log.text_offset)}
    assert lengths == {answer.usage.completion_tokens}
    assert all(value <= 0 for value in log.token_logprobs)
    assert all(3 <= len(top) <= 4 for top in log.top_logprobs)
    assert log.text_offset[0] == 0 and log.text_offset == sorted(log.text_offset)
    assert all(choice.text.startswith(name, at) for name, at in shown(log.tokens, log.text_offset, choice.text))
    parts = client.completions.create(model=model, prompt=PROMPT, logprobs=3, stream=True, **GREEDY)
    pieces = [p.choices[0].logprobs for p in parts if p.choices[0].logprobs]
    assert [t for p in pieces for t in p.tokens or []] == log.tokens
    assert [t for p in pieces for t in p.text_offset or []] == log.text_offset
    assert choice.text


def listed_logprobs(client: openai.OpenAI, model: str) -> None:
    extra = {"logprob_token_ids": [5, 200, 30], "return_tokens_as_token_ids": True}
    kept: dict[str, Any] = {"model": model, "max_tokens": 3, "temperature": 0.0, "extra_body": extra}
    names = {f"token_id:{token}" for token in (5, 200, 30)}
    for number in (0, 1):
        log = client.completions.create(prompt=PROMPT, logprobs=number, **kept).choices[0].logprobs
        assert log and log.tokens and log.top_logprobs
        for own, tops in zip(log.tokens, log.top_logprobs, strict=True):
            assert set(tops) == names | {own}
    content: list[Any] = []
    for part in client.chat.completions.create(messages=MESSAGES, logprobs=True, stream=True, **kept):
        content += [] if part.choices[0].logprobs is None else part.choices[0].logprobs.content or []
    assert len(content) == 3
    for entry in content:
        found = [top.token for top in entry.top_logprobs]
        assert set(found) == names | {entry.token} and len(found) == len(set(found))
    for wrong in ({"prompt": "x"}, {"prompt": "x", "logprobs": 1, "echo": True}):
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(**{**kept, **wrong})
        assert bad.value.param == "logprob_token_ids"


def completion_echo_scores_the_prompt(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, echo=True, logprobs=1, max_tokens=4, temperature=0.0)
    log, usage = answer.choices[0].logprobs, answer.usage
    assert answer.choices[0].text.startswith(PROMPT)
    assert log and log.token_logprobs and log.tokens and log.top_logprobs and usage
    assert len(log.tokens) == usage.total_tokens
    assert log.token_logprobs[0] is None and log.top_logprobs[0] is None and log.text_offset
    text = answer.choices[0].text
    assert all(text.startswith(name, at) for name, at in shown(log.tokens, log.text_offset, text))
    assert all(value is not None and value <= 0 for value in log.token_logprobs[1:])
    only = client.completions.create(model=model, prompt=PROMPT, echo=True, max_tokens=0)
    assert only.choices[0].text == PROMPT and only.choices[0].finish_reason == "length"


def completion_stop(client: openai.OpenAI, model: str) -> None:
    text = client.completions.create(model=model, prompt=PROMPT, **GREEDY).choices[0].text
    stop = text[len(text) // 2 :][:3]
    cut = client.completions.create(model=model, prompt=PROMPT, stop=[stop, "never-ever"], **GREEDY).choices[0]
    assert cut.text == text[: text.index(stop)] and cut.finish_reason == "stop"
    assert cut.model_extra and cut.model_extra["matched_stop"] == stop


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)  # type: ignore[call-overload]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def chat_stream_equals_whole(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    choices = [c.choices[0] for c in chunks if c.choices]
    assert choices[0].delta.role == "assistant" and all(c.delta.role is None for c in choices[1:])
    assert "".join(c.delta.content or "" for c in choices) == (whole.choices[0].message.content or "")
    assert [c.finish_reason for c in choices if c.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def chat_n_and_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=MESSAGES,  # type: ignore[arg-type]
        n=2,
        seed=3,
        max_completion_tokens=6,
        logprobs=True,
        top_logprobs=2,
    )
    assert [c.index for c in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs and choice.logprobs.content
        assert len(choice.logprobs.content) <= 6
        for entry in choice.logprobs.content:
            assert entry.logprob <= 0 and entry.bytes is not None and len(entry.top_logprobs) == 2
            assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob


def length_limit(client: openai.OpenAI, model: str) -> None:
    for limits in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        answer = client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            extra_body={"ignore_eos": True},
            **limits,  # type: ignore[call-overload]
        )
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3


def errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-17", prompt=PROMPT)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    wrong = [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [PROMPT, [5]]}, "prompt[1]"),
        ({"best_of": 4}, "best_of"),
        ({"extra_body": {"top_k": "many"}}, "top_k"),
    ]
    for change, param in wrong:
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(**{"model": model, "prompt": PROMPT, **change})  # type: ignore[call-overload]
        assert bad.value.param == param, (change, bad.value.message)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model, prompt=PROMPT, stream=True, temperature=-1)
    assert bad.value.param == "temperature"


def async_client(client: openai.OpenAI, model: str) -> None:
    async def go() -> list[str]:
        async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key=client.api_key) as other:

            async def one() -> str:
                stream = await other.completions.create(model=model, prompt=PROMPT, stream=True, **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return list(await asyncio.gather(*(one() for _ in range(8))))

    assert len(set(asyncio.run(go()))) == 1


CHECKS: list[Callable[[openai.OpenAI, str], None]] = [
    models,
    completion,
    completion_stream_equals_whole,
    prompts_as_texts_and_ids,
    completion_n,
    completion_logprobs,
    listed_logprobs,
    completion_echo_scores_the_prompt,
    completion_stop,
    chat,
    chat_stream_equals_whole,
    chat_n_and_logprobs,
    length_limit,
    errors,
    async_client,
]
