"""How long a call takes on a device: calls in a row, each with inputs of its own, so that none finds what it reads in a cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
MOST_REPEATS = 4096
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Took:
    """seconds of one call. how: "graph" (replays of a CUDA graph of all calls), "events" (launched one by one, between CUDA events: what cannot be
    recorded) or "clock" (a CPU's, the fastest of some rounds, since others may use the machine meanwhile)."""

    seconds: float
    how: str


def took(calls: Sequence[Call], device: torch.device, seconds: float, recorded: bool = True) -> Took:
    """Runs them for about so long. recorded: whether to try a CUDA graph. Raises whatever a call raises."""
    if device.type != "cuda":
        return Took(_clock(calls, seconds), "clock")
    for call in calls[:2]:
        call()
    torch.cuda.synchronize(device)
    graph = _recorded(calls) if recorded else None
    if graph is None:
        return Took(_events(lambda: [call() for call in calls], seconds) / len(calls), "events")
    return Took(_events(graph.replay, seconds) / len(calls), "graph")


def _clock(calls: Sequence[Call], seconds: float) -> float:
    for call in calls:
        call()
    best, end, rounds = float("inf"), time.perf_counter() + seconds, 0
    while rounds < ROUNDS or time.perf_counter() < end:
        begin = time.perf_counter()
        for call in calls:
            call()
        best = min(best, (time.perf_counter() - begin) / len(calls))
        rounds += 1
        if rounds >= 2 and time.perf_counter() > end + 4 * seconds:
            break  # one round takes longer than all should
    return best


def _recorded(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    """None for calls that cannot be recorded, because they ask the device for something."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _events(run: Callable[[], object], seconds: float) -> float:
    """Seconds of one run, the mean over so many that they take about `seconds`."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    repeats = 1
    while True:
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        passed = start.elapsed_time(end) / 1e3
        if passed >= seconds / 3 or repeats >= MOST_REPEATS:
            return float(passed / repeats)
        repeats = min(MOST_REPEATS, max(2 * repeats, int(repeats * seconds / max(passed, 1e-5))))
