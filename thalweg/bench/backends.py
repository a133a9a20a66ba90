"""The APIs of the load generator: what a request looks like in each, and how its stream is read.

Events are decoded into typed structs (unknown fields are skipped in C), because the client shares its cores with the
server that it measures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import msgspec

from thalweg.bench.datasets import Prompt
from thalweg.bench.errors import HttpError
from thalweg.bench.http_client import CannotConnect, HttpClient, HttpReply, SendTime
from thalweg.bench.metrics import Record


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Message(msgspec.Struct):
    """A chat delta or message. Reasoning is in `reasoning_content`, or in `reasoning` (vLLM)."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: object = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """One `data:` line of an OpenAI stream, or a whole unstreamed answer."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


class _Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class _NativeEvent(msgspec.Struct):
    """SGLang's `/generate`: text and counts are those of the whole output so far."""

    text: str = ""
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: object = None


class RequestOptions(NamedTuple):
    """What all requests of a run have in common."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    stream: bool = True
    timeout: float = 21600.0
    extra: Mapping[str, object] = {}  # fields of every body

    def sampling(self, prompt: Prompt, limit: str) -> dict[str, object]:
        # ignore_eos is no field of OpenAI's: strict servers must not see it where it is off
        eos = {"ignore_eos": True} if self.ignore_eos else {}
        return {limit: prompt.output_len, **eos, "temperature": self.temperature}


class TokenTimes:
    """Times of one request: `tokens(n)` at each arrival fills the record."""

    def __init__(self, record: Record) -> None:
        self.record, self.last, self.seen = record, 0.0, 0

    def tokens(self, count: int, now: float) -> None:
        if count <= 0:
            return
        record = self.record
        if record.ttft < 0:
            record.ttft = now - record.start
        else:
            record.itl.extend([(now - self.last) / count] * count)
        self.last, self.seen = now, self.seen + count


class Backend(Protocol):
    """One API."""

    path: str

    def body(self, prompt: Prompt, options: RequestOptions) -> dict[str, object]:
        """Raises DatasetError when the API cannot carry such a prompt."""

    def event(self, data: bytes, now: float, times: TokenTimes) -> None:
        """One event of the stream, or a whole unstreamed answer. Raises msgspec.DecodeError."""


class OpenAI:
    """Completions or chat completions. ids: ask for token ids in the stream (Thalweg and vLLM have the field)."""

    def __init__(self, chat: bool, ids: bool) -> None:
        self.chat, self.ids = chat, ids
        self.path = "/v1/chat/completions" if chat else "/v1/completions"
        self._decode = msgspec.json.Decoder(_Event).decode

    def body(self, prompt: Prompt, options: RequestOptions) -> dict[str, object]:
        body = {"model": options.model, "stream": options.stream, **options.sampling(prompt, "max_tokens")}
        if options.stream:
            body["stream_options"] = {"include_usage": True}
        if self.ids:
            body["return_token_ids"] = True
        if self.chat:
            body["messages"] = prompt.as_messages()
        else:
            body["prompt"] = prompt.as_ids_or_text()
        return body | dict(options.extra)

    def event(self, data: bytes, now: float, times: TokenTimes) -> None:
        event, record = self._decode(data), times.record
        if event.error is not None:
            record.error = f"error event: {_error_text(event.error)}"
            return
        count = 0
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
            record.text += text
            record.done = record.done or choice.finish_reason is not None
        if (usage := event.usage) is not None:
            record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
            record.output_tokens = usage.completion_tokens or 0
            if usage.prompt_tokens_details is not None:
                record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
            if event.choices:  # continuous usage counts a chunk's tokens better than the chunk does
                count = record.output_tokens - times.seen
        times.tokens(count, now)


class NativeApi:
    """SGLang's `/generate`, which Thalweg serves too."""

    path = "/generate"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_NativeEvent).decode

    def body(self, prompt: Prompt, options: RequestOptions) -> dict[str, object]:
        source = prompt.as_ids_or_text()
        body = {"text" if isinstance(source, str) else "input_ids": source, "stream": options.stream}
        return body | {"sampling_params": options.sampling(prompt, "max_new_tokens")} | dict(options.extra)

    def event(self, data: bytes, now: float, times: TokenTimes) -> None:
        event, record = self._decode(data), times.record
        if event.error is not None:
            record.error = f"error event: {_error_text(event.error)}"
            return
        record.text, record.ids = event.text, event.output_ids or record.ids
        if event.meta_info is not None:
            record.prompt_tokens = event.meta_info.prompt_tokens or record.prompt_tokens
            record.output_tokens = event.meta_info.completion_tokens
            record.cached_tokens = event.meta_info.cached_tokens
            times.tokens(record.output_tokens - times.seen, now)


BACKENDS = ("thalweg", "openai", "openai-chat", "sglang", "sglang-oai", "sglang-oai-chat", "vllm", "vllm-chat")


def make_backend(name: str) -> Backend:
    """One of BACKENDS."""
    return NativeApi() if name == "sglang" else OpenAI(chat=name.endswith("chat"), ids=name == "thalweg")


def _error_text(value: object) -> str:
    """The message of `{"message": …}`, `{"error": {"message": …}}`, a string, or anything else as text."""
    while isinstance(value, dict):
        inner = value.get("error", value.get("message", value.get("detail")))
        if inner is None:
            break
        value = inner
    return str(value)[:200]


class _EventStream:
    """Cuts chunks of a body into the `data:` lines of server-sent events."""

    def __init__(self, backend: Backend, times: TokenTimes) -> None:
        self.backend, self.times, self.rest = backend, times, b""

    def feed(self, chunk: bytes, now: float) -> None:
        record = self.times.record
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            record.latency = now - record.start
            if (data := line[5:].strip()) == b"[DONE]":
                record.done = True
            else:
                _read_event(self.backend, data, now, self.times)


def _read_event(backend: Backend, data: bytes, now: float, times: TokenTimes) -> None:
    """A broken event becomes the record's error, because the parser's callback must not raise."""
    try:
        backend.event(data, now, times)
    except msgspec.DecodeError as error:
        times.record.error = times.record.error or f"not an event of this API ({backend.path}): {error}"


async def send_request(
    client: HttpClient, backend: Backend, prompt: Prompt, options: RequestOptions, record: Record, due: float = 0.0
) -> None:
    """Sends one request at `due` (time.perf_counter(); a time in the past is at once) and fills its record; any failure
    is the record's error. Only a cancellation is raised.

    Body and connection are made before. Where they are ready in time, latencies count from the moment of sending; else
    from the moment at which the request could have been sent, so that a slow connection shows.
    """
    body, times = msgspec.json.encode(backend.body(prompt, options)), TokenTimes(record)
    record.prompt_tokens, record.turn = prompt.input_len, prompt.turn
    record.start = max(time.perf_counter(), due)

    def on_sent(now: float) -> None:
        record.sent = now
        if now >= due > 0 and record.start == due:
            record.start = now

    on_body = _EventStream(backend, times).feed if options.stream else None
    try:
        async with asyncio.timeout(options.timeout + max(due - time.perf_counter(), 0.0)):
            reply = await client.request("POST", backend.path, body, on_body, SendTime(due, on_sent))
        _finish(reply, backend, times, options.stream)
    except TimeoutError:
        record.error = f"no complete answer within {options.timeout:g} s"
    except HttpError as error:
        record.error = record.error or str(error)
        record.refused = isinstance(error, CannotConnect)
    record.latency = record.latency or max(time.perf_counter() - record.start, 0.0)


def _finish(reply: HttpReply, backend: Backend, times: TokenTimes, stream: bool) -> None:
    record = times.record
    if reply.status != 200:
        try:
            text = _error_text(msgspec.json.decode(reply.body))
        except msgspec.DecodeError:
            text = reply.text.strip()[:200]
        record.error = f"HTTP {reply.status} {reply.reason}: {text}"
        return
    if not stream:
        record.latency = time.perf_counter() - record.start
        _read_event(backend, bytes(reply.body), record.start + record.latency, times)
        record.itl.clear()
        record.done = True
    record.output_tokens = record.output_tokens or times.seen
    if not record.done and not record.error:
        record.error = "the stream ended without [DONE] or a finish reason"
