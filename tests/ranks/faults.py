"""Faults of one process at its start, for tests: `planted` names it to the processes that are spawned meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import UnsupportedConfig, WeightUpdateError
from thalweg.engine import build, child, group, process
from thalweg.engine.group import Member
from thalweg.runner.drafting import DrafterError

VARIABLE = "THALWEG_TEST_FAULT"  # "rank fault"
ORIGINAL = child._main


def _raising(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*args: Any, **others: Any) -> NoReturn:
        raise error

    return fail


def _kill(*args: Any, **others: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _lose_once() -> Callable[..., Any]:
    load, errors = build.load_weights, [WeightUpdateError("half a file")]

    def fail(*args: Any) -> None:
        load(*args)
        if errors:
            raise errors.pop()

    return fail


# name: the function that fails, how, and what the error says
FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "no GPU": (process, "join", _raising(RuntimeError("invalid device ordinal")), "invalid device ordinal"),
    "no connection": (group, "build_mesh", _raising(OSError("no route")), "no route"),
    "self-check": (build, "check_backends", _raising(UnsupportedConfig("wrong numbers")), "wrong numbers"),
    "file": (build, "load_weights", _raising(OSError("model.safetensors: read error")), "read error"),
    "memory": (build, "calibrate", _raising(MemoryError("none left")), "none left"),
    "drafter": (build, "load_drafter", _raising(DrafterError("NaN")), "the drafter fails: NaN"),
    "weights": (build, "load_weights", _lose_once(), "half a file"),
    "killed": (build, "load_weights", _kill, "ended with exit code -9"),
    "killed before": (process, "join", _kill, "ended with exit code -9"),
}


def main(receiver: Connection) -> None:
    """Entry of a spawned process, in place of `child._main`."""
    rank, _, fault = os.environ[VARIABLE].partition(" ")
    run = process.main

    def faulty(config: EngineConfig, member: Member, address: str) -> None:
        if member.rank == int(rank) and fault:
            module, name, fails, _ = FAULTS[fault]
            setattr(module, name, fails)
        run(config, member, address)

    process.main = faulty
    ORIGINAL(receiver)


def shared_memory() -> set[str]:
    """Names of shared memory on this host, without semaphores: no engine makes one, and other tests do."""
    folder = Path("/dev/shm")
    return {name for name in os.listdir(folder) if not name.startswith("sem.")} if folder.is_dir() else set()


@contextmanager
def planted(fault: str, rank: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, f"{rank} {fault}")
        patch.setattr(child, "_main", main)
        yield
