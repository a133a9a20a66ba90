"""Looks at grammars before they reach the engine: what cannot be compiled is refused at the door, and nobody waits meanwhile."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import Grammar
from thalweg.text.grammar import check

KNOWN = 256  # verdicts that are kept
THREADS = 2


class Examiner:
    """Each grammar is looked at once, on a thread. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="examiner")
        self._verdicts: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest naming the grammar's field if it cannot be compiled within the bounds."""
        if not grammar.on:
            return
        key = grammar.kind, grammar.source
        if key not in self._verdicts:
            self._verdicts[key] = await asyncio.get_running_loop().run_in_executor(self._pool, _verdict, grammar)
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > KNOWN:
            self._verdicts.popitem(last=False)
        if why := self._verdicts[key]:
            raise InvalidRequest(grammar.field, why)


def _verdict(grammar: Grammar) -> str:
    try:
        check(grammar)
    except InvalidRequest as wrong:
        return wrong.message
    return ""
