"""A profile of an engine's steps: the device's work in each, by operation.

A graph's replay names kernels and no layers. So some steps of each kind run eagerly inside `operation_ranges`, where
each call of a layer is a range of the profile. A kernel belongs to the innermost range around its launch, which the
correlation id names. The kernels of a replay get their operations from the eager step, matched in launch order.

On a GPU a span is a kernel or a copy, on a CPU an outermost operator of torch. Times are µs of the trace's clock.
"""

from __future__ import annotations

import bisect
import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from torch.profiler import record_function

from thalweg.core.errors import UnsupportedConfig
from thalweg.engine.local import LocalEngine
from thalweg.layers.linear import LinearLayer
from thalweg.models.token_by_token import TokenByToken
from thalweg.parallel.process_axis import ProcessAxis

PROJECTIONS, ATTENTION, MLP, EXPERTS, HEAD = "projections", "attention", "mlp", "experts", "head"
NORM, DRAFTING, COPIES, COMMUNICATION = "norm", "drafting", "copies", "communication"
REST = {"forward": "inputs", "sample": "sampling", "draft": DRAFTING}  # what no range has, by the part of the step
WHOLE = {"forward": "forward", "sample": "sampling", "draft": DRAFTING}  # the same in a profile without ranges
RANGE = "operation "  # begins the name of a range
METHODS = ("forward", "forward_", "add_", "add_to", "split", "swiglu", "write_kv", "logits")
PREFETCHES = ("_prefetch_before", "_prefetch_after")  # of weights, on a CPU
HALF = re.compile(r"(forward|sample|draft) step (\d+) rows (\d+) tokens (\d+)")
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
WAITS = re.compile("nccl|^_(one_shot|two_shot|dispatch|combine)$")  # kernels that end when all ranks have come


class TraceEvent(msgspec.Struct):
    """One of a Chrome trace."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        return self.ts + self.dur


class Trace(msgspec.Struct):
    """The parts of a Chrome trace that are read."""

    traceEvents: list[TraceEvent]
    deviceProperties: list[dict[str, Any]] = []


class DeviceSpan(NamedTuple):
    """A kernel, a copy, or an operator on a CPU."""

    issued: float  # on the engine's thread; -1 where the launch is not in the profile
    begin: float
    end: float
    name: str
    operation: str = ""


class StepHalf(NamedTuple):
    """The forward pass or the sampling of a step on the engine's thread."""

    which: str  # forward, sample or draft
    step: int
    rows: int
    tokens: int
    begin: float
    end: float


@dataclass(slots=True)
class ProfiledStep:
    """A step with what the device did."""

    number: int
    rows: int  # of its plan
    tokens: int
    spans: list[DeviceSpan] = field(default_factory=list)  # in the order of their begin
    end: float = 0.0  # the begin of the next step, or of its own last span where none follows at once
    is_followed: bool = False
    has_ranges: bool = False  # it ran eagerly, inside `operation_ranges`

    @property
    def begin(self) -> float:
        return self.spans[0].begin


class StepProfile(NamedTuple):
    """A profile of an engine."""

    steps: list[ProfiledStep]  # replays alone, where there are some
    device: str  # its name; "" for a CPU


def _operations(module: nn.Module, outer: str = "") -> Iterator[tuple[nn.Module, str]]:
    """Each layer with its operation. outer: the operation of the module around it."""
    for name, child in module.named_children():
        operation = outer
        if name == "attention":
            operation = ATTENTION
        elif name == "mlp":
            operation = EXPERTS if hasattr(child, "router") else MLP
        elif name.endswith("norm"):
            operation = NORM
        elif isinstance(child, LinearLayer) and outer in ("", ATTENTION):
            operation = PROJECTIONS
        yield child, operation
        yield from _operations(child, operation)


def _ranged(call: Callable[..., Any], operation: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(RANGE + operation):
            return call(*args, **kwargs)

    return run


def _collectives(device: torch.device) -> Iterator[tuple[Any, str]]:
    """Classes and modules, and what they call to send something to other ranks."""
    for name in ("add_", "all_gather", "reduce_scatter", "all_to_all"):
        yield ProcessAxis, name
    if device.type == "cuda":
        from thalweg.kernels.all_reduce import triton as all_reduce  # needs Triton
        from thalweg.kernels.exchange import triton as exchange

        yield from ((all_reduce, "add_norm"), (exchange, "dispatch"), (exchange, "combine"))


@contextmanager
def operation_ranges(engine: LocalEngine) -> Iterator[None]:
    """Inside, steps run eagerly and calls of layers are ranges of a profile. Outside, layers are as they were."""
    runner = engine.runner
    captured, replaced = (runner.forward_model, runner.graphs), list[tuple[dict[str, Any], str, Any]]()

    def put(owner: object, name: str, operation: str) -> None:
        call = getattr(owner, name, None)
        if operation and callable(call):
            replaced.append((vars(owner), name, vars(owner).get(name)))
            vars(owner)[name] = _ranged(call, operation)

    has_graphs = engine.config.cuda_graph_bs or engine.config.piecewise_cuda_graph_tokens
    if engine.config.processes > 1 and has_graphs:  # the others would replay theirs, which are padded
        raise UnsupportedConfig("a profile by operation of several processes: use --cuda-graph-mode none")
    model = runner.model.model if isinstance(runner.model, TokenByToken) else runner.model
    assert isinstance(model, nn.Module)
    for layer, operation in dict(_operations(model)).items():
        for name in METHODS:
            put(layer, name, HEAD if name == "logits" else operation)
        for name in PREFETCHES:
            put(layer, name, PROJECTIONS)
    put(runner.drafting, "draft", DRAFTING)
    calls = [(owner, name, getattr(owner, name)) for owner, name in _collectives(runner.planes.device)]
    for where, name, call in calls:
        setattr(where, name, _ranged(call, COMMUNICATION))
    runner.disable_graphs()
    try:
        yield
    finally:
        runner.forward_model, runner.graphs = captured
        for where, name, call in calls:
            setattr(where, name, call)
        for attributes, name, before in reversed(replaced):
            del attributes[name]
            if before is not None:
                attributes[name] = before


def read(path: Path) -> StepProfile:
    """Raises UnsupportedConfig for a file that is no profile, or has no steps."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            trace = msgspec.json.decode(file.read(), type=Trace)
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise UnsupportedConfig(f"{path} is no profile ({error}); POST /start_profile writes one") from error
    events = [event for event in trace.traceEvents if event.ph == "X"]
    events.sort(key=lambda event: (event.ts, -event.dur))
    marks = [event for event in events if event.cat == "user_annotation"]
    found = [(HALF.fullmatch(event.name), event) for event in marks]
    halves = [StepHalf(m[1], int(m[2]), int(m[3]), int(m[4]), e.ts, e.end) for m, e in found if m]
    if not halves:
        raise UnsupportedConfig(
            f"{path} has no steps in it: a profile of Thalweg's engine with its CPU activities is needed, see POST"
            " /start_profile"
        )
    on_gpu = any(event.cat in ON_GPU for event in events)
    thread = next(event.tid for match, event in found if match)
    spans = _gpu_spans(events) if on_gpu else _cpu_spans(event for event in events if event.tid == thread)
    steps = _steps(halves, spans, [event for event in marks if event.name.startswith(RANGE)])
    devices = trace.deviceProperties or [{}]
    return StepProfile(steps, str(devices[0].get("name", "GPU")) if on_gpu else "")


def _gpu_spans(events: Sequence[TraceEvent]) -> list[DeviceSpan]:
    """In the order of launch. All kernels of a graph have its launch."""
    launches = {event.args.get("correlation"): event.ts for event in events if event.cat in LAUNCHES}
    launches.pop(None, None)
    kernels = [event for event in events if event.cat in ON_GPU]
    return sorted(
        DeviceSpan(launches.get(one.args.get("correlation"), -1.0), one.ts, one.end, short_name(one.name))
        for one in kernels
    )


def _cpu_spans(events: Iterable[TraceEvent]) -> list[DeviceSpan]:
    """torch's operators outside of any other one."""
    spans, end = list[DeviceSpan](), 0.0
    for event in events:  # a scripted function only holds operators
        if event.cat == "cpu_op" and event.name.startswith("aten::") and event.ts >= end:
            end = event.end
            spans.append(DeviceSpan(event.ts, event.ts, end, event.name.removeprefix("aten::")))
    return spans


def short_name(name: str) -> str:
    """A kernel's name without templates, arguments and namespaces."""
    return re.sub(r"^void |<.*|\(.*", "", name.replace("(anonymous namespace)::", "")).split("::")[-1].strip()


def _ranges_of(spans: Sequence[DeviceSpan], ranges: Sequence[TraceEvent]) -> list[str]:
    """The operation of the innermost range around each launch; drafting includes all inside; "" outside of ranges."""
    found, around, after = list[str](), list[TraceEvent](), 0
    for span in spans:
        while after < len(ranges) and ranges[after].ts <= span.issued:
            around.append(ranges[after])
            after += 1
        around = [event for event in around if event.end >= span.issued]
        names = [event.name.removeprefix(RANGE) for event in around]
        found.append("" if not names else DRAFTING if DRAFTING in names else names[-1])
    return found


def _steps(halves: Sequence[StepHalf], spans: Sequence[DeviceSpan], ranges: Sequence[TraceEvent]) -> list[ProfiledStep]:
    """The steps in the order of time; eager ones only where there is no other."""
    begins, by_half, loose = [half.begin for half in halves], dict[StepHalf, list[int]](), list[DeviceSpan]()
    for place, span in enumerate(spans):
        half = halves[bisect.bisect_right(begins, span.issued) - 1]
        if half.begin <= span.issued <= half.end:
            by_half.setdefault(half, []).append(place)
        else:
            loose.append(span)
    labels, steps = _ranges_of(spans, ranges), dict[int, ProfiledStep]()
    eager: dict[tuple[str, int, int], tuple[list[str], list[str]]] = {}
    for with_ranges in (True, False):
        for half, places in by_half.items():
            if any(labels[place] for place in places) != with_ranges:
                continue
            step = steps.setdefault(half.step, ProfiledStep(half.step, half.rows, half.tokens))
            step.has_ranges |= with_ranges
            kind, names = (half.which, half.rows, half.tokens), [spans[place].name for place in places]
            if with_ranges:
                operations = [labels[place] or REST[half.which] for place in places]
                eager[kind] = names, operations
            elif kind in eager:
                operations = matched(names, *eager[kind], REST[half.which])
            else:
                operations = [(REST if ranges else WHOLE)[half.which]] * len(names)
            for place, operation in zip(places, operations, strict=True):
                step.spans.append(spans[place]._replace(operation=operation))
    found = sorted(steps.values(), key=lambda step: min(span.begin for span in step.spans))
    firsts = [min(span.begin for span in step.spans) for step in found]
    for span in loose:  # copies of outputs; a CPU's operators between two halves begin when they are issued
        if span.begin > span.issued and (at := bisect.bisect_right(firsts, span.begin) - 1) >= 0:
            found[at].spans.append(span._replace(operation=COPIES))
    for step in found:
        step.spans.sort(key=lambda span: span.begin)
        step.end = max(span.end for span in step.spans)
    for step, following in pairwise(found):
        if following.number == step.number + 1:
            step.end, step.is_followed = following.begin, True
    return [step for step in found if not step.has_ranges] or found


def matched(names: Sequence[str], eager: Sequence[str], operations: Sequence[str], rest: str) -> list[str]:
    """The operations of a replay's kernels. eager: the kernels of the eager step, in launch order, with `operations`.

    A kernel that the eager step does not launch at this place has the operation of the kernel before, or its own usual
    one where that operation has no such kernel.
    """
    usual: dict[str, Counter[str]] = defaultdict(Counter)
    for name, operation in zip(eager, operations, strict=True):
        usual[name][operation] += 1
    found = [""] * len(names)
    for a, b, size in SequenceMatcher(None, eager, names, autojunk=False).get_matching_blocks():
        found[b : b + size] = operations[a : a + size]
    for place, name in enumerate(names):
        if not found[place]:
            before, own = found[place - 1] if place else rest, usual[name]
            found[place] = before if before in own or not own else own.most_common(1)[0][0]
    return found


def delays(step: ProfiledStep) -> Iterator[tuple[DeviceSpan, float, float]]:
    """(span, gap before it, µs by which it delayed the end): they add up to the time until the last end, also where
    kernels overlap.
    """
    latest = step.begin
    for span in step.spans:
        yield span, max(0.0, span.begin - latest), max(0.0, span.end - max(span.begin, latest))
        latest = max(latest, span.end)


class RankWaits(NamedTuple):
    """What kernels that wait for other ranks take, µs of a step."""

    sending: float  # if no rank came late: of each kernel the time of the last rank to come, which waits for nobody
    waiting: tuple[float, ...]  # of each rank, for those that came later


def rank_waits(ranks: Sequence[Sequence[ProfiledStep]]) -> RankWaits | None:
    """The steps of all ranks, of which those count that all have with as many such kernels. None without any."""
    by_number = [{step.number: _waits(step) for step in steps} for steps in ranks]
    common = [[own[number] for own in by_number] for number in set.intersection(*map(set, by_number))]
    alike = [times for times in common if times[0] and len(set(map(len, times))) == 1]
    if not alike:
        return None
    least = [sum(map(min, zip(*times, strict=True))) for times in alike]
    waiting = [
        fmean(sum(times[rank]) - first for times, first in zip(alike, least, strict=True)) for rank in range(len(ranks))
    ]
    return RankWaits(fmean(least), tuple(waiting))


def _waits(step: ProfiledStep) -> list[float]:
    return [span.end - span.begin for span in step.spans if WAITS.search(span.name)]


def steps_by_kind(steps: Sequence[ProfiledStep]) -> dict[tuple[int, int], list[ProfiledStep]]:
    """The typical steps of each (rows, tokens), the most frequent kind first.

    Steps that another follows at once count alone, where there are some: the end of the others is not known. The first
    one has cold caches, so it is left out. Of the rest the middle half by time is taken.
    """
    by_kind: dict[tuple[int, int], list[ProfiledStep]] = defaultdict(list)
    for step in steps:
        by_kind[step.rows, step.tokens].append(step)
    typical = {}
    for kind, mine in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        known = [step for step in mine if step.is_followed] or mine
        rest = sorted(known[1:] if len(known) > 2 else known, key=lambda step: step.end - step.begin)
        typical[kind] = rest[len(rest) // 4 : len(rest) - len(rest) // 4]
    return typical
