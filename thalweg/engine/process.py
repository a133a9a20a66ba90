"""An engine process: builds a rank, sends `EngineReady`, and runs the loop until it is drained. Sends `Fatal` if it
fails. A follower does the same with the plans of its leader, and sends nothing but `Fatal`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch
import zmq

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import ThalwegError, WeightUpdateError
from thalweg.core.messages import UNREADABLE, ControlReply, EngineReady, Fatal, FromEngine, Rejected, ToEngine
from thalweg.engine.build import build, build_follower
from thalweg.engine.child import HANG, RECORD
from thalweg.engine.group import Member, RankContext, join
from thalweg.engine.recording import StepRecorder
from thalweg.parallel.relay import HEARTBEAT_MS
from thalweg.parallel.shared_memory import WakePipe

log = logging.getLogger("thalweg.engine")
T = TypeVar("T")


class _Sender(msgspec.Struct):
    """The part of a message that says which answer it needs."""

    uid: int | None = None  # a `Rejected`
    id: int | None = None  # a `ControlReply`


class ZmqChannel:
    """The engine's end of a PAIR socket with msgpack messages. A message that cannot be decoded is refused.

    Raises zmq.ZMQError if the address is unreachable.
    """

    def __init__(self, address: str, wake_pipe: WakePipe | None = None) -> None:
        """wake_pipe: other ranks write to it; then `receive` returns, too."""
        self.wake_pipe = wake_pipe
        self.context = zmq.Context(1)
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.set_hwm(0)
        if address.startswith("tcp:"):  # of another node: what was sent over a broken connection is lost, so it ends
            self.socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.connect(address)
        self.poller = zmq.Poller()
        self.poller.register(self.socket, zmq.POLLIN)
        if wake_pipe is not None:
            self.poller.register(wake_pipe.receives, zmq.POLLIN)
        self.decode = msgspec.msgpack.Decoder(ToEngine).decode
        self.encode = msgspec.msgpack.Encoder().encode

    def receive(self, timeout: float | None) -> list[ToEngine]:
        if timeout != 0.0:
            if not self.poller.poll(None if timeout is None else int(timeout * 1000)):
                return []
            if self.wake_pipe is not None:
                self.wake_pipe.clear()
        messages: list[ToEngine] = []
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self.decode(data))
            except UNREADABLE as error:
                self._refuse(data, str(error))

    def _refuse(self, data: bytes, error: str) -> None:
        """Logs a message that cannot be decoded, and answers it if it says whose it is."""
        log.error("refused a message of %d bytes: %s", len(data), error)
        with contextlib.suppress(*UNREADABLE):
            sender = msgspec.msgpack.decode(data, type=_Sender)
            what, _, where = error.partition(" - at `$.")
            if sender.uid is not None:
                self.send(Rejected(sender.uid, where.rstrip("`"), what))
            if sender.id is not None:
                self.send(ControlReply(sender.id, error=what, field=where.rstrip("`")))

    def send(self, message: FromEngine) -> None:
        self.socket.send(self.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        """Waits up to a second until everything is sent."""
        self.socket.close(linger=1000)
        self.context.term()


def import_gpu_modules() -> None:
    """Imports what only an engine on a GPU needs, and starts the driver, where there is one."""
    if torch.cuda.is_available():
        with contextlib.suppress(ImportError):  # Triton
            importlib.import_module("thalweg.layers.kernel_layers")
            importlib.import_module("thalweg.runner.graphs")


def main(config: EngineConfig, member: Member, address: str) -> None:
    """Builds and runs one process of an engine. address: of its client. Exit code 0 after a drain, 1 after an error.

    After an error it ends at once: a library's clean-up at exit may wait for processes that wait for this one.
    """
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    channel = ZmqChannel(address, member.wake_pipe)
    try:
        rank_context = join(config, member)
        if rank_context.is_leader:
            _lead(config, rank_context, channel)
        else:
            follower, _ = _with_starting_weights(config, lambda wish: build_follower(wish, rank_context))
            channel.send(EngineReady(os.getpid(), 0, 0, 0, 0, config.report))
            follower.run()
    except Exception as error:
        at = time.time()
        # the client fails its requests with this text and starts a new engine
        message = str(error) if isinstance(error, ThalwegError) else f"{type(error).__name__}: {error}"
        message = f"{member.name}: {message}" if member.name else message
        log.error("the engine ends: %s", message, exc_info=not isinstance(error, ThalwegError))
        channel.send(Fatal(message, at))
        channel.close()
        logging.shutdown()
        os._exit(1)
    channel.close()


def _lead(config: EngineConfig, rank_context: RankContext, channel: ZmqChannel) -> None:
    """Serves with a scheduler until it is drained."""
    (loop, _, facts, config), weights_lost = _with_starting_weights(
        config, lambda wish: build(wish, channel, rank_context)
    )
    gc.collect()
    gc.freeze()  # a full collection over loaded modules and weights would delay a step by hundreds of ms
    context = loop.scheduler.context
    if loop.recorder:
        _record_on_signal(loop.recorder)
    sizes = context, facts.vocab, config.num_pages, config.max_running_requests
    channel.send(EngineReady(os.getpid(), *sizes, config.report, weights_lost))
    try:
        loop.run()
        loop.worker.followers.stop()
    except Exception as error:
        if loop.recorder:
            loop.recorder.save_crash(error)
        raise


def _with_starting_weights(config: EngineConfig, build: Callable[[EngineConfig], T]) -> tuple[T, str]:
    """What `build` makes, and why it has the starting weights; "": it has those that replaced them, or none did."""
    try:
        return build(config), ""
    except WeightUpdateError as error:
        reason = f"the replaced weights cannot be loaded again, so the starting weights serve: {error}"
        log.error("%s", reason)
    # after the except block the error's frames, and the memory that they hold, are gone
    gc.collect()
    torch.cuda.empty_cache()
    return build(msgspec.structs.replace(config, weight_updates=())), reason


def _exit_with_parent() -> None:
    """Ends the engine when its client has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _record_on_signal(recorder: StepRecorder) -> None:
    """Saves a recording at each signal, in a thread: the main thread may be stuck in a library."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    for number in RECORD, HANG:
        signal.signal(number, lambda number, frame: None)

    def save() -> None:
        while True:
            received = os.read(reads, 4096)
            if HANG in received:
                timeout = recorder.config.watchdog_timeout
                recorder.save(f"no step for {timeout:g} s while {len(recorder.requests)} requests wait")
            if RECORD in received:
                recorder.save("asked for by a signal")

    threading.Thread(target=save, name="recorder", daemon=True).start()
