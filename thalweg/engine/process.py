"""The engine process: builds a rank, sends `EngineReady`, and runs the loop until it is drained. Sends `Fatal` if it
fails.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading

import msgspec
import zmq

from thalweg.config.engine import EngineConfig
from thalweg.core import logs
from thalweg.core.errors import ThalwegError
from thalweg.core.messages import EngineReady, Fatal, FromEngine, ToEngine
from thalweg.engine import caches
from thalweg.engine.build import build
from thalweg.engine.calibration_checks import check_backends
from thalweg.engine.watchdog import SIGNAL, watch

log = logging.getLogger("thalweg.engine")


class ZmqChannel:
    """The engine's end of a PAIR socket with msgpack messages. Raises zmq.ZMQError if the address is unreachable."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context(1)
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.set_hwm(0)
        self.socket.connect(address)
        self.decode = msgspec.msgpack.Decoder(ToEngine).decode
        self.encode = msgspec.msgpack.Encoder().encode

    def receive(self, timeout: float | None) -> list[ToEngine]:
        if timeout != 0.0 and not self.socket.poll(None if timeout is None else int(timeout * 1000)):
            return []
        messages: list[ToEngine] = []
        while True:
            try:
                messages.append(self.decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine) -> None:
        self.socket.send(self.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Waits up to a second until everything is sent."""
        self.socket.close(linger=1000)
        self.context.term()


def main(config: EngineConfig, address: str) -> None:
    """Entry of the spawned process. Exit code 0 after a drain, 1 after an error."""
    logs.configure(config.log_level, config.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when the engine ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(SIGNAL, signal.SIG_IGN)  # there is nothing to record yet
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    channel = ZmqChannel(address)
    try:
        caches.use(config.cache_dir)
        loop, _, facts, config = build(check_backends(config), channel)
        gc.collect()
        gc.freeze()  # a full collection over loaded modules and weights would delay a step by hundreds of ms
        context = loop.scheduler.context
        watch(loop, config.watchdog_timeout)
        channel.send(
            EngineReady(os.getpid(), context, facts.vocab, config.num_pages, config.max_running_requests, config.report)
        )
        try:
            loop.run()
        except Exception as error:
            if loop.recorder:
                loop.recorder.save_crash(error)
            raise
    except Exception as error:
        # the client fails its requests with this text and starts a new engine
        message = str(error) if isinstance(error, ThalwegError) else f"{type(error).__name__}: {error}"
        log.error("the engine ends: %s", message, exc_info=not isinstance(error, ThalwegError))
        channel.send(Fatal(message))
        channel.close()
        raise SystemExit(1) from error
    channel.close()


def _exit_with_parent() -> None:
    """Ends the engine when its client has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
