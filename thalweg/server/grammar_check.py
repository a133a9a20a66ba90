"""Looks at grammars before they reach the engine: what cannot be compiled is refused at the door, and nobody waits
meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from thalweg.core.errors import InvalidRequest, Overloaded
from thalweg.core.grammar import Grammar
from thalweg.text.grammar import check

KNOWN = 4096  # verdicts that are kept; of a grammar only its digest is
THREADS = 2
WAITING = 64  # grammars that wait to be looked at, each of them for a second at worst


class GrammarChecker:
    """Each grammar is looked at once, on a thread. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar-check")
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._looking: dict[bytes, asyncio.Future[str]] = {}

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest naming the grammar's field if it cannot be compiled within the bounds, Overloaded if
        too many wait for that.
        """
        if not grammar.is_set:
            return
        key = _digest(grammar)
        why = self._verdicts.get(key)
        if why is None:
            why = await self._look(key, grammar)
        else:
            self._verdicts.move_to_end(key)
        if why:
            raise InvalidRequest(grammar.field, why)

    async def _look(self, key: bytes, grammar: Grammar) -> str:
        looking = self._looking.get(key)
        if looking is None:
            if len(self._looking) >= WAITING:
                raise Overloaded(f"{WAITING} grammars wait to be compiled: try again later")
            looking = self._looking[key] = asyncio.get_running_loop().run_in_executor(self._pool, _verdict, grammar)
            looking.add_done_callback(lambda done: self._keep(key, done))
        return await asyncio.shield(looking)  # others may wait for it too

    def _keep(self, key: bytes, looked: asyncio.Future[str]) -> None:
        del self._looking[key]
        if not looked.cancelled() and looked.exception() is None:
            self._verdicts[key] = looked.result()
            while len(self._verdicts) > KNOWN:
                self._verdicts.popitem(last=False)


def _digest(grammar: Grammar) -> bytes:
    return hashlib.blake2b(f"{grammar.kind}\0{grammar.source}".encode("utf-8", "surrogatepass")).digest()


def _verdict(grammar: Grammar) -> str:
    try:
        check(grammar)
    except InvalidRequest as wrong:
        return wrong.message
    return ""
