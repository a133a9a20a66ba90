"""Error responses.

OpenAI's shape: {"error": {"message", "type", "param", "code"}}; `param` is the path of the field in the request.
Anthropic's shape, under /v1/messages: {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from thalweg.core.errors import (
    ContextOverflow,
    EngineDead,
    EngineStarting,
    InvalidRequest,
    NumericalError,
    Overloaded,
    ThalwegError,
)


class OpenAIError(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(msgspec.Struct):
    error: OpenAIError


class AnthropicError(msgspec.Struct):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET  # its `error_code` is for programs


class AnthropicErrorBody(msgspec.Struct):
    error: AnthropicError
    type: str = "error"


ANTHROPIC = "/v1/messages"
ANTHROPIC_HEADER = "anthropic-version"  # of each request of Anthropic's clients
MAX_MESSAGE = 2000  # characters
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


@dataclass(eq=False)
class ApiError(Exception):
    """Ends a request with this error response."""

    status: int  # of HTTP
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry: bool = False  # send Retry-After
    retry_after: int = 0  # seconds; 0: the server's default
    details: dict[str, Any] | None = None  # in Anthropic's shape
    anthropic_message: str = ""  # in place of `message` there

    @property
    def kind(self) -> str:
        """One word for logs and traces."""
        return self.code or self.type

    @property
    def body(self) -> bytes:
        param = self.param and _printable(self.param)
        return msgspec.json.encode(OpenAIErrorBody(OpenAIError(_printable(self.message), self.type, param, self.code)))

    @property
    def anthropic(self) -> bytes:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        error = AnthropicError(kind, _printable(self.anthropic_message or self.message), self.details or UNSET)
        return msgspec.json.encode(AnthropicErrorBody(error))

    def response(self, retry_after: int, path: str, headers: Mapping[str, str]) -> Response:
        """The HTTP response in the shape of the API of the request with this path and these headers."""
        own = {"Retry-After": str(self.retry_after or retry_after)} if self.retry else {}
        if self.status == 401:
            own["WWW-Authenticate"] = "Bearer"
        is_anthropic = path.startswith(ANTHROPIC) or (path.startswith("/v1/models") and ANTHROPIC_HEADER in headers)
        return Response(self.anthropic if is_anthropic else self.body, self.status, own, "application/json")


def _printable(text: str) -> str:
    """Messages quote the request, which may be long and may hold lone surrogates."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} … ({len(text)} characters)"


def too_many_requests(message: str, code: str, param: str | None = None, retry_after: int = 0) -> ApiError:
    """A 429 that says when to try again."""
    return ApiError(429, message, "rate_limit_error", param, code, retry=True, retry_after=retry_after)


def api_error(error: Exception) -> ApiError:
    """The error response for an exception. An unexpected exception becomes a 500 without details."""
    match error:
        case ApiError():
            return error
        case ContextOverflow():
            too_long = f"prompt is too long: {error.prompt} > {error.context} maximum{error.output}"
            code = "context_length_exceeded"
            return ApiError(400, str(error), param=error.field or None, code=code, anthropic_message=too_long)
        case InvalidRequest():
            return ApiError(400, str(error), param=error.field or None, code="invalid_value")
        case Overloaded():
            return too_many_requests(f"the queue is full: {error}", "overloaded")
        case EngineDead():
            message = f"the engine is not serving: {error}; try again when /ready answers 200"
            code = "engine_starting" if isinstance(error, EngineStarting) else "engine_dead"
            return ApiError(503, message, "service_unavailable_error", code=code, retry=True)
        case NumericalError():
            return ApiError(500, str(error), "server_error", code="nan_output")
        case RecursionError():
            return ApiError(400, "the body is nested too deeply", code="invalid_value")
        case ThalwegError():
            return ApiError(500, str(error), "server_error")
    return ApiError(500, "internal error: the server's log has the details under this request's id", "server_error")
