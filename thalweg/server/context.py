"""Application context of every route."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from thalweg.config.server import ServerOptions
from thalweg.core.errors import ContextOverflow, InvalidRequest, engine_unavailable
from thalweg.core.messages import EngineReady
from thalweg.core.sampling import SamplingParams
from thalweg.engine.client import EngineClient
from thalweg.server.api_keys import ApiKeys, ServerLoad
from thalweg.server.errors import ApiError
from thalweg.server.logs import RequestLog
from thalweg.server.metrics import ServerMetrics
from thalweg.server.responses.store import ResponseStore
from thalweg.server.structured_output import GrammarChecker
from thalweg.text.chat import ChatFormat
from thalweg.text.retention import ThinkingRetention
from thalweg.text.tokenizer import read_json_object

THREADS = 4  # for slow work
LONG_TEXT = 8192  # characters; a longer text is tokenized on a thread, so that running streams do not wait
MAX_RID = 128
STARTS_PER_TURN = 4  # requests that start in one turn of the event loop
T = TypeVar("T")


class AppContext:
    def __init__(
        self,
        front: EngineClient,
        options: ServerOptions,
        chat: ChatFormat,
        path: str,
        defaults: SamplingParams,
        folder: Path | None = None,
    ) -> None:
        """path: of the checkpoint, as the user gave it. defaults: for requests that leave parameters out. folder: with
        the checkpoint's files.
        """
        self.front, self.options, self.chat, self.path, self.defaults = front, options, chat, path, defaults
        # names of the model; responses show the first
        self.names = options.served_model_name or (path.rstrip("/").rpartition("/")[2] or "default",)
        self.api_keys, self.load = ApiKeys(options), ServerLoad(options)
        self.store = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)
        self.retention = ThinkingRetention(chat, front.tokenizer.mark_id)
        self.log = RequestLog(options, front.tokenizer)
        self.metrics = ServerMetrics()
        self.started = time.time()
        self.grammar_checker = GrammarChecker()
        self.health_check: asyncio.Task[str] | None = None  # generates a token, see /health_generate
        self.config, self.tokenizer_config = (
            {} if folder is None else read_json_object(folder / name)
            for name in ("config.json", "tokenizer_config.json")
        )
        self._pool = ThreadPoolExecutor(THREADS, "server")
        self._turn = asyncio.Semaphore(STARTS_PER_TURN)

    def model(self, name: str | None) -> str:
        """The name to answer with. No name, "" and "default" mean the served model; an unknown name is a 404."""
        return self.names[0] if not name or name == "default" else self.served_name(name)

    def served_name(self, name: str) -> str:
        """Raises ApiError (404) unless a model with exactly this name is served."""
        if name not in self.names:
            message = f"model {name!r} does not exist here; this server has {', '.join(self.names)}"
            raise ApiError(404, message, "not_found_error", "model", "model_not_found")
        return name

    def rid(self, rid: str | None, request: Request) -> str:
        """The id of a request: the body's, else the header's or the server's. Raises InvalidRequest."""
        if rid is None:
            return str(request.scope["accounting"].id)
        if clean_rid(rid) is None:
            raise InvalidRequest("rid", f"must be 1 to {MAX_RID} letters, digits and -_.:/ characters")
        return rid

    @property
    def ready(self) -> EngineReady:
        """Raises EngineDead while no engine serves."""
        if self.front.ready is None:
            raise engine_unavailable(self.front.state, self.front.reason)
        return self.front.ready

    @property
    def any_whitespace(self) -> bool:
        """Whether JSON of structured output may have whitespace where the request does not say."""
        return not self.options.constrained_json_disable_any_whitespace

    @property
    def context_len(self) -> int | None:
        """Tokens of the longest sequence; None while no engine serves."""
        return None if self.front.ready is None else self.front.ready.context

    async def tokenize(self, text: str, add_special: bool, field: str, limit: int | None = None) -> list[int]:
        """Token ids of a text. Raises InvalidRequest for invalid Unicode, and for a long text of more than `limit`
        tokens (None: the context's) before it costs much work.
        """
        tokenizer, most = self.front.tokenizer, self.ready.context if limit is None else limit
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(field, "contains a lone surrogate: not valid Unicode") from None
        if len(text) < LONG_TEXT:
            await asyncio.sleep(0)  # a body may hold many texts: let other requests run between two of them
            return tokenizer.encode(text, add_special)
        ids = await self.on_thread(lambda: [] if tokenizer.exceeds(text, most) else tokenizer.encode(text, add_special))
        if not ids or len(ids) > most:
            size = f"{len(ids)} tokens" if ids else f"more than {most} tokens"
            raise ContextOverflow(field, most, size) if limit is None else InvalidRequest(field, f"{size}: shorten it")
        return ids

    async def next_turn(self) -> None:
        """Waits for a turn of the event loop in which few other requests start, in order of arrival.

        Parsing, rendering and tokenizing a request takes some 0.3 ms. Starting a whole burst in one turn would delay
        the tokens of running streams by that for each request.
        """
        async with self._turn:
            await asyncio.sleep(0)

    async def on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def reply(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def clean_rid(text: str | None) -> str | None:
    """The request id if it is safe for headers, logs and ids, else None."""
    return text if text and re.fullmatch(f"[A-Za-z0-9_.:/-]{{1,{MAX_RID}}}", text) else None
