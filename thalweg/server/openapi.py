"""The OpenAPI page: every route with its bodies, responses and errors, made from the types that read and write them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from thalweg import __version__
from thalweg.core.messages import Stats
from thalweg.core.sampling import MAX_LOGPROBS, MAX_SEED
from thalweg.server.auth import COUNTED, PROBES
from thalweg.server.errors import ANTHROPIC, AnthropicErrorBody, OpenAIErrorBody


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


class TokenizeResponse(TypedDict):
    """Lists for a list of texts."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int | None


class DetokenizeResponse(TypedDict):
    prompt: str
    text: str


class AbortResponse(TypedDict):
    aborted: int  # sequences


class FlushResponse(TypedDict):
    flushed: bool


class OperationResult(TypedDict):
    success: bool
    message: str


class UpdateWeightsResponse(OperationResult):
    num_paused_requests: int


class ServerState(TypedDict):
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


class ServerInfoResponse(TypedDict):
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


class GenerateMeta(msgspec.Struct):
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


class GenerateResponse(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


class PlainText:
    """A response that is not JSON."""


class Route(NamedTuple):
    path: str
    method: str
    handler: Callable[..., Awaitable[Response]]  # (context, request), and the body where there is one
    body: type[msgspec.Struct] | None
    response: Any  # type of a 200
    lists: bool = False  # a list of inputs is answered by a list
    admin: bool = False  # needs the admin key
    optional_body: bool = False  # an empty body is {}


_ERRORS = {
    400: "The request is wrong: the message names the field.",
    401: "A key is needed, and the request has no valid one.",
    403: "An admin route without the admin key, or a page of another site.",
    404: "There is no such model, response or route.",
    413: "The body is longer than --max-body-bytes.",
    415: "The body has a Content-Encoding.",
    429: "Too many requests: Retry-After says when to try again.",
    500: "An internal error.",
    503: "The engine starts, drains or is dead.",
}
_EVENT = {  # data: a JSON object, or [DONE]
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_COUNT = {"minimum": 0}
_LOGPROBS = {"minimum": 0, "maximum": MAX_LOGPROBS}
_SEED = {"minimum": -MAX_SEED - 1, "maximum": MAX_SEED}
# Ranges that are checked beyond the types, by field name.
_RANGES: Mapping[str, Mapping[str, float]] = {
    "temperature": {"minimum": 0, "maximum": 100},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 100},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "n": {"minimum": 1, "maximum": 128},
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "budget_tokens": {"minimum": 1},
    "num_steps": {"minimum": 1, "maximum": 2**31 - 1},
    **dict.fromkeys(("seed", "sampling_seed"), _SEED),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "top_logprobs"), _LOGPROBS),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"), _COUNT),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), _COUNT),
}
_NOT_EMPTY = ("messages", "input")  # lists


def document(routes: Iterable[Route], keys: bool, open_probes: bool) -> bytes:
    """The page as JSON. keys: requests need one; open_probes: except for /health, /ready and /metrics."""
    routes = list(routes)
    types = {kind for route in routes for kind in (route.body, route.response)} - {None, PlainText}
    ordered = sorted(types | {OpenAIErrorBody, AnthropicErrorBody}, key=str)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    for component in components.values():
        for name, schema in component.get("properties", {}).items():
            _add_range(name, schema)
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation = _operation(route, schema_of)
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


def _add_range(name: str, schema: dict[str, Any]) -> None:
    for option in schema.get("anyOf", [schema]):
        if option.get("type") in ("number", "integer"):
            option.update(_RANGES.get(name, {}))
        elif option.get("type") == "array" and name in _NOT_EMPTY:
            option["minItems"] = 1


def _operation(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    name, path = route.handler.__name__, re.sub("[^a-z0-9]+", "_", route.path.lower()).strip("_")
    is_probe = route.response is ServerState
    operation: dict[str, Any] = {
        "summary": " ".join((route.handler.__doc__ or name.replace("_", " ")).split()),
        "operationId": f"{name}_{route.method.lower()}_{path}",
        "responses": {"200": {"description": "Success.", "content": _content(route, schema_of)}},
    }
    parameters = re.findall(r"{(\w+)", route.path)
    if parameters:
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": schema} for parameter in parameters
        ]
    if route.body is not None:
        content = {"application/json": {"schema": schema_of[route.body]}}
        operation["requestBody"] = {"required": not route.optional_body, "content": content}
    error = ServerState if is_probe else AnthropicErrorBody if route.path.startswith(ANTHROPIC) else OpenAIErrorBody
    for status in [503] if is_probe else _statuses(route, bool(parameters)):
        content = {"application/json": {"schema": schema_of[error]}}
        operation["responses"][str(status)] = {"description": _ERRORS[status], "content": content}
    return operation


def _content(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    if route.response is PlainText:
        return {"text/plain": {"schema": {"type": "string"}}}
    schema = schema_of[route.response]
    if route.lists:
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    content = {"application/json": {"schema": schema}}
    if route.body is not None and "stream" in route.body.__struct_fields__:
        content["text/event-stream"] = {"schema": _EVENT}
    return content


def _statuses(route: Route, has_parameters: bool) -> list[int]:
    statuses = {401, 500, 503}
    if route.body is not None:
        statuses |= {400, 403, 404, 413, 415}
    statuses |= {403} if route.admin else set()
    statuses |= {400} if route.response is OperationResult else set()
    statuses |= {404} if has_parameters else set()
    statuses |= {429} if route.path in COUNTED else set()
    return sorted(statuses)
