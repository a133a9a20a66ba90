"""The engine's own process: builds a rank, says `Ready`, runs the loop until it is drained, says `Fatal` if it
breaks.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading

from thalweg.config.engine import EngineConfig
from thalweg.core import logs
from thalweg.core.errors import ThalwegError
from thalweg.core.messages import EngineReady, Fatal
from thalweg.engine import caches
from thalweg.engine.build import build
from thalweg.engine.calibration_checks import proven
from thalweg.engine.channel import ZmqChannel
from thalweg.engine.loop import Loop
from thalweg.engine.watchdog import SIGNAL, watch

log = logging.getLogger("thalweg.engine")


def main(config: EngineConfig, address: str) -> None:
    """Entry of the spawned process. Exit code 0 after a drain, 1 after an error (told to the front as `Fatal`)."""
    logs.configure(config.log_level, config.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the front decides when the engine ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(SIGNAL, signal.SIG_IGN)  # while there is nothing to record yet
    threading.Thread(target=_die_with_parent, daemon=True).start()
    channel = ZmqChannel(address)
    try:
        caches.use(config.cache_dir)
        loop, _, facts, config = build(proven(config), channel)
        gc.collect()
        gc.freeze()  # what is loaded stays: a full collection over it would hold up a step for hundreds of milliseconds
        context = loop.scheduler.context
        watch(loop, config.watchdog_timeout)
        channel.send(
            EngineReady(os.getpid(), context, facts.vocab, config.num_pages, config.max_running_requests, config.report)
        )
        run(loop)
    except Exception as error:
        # what computes the answer fails loudly: the front fails its requests with this text and starts a new engine
        told = str(error) if isinstance(error, ThalwegError) else f"{type(error).__name__}: {error}"
        log.error("the engine ends: %s", told, exc_info=not isinstance(error, ThalwegError))
        channel.send(Fatal(told))
        channel.close()
        raise SystemExit(1) from error
    channel.close()


def run(loop: Loop) -> None:
    """Runs it to its end; what it dies of is recorded first."""
    try:
        loop.run()
    except Exception as error:
        loop.recorder.died(error)
        raise


def _die_with_parent() -> None:
    """An engine without a front serves nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
