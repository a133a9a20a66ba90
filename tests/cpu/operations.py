"""Shared by the tests of logs, traces and metrics: a request for each API, a server that logs, and its log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.cpu.fakes import FakeFront, eventually, fake_app, serving
from thalweg.config.server import ServerOptions
from thalweg.core import logs

CHAT = {"messages": [{"role": "user", "content": "a private matter"}], "max_tokens": 6}
APIS = {
    "/v1/completions": {"prompt": "a private matter", "max_tokens": 6},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "a private matter", "max_output_tokens": 6},
    "/v1/messages": CHAT,
    "/generate": {"text": "a private matter", "sampling_params": {"max_new_tokens": 6}},
}


@contextmanager
def logged(form: str = "json") -> Iterator[io.StringIO]:
    """What Thalweg logs meanwhile, as its formatter writes it."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JsonFormatter() if form == "json" else logs.TextFormatter())
    logger = logging.getLogger("thalweg")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield out
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def talk(front: FakeFront | None = None, **options: Any) -> Iterator[httpx.Client]:
    app = fake_app(front or FakeFront(), ServerOptions(**{"log_requests": True, **options}))
    with serving(app) as url, httpx.Client(base_url=url, timeout=10) as api:
        yield api


def lines(out: io.StringIO, many: int) -> list[dict[str, Any]]:
    """The lines of requests, once there are so many: the last one is written after its answer was read."""
    eventually(lambda: out.getvalue().count('"thalweg.requests"') >= many)
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    return [line for line in found if line["logger"] == "thalweg.requests"]
