"""The OpenAPI page: every route with its bodies, answers and errors, made from the structs that read and write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import msgspec
from msgspec import UNSET, UnsetType

from thalweg import __version__
from thalweg.core.messages import Stats
from thalweg.core.sampling import MAX_LOGPROBS, MAX_SEED
from thalweg.server.auth import COUNTED, PROBES
from thalweg.server.errors import ANTHROPIC, AnthropicBody, ErrorBody
from thalweg.server.openai_responses import ChatChoice, CompletionChoice, UsageInfo

Type = Any  # a type, or a union of types: what msgspec makes a schema of


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(TypedDict):
    """Answer of /tokenize: of a text or conversation, or of each text of a list."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int | None


class Detokenized(TypedDict):
    prompt: str
    text: str


class Aborted(TypedDict):
    """aborted: sequences that were told to end."""

    aborted: int


class Flushed(TypedDict):
    flushed: bool


class OperationResult(TypedDict):
    """message: what came of it."""

    success: bool
    message: str


class WeightsUpdated(OperationResult):
    num_paused_requests: int


class State(TypedDict):
    status: Literal["starting", "ready", "draining", "dead"]
    reason: str


class InternalState(TypedDict):
    running: int
    waiting: int
    num_running_reqs: int
    num_queue_reqs: int
    token_usage: float
    cache_held: float
    cache_hit_rate: float
    prefill_throughput: float
    decode_throughput: float
    last_gen_throughput: float
    avg_spec_accept_length: float | None
    spec_accept_rate: float | None
    spec_accept_rate_by_depth: list[float]
    spec_rolled_back_tokens: int
    stats: Stats


class ServerInfo(TypedDict):
    version: str
    status: str
    reason: str
    model_path: str
    served_model_name: str
    context_length: int | None
    weight_version: str
    strip_thinking_cache: bool
    slots: int | None
    requests: int
    uptime_seconds: float
    internal_states: list[InternalState]


class Completion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | UnsetType = UNSET


class GeneratedMeta(msgspec.Struct):
    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
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


class Generated(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: GeneratedMeta


class PlainText:
    """An answer that is not JSON."""


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """A route as the page shows it. body: what is sent, None for nothing; answer: of a 200. many: a list of answers
    answers a list. optional: the body may be left out.
    """

    path: str
    method: str
    name: str
    summary: str
    body: Type | None
    answer: Type
    many: bool = False
    admin: bool = False
    optional: bool = False


_ERRORS = {
    400: "The request is wrong: the message names the field.",
    401: "A key is needed, and none of the server's was brought.",
    403: "An admin route without the admin key, or a page of another site.",
    404: "There is no such model, response or route.",
    413: "The body is longer than --max-body-bytes.",
    415: "The body has a Content-Encoding.",
    429: "Too many requests: Retry-After says when to come back.",
    500: "A fault of the server.",
    503: "The engine starts, drains or is dead.",
}
_EVENT = {  # data: a JSON object, or [DONE]
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_REF = "#/components/schemas/{name}"


_COUNT = {"minimum": 0}
_LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}
# What the checks of values say beyond types, by the name of the field; numbers here, lists below.
_RANGES: Mapping[str, Mapping[str, float]] = {
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "n": {"minimum": 1, "maximum": 128},
    "seed": {"minimum": -MAX_SEED - 1, "maximum": MAX_SEED},
    "sampling_seed": {"minimum": -MAX_SEED - 1, "maximum": MAX_SEED},
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "top_logprobs": _LOGPROBS,
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "max_new_tokens": _COUNT,
    "min_tokens": _COUNT,
    "min_new_tokens": _COUNT,
    "budget_tokens": {"minimum": 1},
    "num_steps": {"minimum": 1, "maximum": 2**31 - 1},
}
_FILLED = ("messages", "input")  # lists that must not be empty


def document(routes: Iterable[RouteDoc], keys: bool, open_probes: bool) -> bytes:
    """The page as JSON. keys: whether requests must bring one; open_probes: but not to /health, /ready and /metrics."""
    listed = list(routes)
    types = {one for route in listed for one in (route.body, route.answer) if one is not None and one is not PlainText}
    ordered = sorted(types | {ErrorBody, AnthropicBody}, key=str)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=_REF)
    for component in components.values():
        for name, schema in component.get("properties", {}).items():
            _narrow(name, schema)
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        operation = _operation(route, schema_of.__getitem__)
        if keys and open_probes and route.path in PROBES:
            operation["security"] = []
        paths.setdefault(re.sub(r":path}", "}", route.path), {})[route.method.lower()] = operation
    page: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Thalweg", "version": __version__, "description": "docs/api.md tells more."},
        "paths": paths,
        "components": {"schemas": components},
    }
    if keys:
        page["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        page["security"] = [{"bearer": []}, {"x-api-key": []}]
    return msgspec.json.encode(page)


def _narrow(name: str, schema: dict[str, Any]) -> None:
    """Writes the ranges of a field into its schema, or into the alternatives of it."""
    for one in schema.get("anyOf", [schema]):
        if one.get("type") in ("number", "integer"):
            one.update(_RANGES.get(name, {}))
        elif one.get("type") == "array" and name in _FILLED:
            one["minItems"] = 1


def _operation(route: RouteDoc, schema_of: Callable[[Type], Mapping[str, Any]]) -> dict[str, Any]:
    error = schema_of(AnthropicBody if route.path.startswith(ANTHROPIC) else ErrorBody)
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": (
            f"{route.name}_{route.method.lower()}_{re.sub('[^a-z0-9]+', '_', route.path.lower()).strip('_')}"
        ),
        "responses": {"200": {"description": "It is done.", "content": _content(route, schema_of)}},
    }
    names = re.findall(r"{(\w+)", route.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if route.body is not None:
        content = {"application/json": {"schema": schema_of(route.body)}}
        operation["requestBody"] = {"required": not route.optional, "content": content}
    for status in _statuses(route, bool(names)):
        shape = {"application/json": {"schema": schema_of(State) if _is_probe(route) else error}}
        operation["responses"][str(status)] = {"description": _ERRORS[status], "content": shape}
    return operation


def _content(route: RouteDoc, schema_of: Callable[[Type], Mapping[str, Any]]) -> dict[str, Any]:
    if route.answer is PlainText:
        return {"text/plain": {"schema": {"type": "string"}}}
    one = schema_of(route.answer)
    content = {"application/json": {"schema": {"anyOf": [one, {"type": "array", "items": one}]} if route.many else one}}
    if route.body is not None and "stream" in {field.name for field in msgspec.structs.fields(route.body)}:
        content["text/event-stream"] = {"schema": _EVENT}
    return content


def _is_probe(route: RouteDoc) -> bool:
    return route.answer is State


def _statuses(route: RouteDoc, named: bool) -> list[int]:
    if _is_probe(route):
        return [503]
    found = {401, 500, 503}
    found |= {403} if route.admin or route.body is not None else set()
    found |= {400, 404, 413, 415} if route.body is not None else set()
    found |= {400} if route.answer is OperationResult else set()
    found |= {404} if named else set()
    found |= {429} if route.path in COUNTED else set()
    return sorted(found)
