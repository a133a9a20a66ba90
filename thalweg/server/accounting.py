"""Request accounting: what is known of one HTTP request, for the access log and the traces.

Nothing here is updated for each token: `metrics.RequestTimer` writes its sums at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from thalweg.core.sampling import SamplingParams

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that went away
GENERATION = {  # routes that generate, with their names in OpenTelemetry's conventions
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
}
PROBES = frozenset({"/health", "/ready", "/ping", "/metrics"})


@dataclass(slots=True)
class RequestAccounting:
    """Times are time.time() of this host, 0.0 until they come."""

    method: str
    path: str
    headers: Mapping[str, str]  # by name in lower case
    began: float  # the headers were read
    id: str = ""
    key: str = ""  # name of the API key
    status: int = 0  # of HTTP; 499: the client went away before it had one
    error: str = ""  # `code` or `type` of an error; a running stream fails after its 200
    gone: bool = False  # the client went away
    model: str = ""
    stream: bool = False
    rids: tuple[str, ...] = ()  # ids in the engine's events
    params: tuple[SamplingParams, ...] = ()
    prompts: tuple[Sequence[int], ...] = ()
    submitted: float = 0.0  # the prompts went to the engine
    admitted: float = 0.0  # the first sequence left the engine's queue
    first: float = 0.0  # first token
    last: float = 0.0  # last token
    ended: float = 0.0  # the response was written, or failed
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0  # verified ones, of choices that ended by themselves
    accepted_tokens: int = 0  # of these
    preemptions: int = 0
    finishes: list[str] = field(default_factory=list)  # in the order in which the choices ended
    outputs: dict[int, list[str]] = field(default_factory=dict)  # logged text by choice
    trace: str = ""  # trace id
    work: asyncio.Task[None] | None = None  # goes on after the response: the request ends with it

    @property
    def queued(self) -> float | None:
        """Seconds in the engine's queue; None if the request never left it."""
        return max(self.admitted - self.submitted, 0.0) if self.admitted else None

    @property
    def ttft(self) -> float | None:
        """Seconds from the headers to the first token."""
        return self.first - self.began if self.first else None


OnEnd = Callable[[RequestAccounting], None]  # is called with each request that has ended
