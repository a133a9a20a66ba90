"""One line in the log for each request, when it has ended: `--log-requests`. What was asked and answered is in it on
wish only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from thalweg.core.logs import fields
from thalweg.engine.streams import Piece
from thalweg.server.accounting import RequestAccounting
from thalweg.text.tokenizer import Tokenizer

log = logging.getLogger("thalweg.requests")
LONGEST_PATH = 200  # characters of a path that are logged
SOME_TEXT = 2048  # characters of a prompt and of an output that level 2 logs
ALL_TEXT = 1 << 62
# ids, parameters and texts of one request that are logged below level 3: who sends thousands of prompts fills no disk
SOME = 16

Take = Callable[[int, Piece], Awaitable[None]]


class NoLog:
    """Without `--log-requests`."""

    def listen(self, accounting: RequestAccounting, take: Take) -> Take:
        return take

    def tell(self, accounting: RequestAccounting) -> None:
        """Says nothing."""


class RequestLog:
    """Writes the lines. level, as SGLang counts: 0 ids, times and counts; 1 the sampling parameters too; 2 the first
    2,048 characters of the first 16 prompts and outputs too; 3 all of them. quiet: paths whose good answers are logged
    as "debug" only.
    """

    def __init__(self, level: int, tokenizer: Tokenizer, quiet: frozenset[str]) -> None:
        self._tokenizer, self._quiet = tokenizer, quiet
        self._shows_params, self._text = level >= 1, (0, 0, SOME_TEXT, ALL_TEXT)[level]
        self._many = SOME if level < 3 else None

    def listen(self, accounting: RequestAccounting, take: Take) -> Take:
        """`take`, which keeps the text that it is given, where text is logged."""
        if not self._text:
            return take
        choices = range(sum(params.n for params in accounting.params))
        room = dict.fromkeys(choices[: self._many], self._text)

        async def heard(choice: int, piece: Piece) -> None:
            if piece.text and room.get(choice):
                part = piece.text[: room[choice]]
                room[choice] -= len(part)
                accounting.outputs.setdefault(choice, []).append(part)
            await take(choice, piece)

        return heard

    def tell(self, accounting: RequestAccounting) -> None:
        level = logging.DEBUG if accounting.path in self._quiet and accounting.status < 400 else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "request", extra=fields(**self._facts(accounting)))

    def _facts(self, accounting: RequestAccounting) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "id": accounting.id,
            "key": accounting.key or None,
            "method": accounting.method[:16],
            "path": accounting.path[:LONGEST_PATH],
            "status": accounting.status,
            "error": accounting.error or None,
            "gone": accounting.gone or None,
            "trace": accounting.trace or None,
        }
        if accounting.submitted:
            facts |= self._work(accounting)
        return facts | {"e2e": _seconds(accounting.ended - accounting.began)}

    def _work(self, accounting: RequestAccounting) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "rid": None if set(accounting.rids) == {accounting.id} else list(accounting.rids[: self._many]),
            "model": accounting.model,
            "stream": accounting.stream,
            "prompt_tokens": accounting.prompt_tokens,
            "cached_tokens": accounting.cached_tokens,
            "output_tokens": accounting.output_tokens,
            "drafted_tokens": accounting.drafted_tokens or None,
            "accepted_tokens": accounting.accepted_tokens if accounting.drafted_tokens else None,
            "finish": ",".join(dict.fromkeys(accounting.finishes)),
            "choices": len(accounting.finishes),
            "preemptions": accounting.preemptions or None,
            "queued": _seconds(accounting.queued),
            "ttft": _seconds(accounting.ttft),
        }
        if self._shows_params:
            facts["params"] = [
                msgspec.to_builtins(params) for params in list(dict.fromkeys(accounting.params))[: self._many]
            ]
        if self._text:
            facts["prompts"] = [self._read(prompt) for prompt in accounting.prompts[: self._many]]
            facts["outputs"] = [
                "".join(accounting.outputs.get(i, ())) for i in range(len(accounting.finishes))[: self._many]
            ]
        return facts

    def _read(self, prompt: Any) -> str:
        """The text of a prompt: a token is a character at least, but for the halves of some."""
        return self._tokenizer.decode(prompt[: self._text], skip_special_tokens=False)[: self._text]


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
