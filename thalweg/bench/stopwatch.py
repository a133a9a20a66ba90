"""How long a call takes on a device: calls in a row, each with inputs of its own, so that none finds what it reads in a
cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
MOST_REPEATS = 4096
SHORTEST = 1e-7  # seconds: what events cannot tell from nothing
ROUNDS = 5  # at least; rounds differ by what else happens on the machine
MOST_ROUNDS = 40  # that are kept, and that a GPU's time is cut into


@dataclass(frozen=True, slots=True)
class Took:
    """seconds of one call: on a GPU the mean, on a CPU the fastest round's, since others may use the machine meanwhile.
    rounds: the same of each round, at most MOST_ROUNDS of them. how: "graph" (replays of a CUDA graph of all calls),
    "events" (launched one by one, between CUDA events: what cannot be recorded) or "clock" (a CPU's).
    """

    seconds: float
    rounds: tuple[float, ...]
    how: str


def took(calls: Sequence[Call], device: torch.device, seconds: float, recorded: bool = True) -> Took:
    """Runs them for about so long. recorded: whether to try a CUDA graph. Raises whatever a call raises."""
    many = len(calls)
    if device.type != "cuda":
        rounds = [one / many for one in _clock(calls, seconds)]
        return Took(min(rounds), thinned(rounds), "clock")
    for call in calls[:2]:
        call()
    torch.cuda.synchronize(device)
    graph = _recorded(calls) if recorded else None
    run, how = (lambda: [call() for call in calls], "events") if graph is None else (graph.replay, "graph")
    rounds = [one / many for one in _events(run, seconds)]
    return Took(sum(rounds) / len(rounds), thinned(rounds), how)


def thinned(rounds: Sequence[float]) -> tuple[float, ...]:
    """At most MOST_ROUNDS of them, spread evenly."""
    count = min(len(rounds), MOST_ROUNDS)
    return tuple(rounds[i * len(rounds) // count] for i in range(count))


def _clock(calls: Sequence[Call], seconds: float) -> list[float]:
    """Seconds of all calls, of each round."""
    for call in calls:
        call()
    end, rounds = time.perf_counter() + seconds, list[float]()
    while len(rounds) < ROUNDS or time.perf_counter() < end:
        begin = time.perf_counter()
        for call in calls:
            call()
        rounds.append(time.perf_counter() - begin)
        if len(rounds) >= 2 and time.perf_counter() > end + 4 * seconds:
            break  # one round takes longer than all should
    return rounds


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


def _events(run: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of one run, in each of so many rounds of equally many runs that they take about `seconds`."""
    run()
    repeats, each = 1, max(_rounds(run, 1, 1)[0], SHORTEST)
    while repeats * each < seconds / 8 and repeats < MOST_REPEATS:
        repeats = min(MOST_REPEATS, max(2 * repeats, int(seconds / 4 / each)))
        each = max(_rounds(run, repeats, 1)[0], SHORTEST)
    repeats = max(1, int(seconds / MOST_ROUNDS / each))
    return _rounds(run, repeats, min(MOST_ROUNDS, max(ROUNDS, int(seconds / (repeats * each)))))


def _rounds(run: Callable[[], object], repeats: int, count: int) -> list[float]:
    """Seconds of one run, in each of `count` rounds of so many runs, all behind each other."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(repeats):
            run()
        mark.record()
    marks[-1].synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    return [float(before.elapsed_time(after)) / 1e3 / repeats for before, after in pairs]
