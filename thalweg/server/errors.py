"""Every error as OpenAI's JSON: {"error": {"message", "type", "param", "code"}}; `param` is the path of the field as
the client wrote it. Under /v1/messages it is Anthropic's: {"type": "error", "error": {"type", "message"}}.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from thalweg.core.errors import EngineDead, EngineStarting, InvalidRequest, NumericalError, Overloaded, ThalwegError


class Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: Error


class AnthropicError(msgspec.Struct):
    type: str
    message: str


class AnthropicBody(msgspec.Struct):
    error: AnthropicError
    type: str = "error"


ANTHROPIC = "/v1/messages"
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


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """status: of HTTP; retry: tell the client when to try again; wait: in so many seconds, where that is known."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry: bool = False
    wait: int = 0

    @property
    def kind(self) -> str:
        """What it is, in one word, for logs and traces."""
        return self.code or self.type

    @property
    def body(self) -> bytes:
        return msgspec.json.encode(
            ErrorBody(Error(_short(self.message), self.type, self.param and _short(self.param), self.code))
        )

    @property
    def anthropic(self) -> bytes:
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        return msgspec.json.encode(AnthropicBody(AnthropicError(kind, _short(self.message))))

    def response(self, retry_after: int, path: str) -> Response:
        """path: of the request, whose API tells the shape."""
        headers = {"Retry-After": str(self.wait or retry_after)} if self.retry else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = self.anthropic if path.startswith(ANTHROPIC) else self.body
        return Response(body, self.status, headers, "application/json")


def _short(text: str) -> str:
    """Messages quote what was sent, which may be a whole body, and may be no Unicode."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} … ({len(text)} characters)"


class ApiError(Exception):
    """Ends a request with this problem."""

    def __init__(self, problem: ErrorInfo) -> None:
        super().__init__(problem.message)
        self.problem = problem


def error_info(error: Exception) -> ErrorInfo:
    """What a client is told of an error. Errors that Thalweg does not raise on purpose are a 500 that gives nothing
    away.
    """
    if isinstance(error, ApiError):
        return error.problem
    if isinstance(error, InvalidRequest):
        return ErrorInfo(400, str(error), param=error.field or None, code="invalid_value")
    if isinstance(error, Overloaded):
        return ErrorInfo(429, f"the queue is full: {error}", "rate_limit_error", code="overloaded", retry=True)
    if isinstance(error, EngineDead):
        message = f"the engine is not serving: {error}; try again when /ready answers 200"
        code = "engine_starting" if isinstance(error, EngineStarting) else "engine_dead"
        return ErrorInfo(503, message, "service_unavailable_error", code=code, retry=True)
    if isinstance(error, NumericalError):
        return ErrorInfo(500, str(error), "server_error", code="no_numbers")
    if isinstance(error, RecursionError):
        return ErrorInfo(400, "the body is nested too deeply", code="invalid_value")
    if isinstance(error, ThalwegError):
        return ErrorInfo(500, str(error), "server_error")
    return ErrorInfo(500, "internal error: the server's log has the details under this request's id", "server_error")
