"""The load driver for a server: each request at its time, a limited number at once, until all are answered or
Ctrl-C.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from thalweg.bench.backends import Backend, RequestOptions, send_request
from thalweg.bench.datasets import Reply, SampleRequest
from thalweg.bench.errors import DatasetError
from thalweg.bench.http_client import HttpClient, high_priority
from thalweg.bench.metrics import Record

OnDone = Callable[[Record], None]
AHEAD_SECONDS = 0.05  # before its time a request gets its body and its connection
NEVER_SENT = "an earlier turn of its conversation failed, so it was not sent"


@contextmanager
def interruptible(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets `stop` in here; a second one ends the program as usual."""
    loop, before = asyncio.get_running_loop(), signal.getsignal(signal.SIGINT)

    def restore() -> None:
        loop.remove_signal_handler(signal.SIGINT)  # which installs Python's handler
        signal.signal(signal.SIGINT, before)  # asyncio's own, which ends the main task in order

    def on_signal() -> None:
        stop.set()
        restore()

    loop.add_signal_handler(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        restore()


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A pass over a long run's records would look like a server's latency. This thread has a high priority, too."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        with high_priority():
            yield
    finally:
        gc.enable()
        gc.unfreeze()


class LoadRun:
    """One run against a server."""

    def __init__(
        self, client: HttpClient, backend: Backend, options: RequestOptions, prompts: Sequence[SampleRequest]
    ) -> None:
        self.client, self.backend, self.options, self.prompts = client, backend, options, prompts
        self.records = [Record() for _ in prompts]  # unsent and stopped ones are not `done`
        self.sent: list[SampleRequest] = []  # in the order of sending, later turns with their history
        self.duration = 0.0
        self._next = {prompt.after: place for place, prompt in enumerate(prompts) if prompt.after >= 0}

    async def run(
        self, due: Sequence[float], concurrency: int, stop: asyncio.Event, on_done: OnDone = lambda record: None
    ) -> None:
        """Sends prompt i `due[i]` seconds from now, or as soon after it as fewer than `concurrency` (0: any number) are
        under way. Without `due` all prompts are due now. A conversation counts as one from its first turn to its last;
        its later turns are sent when the one before has been answered and their pause is over.
        """
        free, due = asyncio.Semaphore(concurrency or len(self.prompts)), due or [0.0] * len(self.prompts)
        start = time.perf_counter()
        senders = asyncio.ensure_future(self._send_all(start, due, free, on_done))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait((senders, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        self.duration = time.perf_counter() - start
        if not senders.done():
            senders.cancel()
            await asyncio.wait((senders,))
        elif (error := senders.exception()) is not None:
            raise error

    async def _send_all(self, start: float, due: Sequence[float], free: asyncio.Semaphore, on_done: OnDone) -> None:
        first = [place for place, prompt in enumerate(self.prompts) if prompt.after < 0]
        async with asyncio.TaskGroup() as group:
            for place in sorted(first, key=lambda place: due[place]):
                at = start + due[place]
                if (wait := at - AHEAD_SECONDS - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                await free.acquire()
                group.create_task(self._conversation(place, at, free, on_done))

    async def _conversation(self, place: int, due: float, free: asyncio.Semaphore, on_done: OnDone) -> None:
        """One turn after another; most conversations have one."""
        prompt = self.prompts[place]
        try:
            while True:
                record = self.records[place]
                record.due = due
                self.sent.append(prompt)
                try:
                    await send_request(self.client, self.backend, prompt, self.options, record, due)
                except DatasetError as error:  # the answer before cannot be carried on
                    record.error = str(error)
                on_done(record)
                if (then := self._next.get(place)) is None:
                    return
                if not record.ok:
                    self._give_up(then, on_done)
                    return
                reply = Reply(record.text[record.thought :], tuple(record.ids))
                place, prompt = then, self.prompts[then].following(prompt, reply)
                due = time.perf_counter() + prompt.pause
                if prompt.pause > AHEAD_SECONDS:
                    await asyncio.sleep(prompt.pause - AHEAD_SECONDS)
        finally:
            free.release()

    def _give_up(self, place: int | None, on_done: OnDone) -> None:
        while place is not None:
            record = self.records[place]
            record.error, record.turn = NEVER_SENT, self.prompts[place].turn
            on_done(record)
            place = self._next.get(place)
