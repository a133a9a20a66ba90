"""Runs the cells of an ablation one after the other, each in a fresh process with a time limit, and keeps what each has
told.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import msgspec

from thalweg.bench.ablate_cell import Order

DONE, REFUSED, FAILED, TIMED_OUT, INTERRUPTED = "done", "not runnable", "failed", "timed out", "interrupted"

Result = dict[str, Any]


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came while a cell ran; `result` is what it had measured."""

    def __init__(self, result: Result) -> None:
        super().__init__("interrupted")
        self.result = result


def run(order: Order, limit: float) -> Result:
    """One cell: its status, the reason where it is not done, and what was measured, partial where it was ended.

    limit: seconds. Raises Interrupted on Ctrl-C.
    """
    begin = time.perf_counter()
    with TemporaryDirectory(prefix="thalweg-ablate-") as folder:
        place = Path(folder)
        (place / "order.json").write_bytes(msgspec.json.encode(order))
        words = [sys.executable, "-m", "thalweg.bench.ablate_cell", str(place / "order.json"), str(place / "news")]
        with (place / "said").open("wb") as said:  # a session of its own: Ctrl-C in the terminal does not reach it
            process = subprocess.Popen(words, stdout=said, stderr=said, start_new_session=True)
        ended, reason = "", ""
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            ended, reason = TIMED_OUT, f"not done within {limit:g} s"
        except KeyboardInterrupt:
            ended = INTERRUPTED
        finally:
            end(process)
        result = told(place / "news")
        if not ended:
            ended, reason = _outcome(process.returncode, result, place / "said")
    result = {"status": ended, "reason": reason, "seconds": time.perf_counter() - begin, **result}
    if ended == INTERRUPTED:
        raise Interrupted(result)
    return result


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def told(news: Path) -> Result:
    """What a cell's lines say, together; a last line that was cut off is left out."""
    found: Result = {"batches": [], "accuracy": []}
    if not news.is_file():
        return found
    for line in news.read_text(encoding="utf-8").splitlines():
        try:
            entry: Mapping[str, Any] = json.loads(line)
        except ValueError:
            continue
        for name, value in entry.items():
            if name == "batch":
                found["batches"].append(value)
            elif name == "accuracy":
                found["accuracy"].append({key: one for key, one in value.items() if key != "wrong"})
            else:
                found[name] = value
    return found


def _outcome(status: int, result: Result, said: Path) -> tuple[str, str]:
    """Of a process that ended by itself. Takes "done" and "refused" out of the result."""
    refused, done = result.pop("refused", ""), result.pop("done", False)
    if refused:
        return REFUSED, str(refused)
    if status == 0 and done:
        return DONE, ""
    lines = [line.strip() for line in said.read_text(errors="replace").splitlines() if line.strip()]
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return FAILED, f"{how}: {lines[-1] if lines else 'it said nothing'}"


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM is Ctrl-C in here: `timeout` and job schedulers keep what was measured."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
