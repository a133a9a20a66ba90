"""The APIs of the load generator: what a request looks like in each, and how its answer is read.

Events are decoded into typed structs (unknown fields are skipped in C), because the client shares its cores with the
server that it measures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from thalweg.bench.datasets import SampleRequest
from thalweg.bench.errors import HttpError
from thalweg.bench.http_client import CannotConnect, HttpClient, HttpReply, SendTime
from thalweg.bench.metrics import Record


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """OpenAI's `usage`, or SGLang's `meta_info`, which has the cached tokens itself."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    cached_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    """A chat delta or message. Reasoning is in `reasoning_content`, or in `reasoning` (vLLM)."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: object = None


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """One `data:` line of a stream, or a whole unstreamed answer."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None
    text: str = ""  # SGLang's `/generate`: text, ids and counts are those of the whole output so far
    output_ids: list[int] | None = None
    meta_info: _Usage | None = None


_decode = msgspec.json.Decoder(_Event).decode


class RequestOptions(NamedTuple):
    """Settings that all requests of a run share."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    stream: bool = True
    timeout: float = 21600.0
    extra: Mapping[str, object] = {}  # fields of every body

    def sampling(self, prompt: SampleRequest, limit: str) -> dict[str, object]:
        # ignore_eos is no field of OpenAI's: strict servers must not see it where it is off
        eos = {"ignore_eos": True} if self.ignore_eos else {}
        return {limit: prompt.output_len, **eos, "temperature": self.temperature}


class Backend(NamedTuple):
    """One API."""

    path: str
    token_ids: bool = False  # ask for them in the stream (Thalweg and vLLM have the field)

    def body(self, prompt: SampleRequest, options: RequestOptions) -> dict[str, object]:
        """Raises DatasetError when the API cannot carry such a prompt."""
        body: dict[str, object] = {"stream": options.stream}
        if self.path == GENERATE:
            source = prompt.as_ids_or_text()
            body["text" if isinstance(source, str) else "input_ids"] = source
            return body | {"sampling_params": options.sampling(prompt, "max_new_tokens")} | dict(options.extra)
        body |= {"model": options.model, **options.sampling(prompt, "max_tokens")}
        if options.stream:
            body["stream_options"] = {"include_usage": True}
        if self.token_ids:
            body["return_token_ids"] = True
        if self.path == CHAT:
            body["messages"] = prompt.as_messages()
        else:
            body["prompt"] = prompt.as_ids_or_text()
        return body | dict(options.extra)


COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
BACKENDS = {
    "thalweg": Backend(COMPLETIONS, token_ids=True),
    "sglang": Backend(GENERATE),
    **dict.fromkeys(("openai", "vllm", "sglang-oai"), Backend(COMPLETIONS)),
    **dict.fromkeys(("openai-chat", "vllm-chat", "sglang-oai-chat"), Backend(CHAT)),
}


def _error_text(value: object) -> str:
    """The message of `{"message": …}`, `{"error": {"message": …}}`, a string, or anything else as text."""
    while isinstance(value, dict):
        inner = value.get("error", value.get("message", value.get("detail")))
        if inner is None:
            break
        value = inner
    return str(value)[:200]


class AnswerReader:
    """Reads the answer of one request into its record."""

    def __init__(self, backend: Backend, record: Record) -> None:
        self.backend, self.record, self.rest = backend, record, b""
        self.last, self.seen = 0.0, 0  # when tokens came last, and how many came

    def feed(self, chunk: bytes, now: float) -> None:
        """A chunk of a stream of server-sent events."""
        record = self.record
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            record.latency = now - record.start
            if (data := line[5:].strip()) == b"[DONE]":
                record.done = True
            else:
                self.event(data, now)

    def event(self, data: bytes, now: float) -> None:
        """One event, or a whole unstreamed answer. A broken one becomes the record's error, because the callback of the
        parser must not raise.
        """
        record, count = self.record, 0
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            record.error = record.error or f"not an event of this API ({self.backend.path}): {error}"
            return
        if event.error is not None:
            record.error = f"error event: {_error_text(event.error)}"
            return
        for choice in event.choices:
            text, called = choice.text or "", False
            for part in (choice.delta, choice.message):
                if part is not None:
                    thought = part.reasoning_content or part.reasoning or ""
                    record.thought += len(thought)
                    text += thought + (part.content or "")
                    called = called or bool(part.tool_calls)
            count += bool(text or called) if choice.token_ids is None else len(choice.token_ids)
            record.ids += choice.token_ids or ()
            record.logprobs += choice.logprobs.token_logprobs if choice.logprobs else ()
            record.text += text
            record.done = record.done or choice.finish_reason is not None
        if event.meta_info is not None:
            record.text, record.ids = event.text, event.output_ids or record.ids
        if (usage := event.usage or event.meta_info) is not None:
            record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
            record.output_tokens = usage.completion_tokens or 0
            record.cached_tokens = (usage.prompt_tokens_details or usage).cached_tokens or record.cached_tokens
            if event.choices or event.meta_info:  # it counts an event's tokens better than the event does
                count = record.output_tokens - self.seen
        if count > 0:
            if record.ttft < 0:
                record.ttft = now - record.start
            else:
                record.itl.extend([(now - self.last) / count] * count)
            self.last, self.seen = now, self.seen + count

    def finish(self, reply: HttpReply, stream: bool) -> None:
        record = self.record
        if reply.status != 200:
            try:
                text = _error_text(msgspec.json.decode(reply.body))
            except msgspec.DecodeError:
                text = reply.text.strip()[:200]
            record.error = f"HTTP {reply.status} {reply.reason}: {text}"
            return
        if not stream:
            record.latency, record.done = time.perf_counter() - record.start, True
            self.event(bytes(reply.body), record.start + record.latency)
        record.output_tokens = record.output_tokens or self.seen
        if not record.done and not record.error:
            record.error = "the stream ended without [DONE] or a finish reason"


async def send_request(
    client: HttpClient,
    backend: Backend,
    prompt: SampleRequest,
    options: RequestOptions,
    record: Record,
    due: float = 0.0,
) -> None:
    """Sends one request at `due` (time.perf_counter(); a time in the past is at once) and fills its record; any failure
    is the record's error. Only a cancellation is raised.

    Body and connection are made before. Where they are ready in time, latencies count from the moment of sending; else
    from the moment at which the request could have been sent, so that a slow connection shows.
    """
    body, reader = msgspec.json.encode(backend.body(prompt, options)), AnswerReader(backend, record)
    record.prompt_tokens, record.turn = prompt.input_len, prompt.turn
    record.start = max(time.perf_counter(), due)

    def on_sent(now: float) -> None:
        record.sent = now
        if now >= due > 0 and record.start == due:
            record.start = now

    on_body = reader.feed if options.stream else None
    try:
        async with asyncio.timeout(options.timeout + max(due - time.perf_counter(), 0.0)):
            reply = await client.request("POST", backend.path, body, on_body, SendTime(due, on_sent))
        reader.finish(reply, options.stream)
    except TimeoutError:
        record.error = f"no complete answer within {options.timeout:g} s"
    except HttpError as error:
        record.error = record.error or str(error)
        record.refused = isinstance(error, CannotConnect)
    record.latency = record.latency or max(time.perf_counter() - record.start, 0.0)
