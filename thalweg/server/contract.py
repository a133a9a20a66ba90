"""What the server needs of the rest of Thalweg, as protocols: any front that fits serves, a scripted one in the tests
too.

The real ones are `thalweg.engine.front.Front`, `thalweg.engine.assemble.Piece` and what `thalweg.text` makes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from thalweg.core.acceptance import AcceptanceCounts
from thalweg.core.grammar import NO_GRAMMAR, Grammar
from thalweg.core.messages import Control, EngineReady, Stats
from thalweg.core.plan import TokenLogprob
from thalweg.core.request import QueueReservation
from thalweg.core.retention import RETAIN_ALL, CacheRetention
from thalweg.core.sampling import SamplingParams


class Piece(Protocol):
    """News of one sequence: see `thalweg.engine.assemble.Piece`, whose fields these are."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def ids(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]: ...
    @property
    def finish(self) -> str | None: ...
    @property
    def stop(self) -> str | int | None: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]: ...
    @property
    def at(self) -> float: ...
    @property
    def admitted(self) -> float: ...
    @property
    def preempted(self) -> int: ...
    @property
    def drafted(self) -> AcceptanceCounts | None: ...


class Tokenizer(Protocol):
    """See `thalweg.text.tokenizer.Tokenizer`."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, add_special: bool = True) -> list[int]: ...
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str: ...
    def exceeds(self, text: str, limit: int) -> bool: ...
    def token_bytes(self, token: int) -> bytes: ...
    def mark_id(self, text: str) -> int | None: ...


class Front(Protocol):
    """See `thalweg.engine.front.Front`. reason: why `state` is not "ready"."""

    state: str
    reason: str
    ready: EngineReady | None
    stats: Stats
    weight_version: str

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def running(self) -> int: ...
    def check(self, prompt: Sequence[int], params: SamplingParams) -> None: ...
    def reserve(self, sequences: int) -> AbstractContextManager[QueueReservation]: ...
    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str = "",
        priority: int = 0,
        salt: int = 0,
        grammar: Grammar = NO_GRAMMAR,
        retention: CacheRetention = RETAIN_ALL,
        reservation: QueueReservation | None = None,
    ) -> AsyncGenerator[Piece, None]: ...
    async def abort(self, request_id: str) -> int: ...
    async def flush_cache(self) -> None: ...
    async def control(self, message: Control) -> str: ...
