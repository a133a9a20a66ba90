"""The OpenAPI page: every route with its bodies, responses and errors, made from the types that read and write them."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import Any, get_type_hints

import msgspec

from thalweg import __version__
from thalweg.core.sampling import RANGES
from thalweg.server.accounting import PROBES
from thalweg.server.admin import OperationResult
from thalweg.server.errors import ANTHROPIC, AnthropicErrorBody, OpenAIErrorBody
from thalweg.server.middleware import COUNTED
from thalweg.server.probes import ServerState


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]  # (context, request), and `body` where there is one
    returns: Any = None  # type of a 200 where the handler returns a Response, or several; str: plain text
    admin: bool = False  # needs the admin key
    statuses: tuple[int, ...] = ()  # of its own errors

    @cached_property
    def types(self) -> Mapping[str, Any]:
        return get_type_hints(self.handler)

    @property
    def body(self) -> type[msgspec.Struct] | None:
        return self.types.get("body")

    @property
    def query(self) -> type[msgspec.Struct] | None:
        return self.types.get("query")

    @property
    def responses(self) -> tuple[Any, ...]:
        """The types of a 200."""
        returns = self.returns or self.types["return"]
        return returns if isinstance(returns, tuple) else (returns,)


_EVENT = {  # data: a JSON object, or [DONE]
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
# Ranges that are checked beyond the types, by field name: the engine's, and those of other fields.
_RANGES: Mapping[str, tuple[float, float | None]] = {
    **RANGES,
    "priority": (-(2**31), 2**31 - 1),
    "num_steps": (1, 2**31 - 1),
    "budget_tokens": (1, None),
    "sampling_seed": RANGES["seed"],
    "top_logprobs": RANGES["logprobs"],
    **dict.fromkeys(("max_completion_tokens", "max_output_tokens", "max_new_tokens"), RANGES["max_tokens"]),
    "min_new_tokens": RANGES["min_tokens"],
}
_ABOVE_MINIMUM = ("top_p",)
_NOT_EMPTY = ("messages", "input")  # lists


def document(routes: Mapping[str, Mapping[str, Route]], keys: bool, open_probes: bool, prefix: str) -> bytes:
    """The page as JSON. routes: by path and method. keys: requests need one; open_probes: except for PROBES.
    prefix: of all paths, "" for none.
    """
    all_routes = [route for methods in routes.values() for route in methods.values()]
    types = {kind for route in all_routes for kind in (route.body, *route.responses)}
    ordered = sorted(types - {None} | {OpenAIErrorBody, AnthropicErrorBody}, key=str)
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    for component in components.values():
        for name, schema in component.get("properties", {}).items():
            _add_range(name, schema)
    _, of_bodies = msgspec.json.schema_components({route.body for route in all_routes if route.body is not None})
    for name in components.keys() - of_bodies:  # a default of a response is sent too; what may be absent has none
        component = components[name]
        sent = [field for field, schema in component.get("properties", {}).items() if "default" in schema]
        if sent:
            component["required"] = [*component.get("required", ()), *sent]
    schema_of = dict(zip(ordered, schemas, strict=True))
    page: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Thalweg", "version": __version__, "description": "docs/api.md tells more."},
        "servers": [{"url": prefix or "/"}],
        "paths": {
            path.replace(":path}", "}"): {
                method.lower(): _operation(route, schema_of)
                | ({"security": []} if keys and open_probes and path in PROBES else {})
                for method, route in methods.items()
            }
            for path, methods in routes.items()
        },
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
            if name in _RANGES:
                minimum, maximum = _RANGES[name]
                option["exclusiveMinimum" if name in _ABOVE_MINIMUM else "minimum"] = minimum
                option.update({} if maximum is None else {"maximum": maximum})
        elif option.get("type") == "array" and name in _NOT_EMPTY:
            option["minItems"] = 1


def _operation(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    name, path = route.handler.__name__, re.sub("[^a-z0-9]+", "_", route.path.lower()).strip("_")
    is_probe, body, parameters = route.responses[0] is ServerState, route.body, re.findall(r"{(\w+)", route.path)
    of_responses = [schema_of[kind] for kind in route.responses]
    schema = of_responses[0] if len(of_responses) == 1 else {"anyOf": of_responses}
    content = {"text/plain" if route.responses[0] is str else "application/json": {"schema": schema}}
    operation: dict[str, Any] = {
        "summary": " ".join((route.handler.__doc__ or name.replace("_", " ")).split()),
        "operationId": f"{name}_{route.method.lower()}_{path}",
        "responses": {"200": {"description": "Success.", "content": content}},
        "parameters": [
            {"name": parameter, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for parameter in parameters
        ],
    }
    statuses = {*({503} if is_probe else {401, 500, 503}), *route.statuses}
    if route.query is not None:
        schemas = msgspec.json.schema(route.query)["$defs"][route.query.__name__]["properties"]
        operation["parameters"] += [{"name": key, "in": "query", "schema": schema} for key, schema in schemas.items()]
        statuses |= {400}
        if "stream" in schemas:
            content["text/event-stream"] = {"schema": _EVENT}
    if body is not None:
        fields = msgspec.structs.fields(body)
        if any(field.name == "stream" for field in fields):
            content["text/event-stream"] = {"schema": _EVENT}
        operation["requestBody"] = {
            "required": any(field.required for field in fields),
            "content": {"application/json": {"schema": schema_of[body]}},
        }
        statuses |= {400, 403, 404, 413, 415}
    statuses |= {403} if route.admin else set()
    statuses |= {400} if route.responses[0] is OperationResult else set()
    statuses |= {404} if parameters else set()
    statuses |= {429} if route.path in COUNTED else set()
    error = ServerState if is_probe else AnthropicErrorBody if route.path.startswith(ANTHROPIC) else OpenAIErrorBody
    for status in sorted(statuses):
        content = {"application/json": {"schema": schema_of[error]}}
        operation["responses"][str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    return operation
