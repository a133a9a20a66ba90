"""Checks grammars before they reach the engine: one that does not compile is refused at once."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from thalweg.core.errors import InvalidRequest, Overloaded
from thalweg.core.grammar import Grammar
from thalweg.text.grammar import check

KNOWN = 4096  # results that are kept, by the grammar's digest
THREADS = 2
WAITING = 64  # grammars that may wait for their check, which takes up to a second each


class GrammarChecker:
    """Checks each grammar once, on a thread. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar-check")
        self._results: OrderedDict[bytes, str] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[str]] = {}

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest naming the grammar's field if it does not compile within the limits, Overloaded if too
        many wait for their check.
        """
        if not grammar.is_set:
            return
        key = hashlib.blake2b(f"{grammar.kind}\0{grammar.source}".encode("utf-8", "surrogatepass")).digest()
        error = self._results.get(key)
        if error is None:
            error = await self._run(key, grammar)
        else:
            self._results.move_to_end(key)
        if error:
            raise InvalidRequest(grammar.field, error)

    async def _run(self, key: bytes, grammar: Grammar) -> str:
        running = self._running.get(key)
        if running is None:
            if len(self._running) >= WAITING:
                raise Overloaded(f"{WAITING} grammars wait to be compiled: try again later")
            running = self._running[key] = asyncio.get_running_loop().run_in_executor(self._pool, _error_of, grammar)
            running.add_done_callback(lambda done: self._keep(key, done))
        return await asyncio.shield(running)  # others may wait for it too

    def _keep(self, key: bytes, done: asyncio.Future[str]) -> None:
        del self._running[key]
        if not done.cancelled() and done.exception() is None:
            self._results[key] = done.result()
            while len(self._results) > KNOWN:
                self._results.popitem(last=False)


def _error_of(grammar: Grammar) -> str:
    """Why a grammar does not compile; "" if it does."""
    try:
        check(grammar)
    except InvalidRequest as error:
        return error.message
    return ""
