"""Drives a load: each request at its time, so many at once, until all are answered or someone presses Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from thalweg.bench.backends import Backend, Options, ask
from thalweg.bench.client import Client
from thalweg.bench.datasets import Prompt
from thalweg.bench.metrics import Record

OnDone = Callable[[Record], None]


@contextmanager
def interruptible(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets `stop` in here; a second one ends the program as usual."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection in here: a pass over a long run's records would show up as a server's latency."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class Load:
    """One run. `records` has one entry for each prompt, in order; those never sent, or cut off by a stop, are not `done`."""

    def __init__(self, client: Client, backend: Backend, options: Options, prompts: Sequence[Prompt]) -> None:
        self.client, self.backend, self.options, self.prompts = client, backend, options, prompts
        self.records = [Record() for _ in prompts]
        self.duration = 0.0

    async def run(self, due: Sequence[float], concurrency: int, stop: asyncio.Event, on_done: OnDone) -> None:
        """Sends prompt i `due[i]` seconds from now, or as soon after it as fewer than `concurrency` (0: any number) are under way."""
        places = asyncio.Semaphore(concurrency or len(self.prompts))
        start = time.perf_counter()
        senders = asyncio.ensure_future(self._send_all(start, due, places, on_done))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait((senders, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        self.duration = time.perf_counter() - start
        if not senders.done():
            senders.cancel()
            await asyncio.wait((senders,))
        elif (error := senders.exception()) is not None:
            raise error

    async def _send_all(self, start: float, due: Sequence[float], places: asyncio.Semaphore, on_done: OnDone) -> None:
        async with asyncio.TaskGroup() as group:
            for prompt, record, at in sorted(
                zip(self.prompts, self.records, due, strict=True), key=lambda each: each[2]
            ):
                record.due = start + at
                if (wait := record.due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                await places.acquire()
                group.create_task(self._one(prompt, record, places, on_done))

    async def _one(self, prompt: Prompt, record: Record, places: asyncio.Semaphore, on_done: OnDone) -> None:
        try:
            await ask(self.client, self.backend, prompt, self.options, record)
        finally:
            places.release()
        on_done(record)
