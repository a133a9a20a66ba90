"""Watches a server under load: CPU time and memory of its processes, and what its engine counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from thalweg.bench.client import Client
from thalweg.bench.errors import HttpError
from thalweg.bench.own_server import OwnServer, Usage, usage
from thalweg.bench.pace import Pace
from thalweg.core.messages import Stats

SAMPLE_SECONDS = 0.25


class _State(msgspec.Struct):
    stats: Stats


class _Info(msgspec.Struct):
    internal_states: list[_State]


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. at: time.perf_counter()."""

    at: float
    server: Usage
    engine: Usage
    stats: Stats


class Watcher:
    """`async with watcher as samples:` takes a sample every SAMPLE_SECONDS in there; `sample()` takes one now."""

    def __init__(self, server: OwnServer, client: Client) -> None:
        self.server, self.client = server, client
        self._decode = msgspec.json.Decoder(_Info).decode

    async def sample(self) -> Sample:
        """Raises HttpError, and ServerError when a process is gone."""
        reply = await self.client.request("GET", "/server_info")
        if reply.status != 200:
            raise HttpError(f"/server_info answered HTTP {reply.status}: {reply.text.strip()[:200]}")
        stats = self._decode(reply.body).internal_states[0].stats
        return Sample(time.perf_counter(), usage(self.server.pid), usage(self.server.engine), stats)

    async def __aenter__(self) -> list[Sample]:
        samples: list[Sample] = []
        self._task = asyncio.create_task(self._run(samples))
        return samples

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _run(self, samples: list[Sample]) -> None:
        while True:
            samples.append(await self.sample())
            await asyncio.sleep(SAMPLE_SECONDS)


def pace(samples: Sequence[Sample], running: int) -> Pace | None:
    """The engine's pace while `running` sequences decoded and nothing else was computed, from the first to the last
    such look; None where there were not two with steps between them.
    """
    most = max((s.stats.prefill_tokens for s in samples), default=0)
    steady = [
        s for s in samples if s.stats.running == running and not s.stats.waiting and s.stats.prefill_tokens == most
    ]
    if len(steady) < 2:
        return None
    first, last = steady[0], steady[-1]
    steps, tokens = last.stats.steps - first.stats.steps, last.stats.decode_tokens - first.stats.decode_tokens
    if not steps or not tokens:
        return None
    return Pace(steps / (last.at - first.at), 1e6 * (last.engine.cpu - first.engine.cpu) / tokens, steps)
