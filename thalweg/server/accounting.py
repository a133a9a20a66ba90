"""The account of one HTTP request: filled in by whoever learns something of it, and told once, at its end, to the log
and the traces.

Nothing here is touched for each token; what becomes of the tokens is the `Timer`'s, which closes its books into the
account.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from thalweg.core.sampling import SamplingParams


@dataclass(slots=True)
class RequestAccounting:
    """path: as it came. headers: by name in lower case. id: of the request. key: name of the API key that it came with.
    model: its name here.

    Times are time.time() of this host, 0.0 where it did not come to that: began (the headers were read), submitted (the
    prompts were ready for the engine), admitted (the first sequence left the engine's queue), first and last (tokens),
    ended (the answer was written, or could not be). status: of HTTP, 499 for a client that went away before it had one.
    error: the kind of what went wrong, its `code` or `type`; a running stream fails after its 200. gone: the client
    went away. rids: the ids that the engine's events carry.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    began: float
    id: str = ""
    key: str = ""
    status: int = 0
    error: str = ""
    gone: bool = False
    model: str = ""
    stream: bool = False
    rids: tuple[str, ...] = ()
    params: tuple[SamplingParams, ...] = ()
    prompts: tuple[Sequence[int], ...] = ()
    submitted: float = 0.0
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0  # that were verified, of choices that ended by themselves
    accepted_tokens: int = 0  # of these
    preemptions: int = 0
    finishes: list[str] = field(default_factory=list)  # in the order in which the choices ended
    outputs: dict[int, list[str]] = field(default_factory=dict)  # the text of each choice, where it is kept
    trace: str = ""  # id of its trace, once it was told to one

    @property
    def queued(self) -> float | None:
        """Seconds that it waited for the engine; None where it never got there."""
        return max(self.admitted - self.submitted, 0.0) if self.admitted else None

    @property
    def ttft(self) -> float | None:
        """Seconds from its arrival to its first token."""
        return self.first - self.began if self.first else None


Teller = Callable[[RequestAccounting], None]  # told of each request that has ended


def accounting_of(request: Request) -> RequestAccounting:
    """The account that `AccessLogMiddleware` has opened for this request."""
    found: RequestAccounting = request.scope["accounting"]
    return found
