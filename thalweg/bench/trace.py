"""Reads a profile (torch's Chrome trace, as `/start_profile` writes it): its steps, and the device's work in each, by
operation.

On a GPU a span is a kernel or a copy. It belongs to the step whose forward (A) or sampling (B) launched it, found by
the correlation id of its launch, which also identifies replays of CUDA graphs; other spans belong to the step during
which they began. On a CPU a span is an outermost operator of torch on the thread of the steps. Times are µs of the
trace's clock.
"""

from __future__ import annotations

import bisect
import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.core.errors import UnsupportedConfig
from thalweg.kernels import names

STEP = re.compile(r"([AB]) step (\d+) rows (\d+) tokens (\d+)")
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
AHEAD = 1 << 14  # numbers of the smallest weight that is read ahead
LAUNCHES = {"cuda_runtime", "cuda_driver"}

Event = Mapping[str, Any]
Dims = tuple[tuple[int, ...], ...]  # of an operator's inputs


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """A kernel, a copy, or an operator on a CPU."""

    name: str
    operation: str  # a role of `kernels.names`
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class StepHalf:
    """A or B of a step on the engine's thread."""

    which: str
    step: int
    rows: int
    tokens: int
    thread: int
    begin: float
    end: float


@dataclass(slots=True)
class TracedStep:
    """A step with what the device did."""

    number: int
    rows: int  # of its plan
    tokens: int
    spans: list[DeviceSpan] = field(default_factory=list)  # in the order of their begin
    begin: float = 0.0
    end: float = 0.0  # the begin of the next step, or of its own last span where none follows at once
    followed: bool = False

    @property
    def kind(self) -> tuple[int, int]:
        return self.rows, self.tokens


@dataclass(frozen=True, slots=True)
class StepProfile:
    """A profile of an engine."""

    steps: list[TracedStep]
    halves: list[StepHalf]  # on the engine's thread
    device: str  # its name; "" for a CPU


class WeightShapes:
    """Tells a CPU's products apart by the shapes of their weights."""

    def __init__(self, by_weight: Mapping[tuple[int, int], str], by_size: Mapping[int, str]) -> None:
        # operations by (inputs, outputs) or a head's (inner, outer), and by numbers that are read ahead at once
        self.by_weight, self.by_size = by_weight, by_size

    def operation(self, name: str, dims: Dims) -> str:
        """The role of an operator with inputs of these shapes; else by its name alone."""
        what = names.role_of_operator(name)
        if name == "aten::sum" and any(dims):  # a scripted function's own inputs stand before the operator's
            return self._ahead(next(filter(None, dims)), what)
        found = [self.by_weight[pair] for pair in map(_last, dims[1:]) if pair in self.by_weight]
        if what == names.PRODUCT:
            told = bool(self.by_weight) and any(dims)  # a profile may have been made without shapes
            return found[0] if found else names.PROJECTIONS if told else names.PRODUCTS
        return found[0] if what == names.ATTENTION and "bmm" in name and found else what

    def _ahead(self, of: tuple[int, ...], what: str) -> str:
        """The role of a sum over a whole tensor of this shape, which may be a weight that is prefetched."""
        inputs, outputs = _last(of)
        numbers = math.prod(of)
        known = (
            self.by_weight.get((inputs, outputs)) or self.by_weight.get((outputs, inputs)) or self.by_size.get(numbers)
        )
        weight = bool(self.by_weight) and numbers >= AHEAD and min(of) > 1
        return known or (names.PROJECTIONS if weight else what)


def _last(shape: tuple[int, ...]) -> tuple[int, int]:
    """The last two dimensions; (0, 0) of a vector."""
    return (shape[-2], shape[-1]) if len(shape) > 1 else (0, 0)


NO_SHAPES = WeightShapes({}, {})


def read(path: Path, shapes: WeightShapes = NO_SHAPES) -> StepProfile:
    """Raises UnsupportedConfig for a file that is no profile, or has no steps."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            trace = json.load(file)
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise UnsupportedConfig(f"{path} is no profile ({error}); POST /start_profile writes one") from error
    halves = sorted(_halves(events), key=lambda half: half.begin)
    if not halves:
        raise UnsupportedConfig(
            f"{path} has no steps in it: a profile of Thalweg's engine with its CPU activities is needed, see POST"
            " /start_profile"
        )
    gpu = any(event.get("cat") in ON_GPU for event in events)
    steps = _on_gpu(events, halves) if gpu else _on_cpu(events, halves, shapes)
    devices = trace.get("deviceProperties") or [{}]
    return StepProfile(_bounded(steps), halves, str(devices[0].get("name", "GPU")) if gpu else "")


def _halves(events: Sequence[Event]) -> Iterator[StepHalf]:
    for event in events:
        if event.get("cat") == "user_annotation" and (found := STEP.fullmatch(event["name"])):
            step, rows, tokens = (int(group) for group in found.groups()[1:])
            yield StepHalf(found[1], step, rows, tokens, event["tid"], event["ts"], event["ts"] + event["dur"])


def _empty(halves: Sequence[StepHalf]) -> dict[int, TracedStep]:
    return {half.step: TracedStep(half.step, half.rows, half.tokens) for half in halves}


def _on_gpu(events: Sequence[Event], halves: Sequence[StepHalf]) -> list[TracedStep]:
    launched = {
        e["args"]["correlation"]: e for e in events if e.get("cat") in LAUNCHES and "correlation" in e.get("args", {})
    }
    begins = [half.begin for half in halves]
    of_half: dict[tuple[int, str], list[Event]] = {}
    loose: list[Event] = []
    for event in sorted((e for e in events if e.get("cat") in ON_GPU), key=lambda e: float(e["ts"])):
        launch = launched.get(event.get("args", {}).get("correlation"))
        at = bisect.bisect_right(begins, launch["ts"]) - 1 if launch is not None else -1
        if launch is not None and at >= 0 and launch["ts"] <= halves[at].end:
            of_half.setdefault((halves[at].step, halves[at].which), []).append(event)
        else:
            loose.append(event)
    steps = _empty(halves)
    for (number, which), mine in of_half.items():
        short = [names.short_name(event["name"]) for event in mine]
        whats = (
            names.forward_roles(short)
            if which == "A"
            else names.sampling_roles([names.role_of_kernel(name) for name in short])
        )
        steps[number].spans += [_span(e, n, what) for e, n, what in zip(mine, short, whats, strict=True)]
    found = sorted((step for step in steps.values() if step.spans), key=lambda step: min(s.begin for s in step.spans))
    firsts = [min(span.begin for span in step.spans) for step in found]
    for event in loose:
        at = bisect.bisect_right(firsts, event["ts"]) - 1
        if at >= 0:
            name = names.short_name(event["name"])
            found[at].spans.append(_span(event, name, names.role_of_kernel(name)))
    return found


def _span(event: Event, name: str, operation: str) -> DeviceSpan:
    begin = float(event["ts"])
    return DeviceSpan(name, operation, begin, begin + float(event["dur"]))


def _on_cpu(events: Sequence[Event], halves: Sequence[StepHalf], shapes: WeightShapes) -> list[TracedStep]:
    steps = _empty(halves)
    by_thread: dict[int, list[Event]] = {}
    for event in events:
        # what is not torch's own, such as a scripted function, only holds operators
        if event.get("cat") == "cpu_op" and event["name"].startswith("aten::"):
            by_thread.setdefault(event["tid"], []).append(event)
    for thread, mine in by_thread.items():
        own = [half for half in halves if half.thread == thread]
        inside: dict[int, list[Event]] = {}
        begins, end = [half.begin for half in own], -math.inf
        for event in sorted(mine, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
            begin = float(event["ts"])
            at = bisect.bisect_right(begins, begin) - 1
            if begin < end or at < 0 or begin > own[at].end:
                continue  # part of another operator, or outside of every step
            end = begin + float(event["dur"])
            inside.setdefault(at, []).append(event)
        for at, outermost in inside.items():
            whats = [shapes.operation(event["name"], _dims(event)) for event in outermost]
            if own[at].which == "B":
                whats = names.sampling_roles([names.role_of_operator(event["name"]) for event in outermost])
            found = [_span(e, e["name"].removeprefix("aten::"), what) for e, what in zip(outermost, whats, strict=True)]
            steps[own[at].step].spans += found
    return [step for step in steps.values() if step.spans]


def _dims(event: Event) -> Dims:
    given = event.get("args", {}).get("Input Dims", [])
    return tuple(tuple(one) if all(isinstance(n, int) for n in one) else () for one in given)


def _bounded(steps: list[TracedStep]) -> list[TracedStep]:
    """In the order of time, with begin and end."""
    for step in steps:
        step.spans.sort(key=lambda span: span.begin)
        step.begin, step.end = step.spans[0].begin, max(span.end for span in step.spans)
    steps.sort(key=lambda step: step.begin)
    for step, following in zip(steps, steps[1:], strict=False):
        if following.number == step.number + 1:
            step.end, step.followed = following.begin, True
    return steps
