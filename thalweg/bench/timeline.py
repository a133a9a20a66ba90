"""A profile as one time line for Perfetto: what the engine's thread did, the device's kernels, the operations they add
up to, and the gaps.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

from thalweg.bench.errors import ResultError
from thalweg.bench.step_breakdown import GAPS, additions
from thalweg.bench.trace import StepProfile, TracedStep

ENGINE, DEVICE = 1, 2
BETWEEN = "commit, news, plan"  # what the loop does between B of a step and A of the next
LANES = {
    (ENGINE, 1): "A and B",
    (ENGINE, 2): "loop",
    (DEVICE, 1): "kernels",
    (DEVICE, 2): "operations",
    (DEVICE, 3): GAPS,
    (DEVICE, 4): "steps",
}

Event = dict[str, object]


def write(path: Path, profile: StepProfile) -> None:
    """Chrome trace events, gzipped where the name ends in .gz. Raises ResultError."""
    text = json.dumps({"traceEvents": list(_events(profile)), "displayTimeUnit": "ns"})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ResultError(f"cannot write {path} ({error.strerror})") from error


def _events(profile: StepProfile) -> Iterator[Event]:
    for process, name in ((ENGINE, "engine"), (DEVICE, profile.device or "CPU")):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for (process, lane), name in LANES.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": {"name": name}}
    for half in profile.halves:
        name = f"{half.which} step {half.step} rows {half.rows} tokens {half.tokens}"
        yield _slice(name, ENGINE, 1, half.begin, half.end)
    for half, following in zip(profile.halves, profile.halves[1:], strict=False):
        if half.which == "B" and following.step == half.step + 1:
            yield _slice(BETWEEN, ENGINE, 2, half.end, following.begin)
    for step in profile.steps:
        yield _slice(f"step {step.number} rows {step.rows} tokens {step.tokens}", DEVICE, 4, step.begin, step.end)
        yield from _of_step(step)


def _of_step(step: TracedStep) -> Iterator[Event]:
    since, last = step.begin, ""
    latest = step.begin
    for span, gap, added in additions(step):
        yield _slice(span.name, DEVICE, 1, span.begin, span.end) | {
            "args": {"operation": span.operation, "adds_us": added}
        }
        if gap:
            yield _slice(f"before {span.name}", DEVICE, 3, latest, latest + gap)
        if span.operation != last or gap:
            if last:
                yield _slice(last, DEVICE, 2, since, latest)
            since, last = latest + gap, span.operation
        latest = max(latest, span.end)
    yield _slice(last, DEVICE, 2, since, latest)
    if step.end > latest:
        yield _slice("before the next step", DEVICE, 3, latest, step.end)


def _slice(name: str, process: int, lane: int, begin: float, end: float) -> Event:
    return {"ph": "X", "name": name, "pid": process, "tid": lane, "ts": begin, "dur": end - begin}
