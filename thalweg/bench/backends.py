"""The APIs that the load generator speaks: what a request looks like in each, and what its stream says.

A backend turns a `Prompt` into a body and a stream into a `Record`. Events are decoded into typed structs (unknown
fields are skipped in C), because the client shares its cores with the server it measures.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from thalweg.bench.client import CannotConnect, Client, Reply, Sending
from thalweg.bench.datasets import Prompt
from thalweg.bench.errors import HttpError
from thalweg.bench.metrics import Record


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: Details | None = None


class Text(msgspec.Struct):
    """A chat delta or message. Thoughts are in `reasoning_content`, or in `reasoning` (vLLM)."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: object = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Text | None = None
    message: Text | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class Event(msgspec.Struct):
    """One `data:` line of an OpenAI stream, or a whole unstreamed answer."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: object = None


class Meta(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class NativeEvent(msgspec.Struct):
    """SGLang's `/generate`: text and counts are those of the whole output so far."""

    text: str = ""
    output_ids: list[int] | None = None
    meta_info: Meta | None = None
    error: object = None


@dataclass(frozen=True, slots=True)
class Options:
    """What is the same for all requests of a run. extra: fields that go into every body as they are."""

    model: str
    temperature: float | None = 0.0
    ignore_eos: bool = True
    stream: bool = True
    timeout: float = 21600.0
    extra: Mapping[str, object] = field(default_factory=dict)

    def sampling(self, prompt: Prompt, limit: str) -> dict[str, object]:
        body: dict[str, object] = {limit: prompt.output_len}
        if (
            self.ignore_eos
        ):  # no field of OpenAI's: servers that know its own only must not see it where it says nothing
            body["ignore_eos"] = True
        return body if self.temperature is None else body | {"temperature": self.temperature}


class Watch:
    """Times of one request: `tokens(n)` at each arrival fills the record."""

    def __init__(self, record: Record) -> None:
        self.record, self.last = record, 0.0
        self.seen = 0

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

    def body(self, prompt: Prompt, options: Options) -> dict[str, object]:
        """The request. Raises ValueError when the API cannot carry such a prompt."""

    def event(self, data: bytes, now: float, watch: Watch) -> None:
        """One event of the stream, or the whole of an unstreamed answer. Raises msgspec.DecodeError on what is no
        event.
        """


def _usage(usage: Usage, record: Record) -> None:
    record.prompt_tokens = usage.prompt_tokens or record.prompt_tokens
    record.output_tokens = usage.completion_tokens or 0
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


class OpenAI:
    """Completions or chat completions. ids: ask for token ids in the stream (Thalweg and vLLM know the field)."""

    def __init__(self, chat: bool, ids: bool) -> None:
        self.chat, self.ids = chat, ids
        self.path = "/v1/chat/completions" if chat else "/v1/completions"
        self._decode = msgspec.json.Decoder(Event).decode

    def body(self, prompt: Prompt, options: Options) -> dict[str, object]:
        body: dict[str, object] = {
            "model": options.model,
            "stream": options.stream,
            **options.sampling(prompt, "max_tokens"),
        }
        if options.stream:
            body["stream_options"] = {"include_usage": True}
        if self.ids:
            body["return_token_ids"] = True
        if self.chat:
            body["messages"] = prompt.as_messages()
        else:
            body["prompt"] = prompt.as_ids_or_text()
        return body | dict(options.extra)

    def event(self, data: bytes, now: float, watch: Watch) -> None:
        event, record = self._decode(data), watch.record
        if event.error is not None:
            record.error = f"error event: {_words(event.error)}"
            return
        count, text = 0, ""
        for choice in event.choices:
            piece = choice.text or ""
            for part in (choice.delta, choice.message):
                if part is not None:
                    thought = part.reasoning_content or part.reasoning or ""
                    record.thought += len(thought)
                    piece += thought + (part.content or "")
                    count += bool(part.tool_calls and not piece)
            if choice.token_ids is not None:
                count += len(choice.token_ids)
                record.ids += choice.token_ids
            else:
                count += bool(piece)
            text += piece
            record.done = record.done or choice.finish_reason is not None
        record.text += text
        if event.usage is not None:  # continuous usage counts a chunk's tokens better than the chunk does
            _usage(event.usage, record)
            if event.choices:
                count = record.output_tokens - watch.seen
        watch.tokens(count, now)


class Native:
    """SGLang's `/generate`, which Thalweg serves too."""

    path = "/generate"

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(NativeEvent).decode

    def body(self, prompt: Prompt, options: Options) -> dict[str, object]:
        shown = prompt.as_ids_or_text()
        source: dict[str, object] = {"text": shown} if isinstance(shown, str) else {"input_ids": shown}
        body = source | {"stream": options.stream, "sampling_params": options.sampling(prompt, "max_new_tokens")}
        return body | dict(options.extra)

    def event(self, data: bytes, now: float, watch: Watch) -> None:
        event, record = self._decode(data), watch.record
        if event.error is not None:
            record.error = f"error event: {_words(event.error)}"
            return
        record.text = event.text
        record.ids = event.output_ids or record.ids
        if event.meta_info is not None:
            record.prompt_tokens = event.meta_info.prompt_tokens or record.prompt_tokens
            record.output_tokens = event.meta_info.completion_tokens
            record.cached_tokens = event.meta_info.cached_tokens
            watch.tokens(record.output_tokens - watch.seen, now)


def make_backend(name: str) -> Backend:
    """The backend of one of `BACKENDS`' names."""
    kind = BACKENDS[name]
    if kind == "native":
        return Native()
    return OpenAI(chat=kind == "chat", ids=name == "thalweg")


BACKENDS: Mapping[str, str] = {
    "thalweg": "completions",
    "openai": "completions",
    "openai-chat": "chat",
    "sglang": "native",
    "sglang-oai": "completions",
    "sglang-oai-chat": "chat",
    "vllm": "completions",
    "vllm-chat": "chat",
}


def _words(value: object) -> str:
    """What an error says: `{"message": …}`, `{"error": {"message": …}}`, a string, or whatever it is."""
    while isinstance(value, dict):
        inner = value.get("error", value.get("message", value.get("detail")))
        if inner is None:
            break
        value = inner
    return str(value)[:200]


def _words_of_body(body: bytes) -> str:
    try:
        return _words(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body.decode("utf-8", errors="replace").strip()[:200]


class _Stream:
    """Cuts pieces of a body into the `data:` lines of server-sent events."""

    def __init__(self, backend: Backend, watch: Watch) -> None:
        self.backend, self.watch, self.rest = backend, watch, b""

    def feed(self, piece: bytes, now: float) -> None:
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            self.watch.record.latency = now - self.watch.record.start
            if data == b"[DONE]":
                self.watch.record.done = True
            else:
                _event(self.backend, data, now, self.watch)


def _event(backend: Backend, data: bytes, now: float, watch: Watch) -> None:
    """An event that is none becomes the record's error, for the parser's callback must not raise."""
    try:
        backend.event(data, now, watch)
    except msgspec.DecodeError as error:
        watch.record.error = watch.record.error or f"not an event of this API ({backend.path}): {error}"


async def ask(
    client: Client, backend: Backend, prompt: Prompt, options: Options, record: Record, due: float = 0.0
) -> None:
    """Sends one request at `due` (time.perf_counter(); one that has passed means at once) and fills its record;
    whatever goes wrong is the record's error. Only a cancellation comes out.

    Body and connection are made before. Where they are ready in time, latencies count from the moment of sending; where
    not, from the moment at which the request could have been sent, so that a connection that takes its time shows.
    """
    body = msgspec.json.encode(backend.body(prompt, options))
    watch = Watch(record)
    record.prompt_tokens, record.turn = prompt.input_len, prompt.turn
    record.start = max(time.perf_counter(), due)

    def on_sent(now: float) -> None:
        record.sent = now
        if now >= due > 0 and record.start == due:
            record.start = now

    on_body = _Stream(backend, watch).feed if options.stream else None
    try:
        async with asyncio.timeout(options.timeout + max(due - time.perf_counter(), 0.0)):
            reply = await client.request("POST", backend.path, body, on_body, Sending(due, on_sent))
        _close(reply, backend, watch, options)
    except TimeoutError:
        record.error = f"no complete answer within {options.timeout:g} s"
    except HttpError as error:
        record.error = record.error or str(error)
        record.refused = isinstance(error, CannotConnect)
    record.latency = record.latency or max(time.perf_counter() - record.start, 0.0)


def _close(reply: Reply, backend: Backend, watch: Watch, options: Options) -> None:
    record = watch.record
    if reply.status != 200:
        record.error = f"HTTP {reply.status} {reply.reason}: {_words_of_body(bytes(reply.body))}"
        return
    if not options.stream:
        record.latency = time.perf_counter() - record.start
        _event(backend, bytes(reply.body), record.start + record.latency, watch)
        record.itl.clear()
        record.done = True
    record.output_tokens = record.output_tokens or watch.seen
    if not record.done and not record.error:
        record.error = "the stream ended without [DONE] or a finish reason"
