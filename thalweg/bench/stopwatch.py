"""The time of a call on a device: calls in a row, each with inputs of its own, so that none finds them in a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

import torch

Call = Callable[[], object]
MOST_REPEATS = 4096
SHORTEST = 1e-7  # seconds: shorter times cannot be told from 0 by events
ROUNDS = 5  # at least; rounds differ by other work on the machine
MOST_ROUNDS = 40  # that a GPU's time is cut into


class CallTime(NamedTuple):
    seconds: float  # of one call: the mean on a GPU, the fastest round on a CPU, which others may use meanwhile
    how: str  # "graph": replays of a CUDA graph of all calls; "events": launches between CUDA events; "clock": a CPU's


def time_calls(calls: Sequence[Call], device: torch.device, seconds: float, capture: bool = True) -> CallTime:
    """Runs them for about so long. capture: try a CUDA graph. Raises whatever a call raises."""
    if device.type != "cuda":
        return CallTime(min(_clock(calls, seconds)) / len(calls), "clock")
    for call in calls[:2]:
        call()
    torch.cuda.synchronize(device)
    graph = _captured(calls) if capture else None
    run, how = (lambda: [call() for call in calls], "events") if graph is None else (graph.replay, "graph")
    return CallTime(fmean(_events(run, seconds)) / len(calls), how)


def _clock(calls: Sequence[Call], seconds: float) -> list[float]:
    """Seconds of all calls, of each round after the first."""
    end, rounds = 0.0, list[float]()
    while True:
        begin = time.perf_counter()
        for call in calls:
            call()
        now = time.perf_counter()
        if not end:
            end = now + seconds
            continue
        rounds.append(now - begin)
        slow = len(rounds) >= 2 and now > end + 4 * seconds  # a round takes longer than all should
        if slow or (len(rounds) >= ROUNDS and now >= end):
            return rounds


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    """None for calls that synchronize with the device."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _events(run: Call, seconds: float) -> list[float]:
    """Seconds of one run, in rounds of equally many runs that take about `seconds` together."""
    run()
    repeats, each = 1, max(rounds(run, 1, 1)[0], SHORTEST)
    while repeats * each < seconds / 8 and repeats < MOST_REPEATS:
        repeats = min(MOST_REPEATS, max(2 * repeats, int(seconds / 4 / each)))
        each = max(rounds(run, repeats, 1)[0], SHORTEST)
    repeats = max(1, int(seconds / MOST_ROUNDS / each))
    return rounds(run, repeats, min(MOST_ROUNDS, max(ROUNDS, int(seconds / (repeats * each)))))


def rounds(run: Call, repeats: int, count: int) -> list[float]:
    """Seconds of one run, in each of `count` rounds of so many runs, back to back."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(repeats):
            run()
        mark.record()
    marks[-1].synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return [float(before.elapsed_time(after)) / 1e3 / repeats for before, after in pairs]
