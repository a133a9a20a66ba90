"""The access log: `--log-requests` writes one line for each request that has ended."""

from __future__ import annotations

import logging
import sys
from typing import Any

import msgspec

from thalweg.config.server import ServerOptions
from thalweg.core.logs import fields
from thalweg.engine.streams import Piece
from thalweg.server.accounting import PROBES, RequestAccounting
from thalweg.text.tokenizer import Tokenizer

log = logging.getLogger("thalweg.requests")
MAX_PATH = 200  # characters
TEXT_LIMITS = (0, 0, 2048, 1 << 62)  # characters of a prompt and of an output, by level
# Ids, parameters and texts of one request below level 3: a request with thousands of prompts must not fill the disk.
MAX_ENTRIES = 16
COUNTS = ("model", "stream", "prompt_tokens", "cached_tokens", "output_tokens")


class RequestLog:
    """Levels as SGLang counts: 0 ids, times and counts; 1 sampling parameters too; 2 the first 2,048 characters of the
    first 16 prompts and outputs too; 3 all of them. Probes are logged as "debug" unless they fail.
    """

    def __init__(self, options: ServerOptions, tokenizer: Tokenizer) -> None:
        level = options.log_requests_level if options.log_requests else 0
        self._tokenizer, self._shows_params, self._max_text = tokenizer, level >= 1, TEXT_LIMITS[level]
        self._max_entries = MAX_ENTRIES if level < 3 else sys.maxsize

    def record(self, accounting: RequestAccounting, piece: Piece) -> None:
        """Keeps the text of an output, if text is logged."""
        if self._max_text and piece.index < self._max_entries:
            accounting.outputs.setdefault(piece.index, []).append(piece.text)

    def write(self, accounting: RequestAccounting) -> None:
        is_quiet = accounting.path in PROBES and accounting.status < 400
        level = logging.DEBUG if is_quiet else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "request", extra=fields(**self._values(accounting)))

    def _values(self, accounting: RequestAccounting) -> dict[str, Any]:
        times: dict[str, float | None] = {"e2e": accounting.ended - accounting.began}
        values = {name: getattr(accounting, name) or None for name in ("id", "key", "error", "gone", "trace")}
        values |= {"method": accounting.method[:16], "path": accounting.path[:MAX_PATH], "status": accounting.status}
        if accounting.submitted:
            values |= self._generation_values(accounting)
            times = {"queued": accounting.queued, "ttft": accounting.ttft, **times}
        return values | {name: None if seconds is None else round(seconds, 4) for name, seconds in times.items()}

    def _generation_values(self, accounting: RequestAccounting) -> dict[str, Any]:
        shown, choices = slice(self._max_entries), range(len(accounting.finishes))
        values: dict[str, Any] = {
            "rid": None if set(accounting.rids) == {accounting.id} else list(accounting.rids[shown]),
            **{name: getattr(accounting, name) for name in COUNTS},
            "accepted_tokens": accounting.accepted_tokens if accounting.drafted_tokens else None,
            "finish": ",".join(dict.fromkeys(accounting.finishes)),
            "choices": len(choices),
            **{name: getattr(accounting, name) or None for name in ("drafted_tokens", "preemptions")},
        }
        if self._shows_params:
            different = {msgspec.json.encode(params): params for params in accounting.params}
            values["params"] = [msgspec.to_builtins(params) for params in [*different.values()][shown]]
        if self._max_text:
            limit = self._max_text  # a token is at least one character, partial characters aside
            values["prompts"] = [
                self._tokenizer.decode(prompt[:limit], skip_special_tokens=False)[:limit]
                for prompt in accounting.prompts[shown]
            ]
            values["outputs"] = ["".join(accounting.outputs.get(i, ()))[:limit] for i in choices[shown]]
        return values
