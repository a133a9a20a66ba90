"""Drives a load: each request at its time, so many at once, until all are answered or someone presses Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from thalweg.bench.backends import Backend, Options, ask
from thalweg.bench.client import Client
from thalweg.bench.datasets import Answer, Prompt
from thalweg.bench.errors import DatasetError
from thalweg.bench.metrics import Record
from thalweg.bench.pacer import punctual

OnDone = Callable[[Record], None]
SPARE_FILES = 64  # beside connections: logs, pipes, libraries
AHEAD_SECONDS = 0.05  # before its time a request gets its body and its connection
NEVER_SENT = "an earlier turn of its conversation failed, so it was not sent"


@contextmanager
def interruptible(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets `stop` in here; a second one ends the program as usual."""
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)

    def leave() -> None:
        loop.remove_signal_handler(signal.SIGINT)  # and leaves Python's handler
        signal.signal(signal.SIGINT, before)  # asyncio's own, which ends the main task in order

    def on_signal() -> None:
        stop.set()
        leave()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        leave()


def allow_files(count: int) -> None:
    """Lets this process have so many connections open, as far as it may: 1,024 files are all that many systems give at
    first.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES if hard == resource.RLIM_INFINITY else min(count + SPARE_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection in here, and this thread first: a pass over a long run's records would show up as a
    server's latency.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with punctual():
            yield
    finally:
        gc.enable()
        gc.unfreeze()


class Load:
    """One run. `records` has one entry for each prompt, in order; those never sent, or cut off by a stop, are not
    `done`. `asked`: the prompts in the order in which they were sent, later turns with what was said before them.
    """

    def __init__(self, client: Client, backend: Backend, options: Options, prompts: Sequence[Prompt]) -> None:
        self.client, self.backend, self.options, self.prompts = client, backend, options, prompts
        self.records = [Record() for _ in prompts]
        self.asked: list[Prompt] = []
        self.duration = 0.0
        self._next = {prompt.after: place for place, prompt in enumerate(prompts) if prompt.after >= 0}

    async def run(self, due: Sequence[float], concurrency: int, stop: asyncio.Event, on_done: OnDone) -> None:
        """Sends prompt i `due[i]` seconds from now, or as soon after it as fewer than `concurrency` (0: any number) are
        under way.

        A conversation takes one place from its first turn to its last, as a user does; its later turns come when the
        one before has been answered and their pause is over.
        """
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
        first = (place for place, prompt in enumerate(self.prompts) if prompt.after < 0)
        async with asyncio.TaskGroup() as group:
            for place in sorted(first, key=lambda each: due[each]):
                at = start + due[place]
                if (wait := at - AHEAD_SECONDS - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                await places.acquire()
                group.create_task(self._conversation(place, at, places, on_done))

    async def _conversation(self, place: int, due: float, places: asyncio.Semaphore, on_done: OnDone) -> None:
        """One turn after another; most conversations have one."""
        prompt = self.prompts[place]
        try:
            while True:
                record = self.records[place]
                record.due = due
                await self._ask(prompt, record)
                on_done(record)
                if (then := self._next.get(place)) is None:
                    return
                if not record.ok:
                    self._give_up(then, on_done)
                    return
                answer = Answer(record.text[record.thought :], tuple(record.ids))
                place, prompt = then, self.prompts[then].following(prompt, answer)
                due = time.perf_counter() + prompt.pause
                if prompt.pause > AHEAD_SECONDS:
                    await asyncio.sleep(prompt.pause - AHEAD_SECONDS)
        finally:
            places.release()

    async def _ask(self, prompt: Prompt, record: Record) -> None:
        self.asked.append(prompt)
        try:
            await ask(self.client, self.backend, prompt, self.options, record, record.due)
        except DatasetError as error:  # of a later turn: its answer cannot be carried on
            record.error = str(error)

    def _give_up(self, place: int | None, on_done: OnDone) -> None:
        while place is not None:
            record = self.records[place]
            record.error, record.turn = NEVER_SENT, self.prompts[place].turn
            on_done(record)
            place = self._next.get(place)
