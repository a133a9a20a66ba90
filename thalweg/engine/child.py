"""The process of an engine. It starts before its configuration is known, and imports meanwhile what an engine needs.

Nothing here imports torch, so that a server starts the process before its own imports.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg.core import logs

if TYPE_CHECKING:
    from thalweg.config.engine import EngineConfig
    from thalweg.engine.group import Member

log = logging.getLogger("thalweg.engine")
SPAWN = multiprocessing.get_context("spawn")
RECORD = signal.SIGUSR1  # asks for a recording
HANG = signal.SIGUSR2  # the same, because the client misses replies


class EngineProcess:
    """A process that imports, and waits for `run`. `close` ends it."""

    def __init__(self, name: str = "") -> None:
        receiver, self.sender = SPAWN.Pipe(duplex=False)
        self.child = SPAWN.Process(target=_main, args=(receiver,), name=name or "thalweg-engine")
        self.child.start()
        receiver.close()
        # if nobody closes this, multiprocessing would wait at exit for a process that waits for us
        atexit.register(self.child.kill)

    def run(self, config: EngineConfig, member: Member, address: str) -> None:
        """Has the process become this member of an engine, and connect to the client at this address."""
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its sentinel says
            self.sender.send((config, member, address))
        self.sender.close()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process, where the system says so."""
        try:
            return Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    @property
    def how_ended(self) -> str:
        return f"ended with exit code {self.child.exitcode}"

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(self.child.pid or 0, number)

    def close(self) -> None:
        """Kills the process if it lives."""
        self.child.kill()
        self.child.join()
        self.sender.close()
        atexit.unregister(self.child.kill)


def _main(receiver: Connection) -> None:
    """Entry of the spawned process."""
    # the client decides when the engine ends, and there is nothing to record yet
    for number in signal.SIGINT, signal.SIGTERM, RECORD, HANG:
        signal.signal(number, signal.SIG_IGN)
    began = time.monotonic()
    gc.disable()  # imports leave no garbage, and collections would take a tenth of their time
    from thalweg.engine import process

    process.import_gpu_modules()
    gc.freeze()
    gc.enable()
    imported = time.monotonic()
    try:
        config, member, address = receiver.recv()
    except EOFError:  # the server has ended
        return
    logs.configure(config.log_level, config.log_format)
    waited = time.monotonic() - imported
    log.debug("imports took %.2f s, then the configuration took %.2f s to come", imported - began, waited)
    process.main(config, member, address)
