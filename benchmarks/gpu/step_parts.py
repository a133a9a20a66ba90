"""How much of a step of verified drafts its forwards are: the target's over the known token and the drafts behind it,
the drafter's own, and what it writes of the tokens that the target has seen. What is left of a step is overhead:
gathering, accepting, drawing, publishing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from thalweg.bench.draft_shapes import ADAPTIVE, DraftShape, Row
from thalweg.bench.speculation import DecodeCase, policies_of, prompts_of
from thalweg.core import plan as plans
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.plan import StepPlan
from thalweg.core.sampling import SamplingParams
from thalweg.engine.calibration import step_clock
from thalweg.engine.local import LocalEngine
from thalweg.launch.resolved import Resolved
from thalweg.runner.graph_pool import GraphPool
from thalweg.runner.runner import CapturedSteps
from thalweg.sampling.simulated_acceptance import SimulatedAcceptance
from thalweg.spec.autoregressive import AutoregressiveDrafter

WARM_UPS, TURNS = 2, 3
TIMES = {"cuda": 20, "cpu": 4}  # without a wait; a device is waited for behind them

Call = Callable[[], object]


class Parts(NamedTuple):
    """Seconds of one step."""

    verify: float  # the target's forward, which gathers its tokens first
    draft: float  # all forwards that propose drafts, the draft head included
    learn: float  # writing the drafter's KV for the step's tokens
    simulation: float  # what simulated acceptance adds to sampling; an engine with real weights has none


class Calls:
    """The drafter's forwards, and what drew the step's tokens, in the order in which they were made, with what they
    were given.
    """

    def __init__(self) -> None:
        self.draft: list[Call] = []
        self.learn: list[Call] = []
        self.draws: list[partial[Any]] = []
        self.within = False  # one that another makes is a part of it

    def watched(self, work: Callable[..., Any], into: list[Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.within:
                return work(*args)
            into.append(partial(work, *args))
            self.within = True
            try:
                return work(*args)
            finally:
                self.within = False

        return call


@contextmanager
def watching(engine: LocalEngine) -> Iterator[Calls]:
    """Keeps what is drawn meanwhile, and what the engine's drafter computes, eagerly; of one that has no head,
    nothing.
    """
    runner, calls = engine.runner, Calls()
    drafter, graphs = runner.drafting.drafter, runner.graphs
    places: list[tuple[Any, str, list[Any]]] = [(runner.sampler, "sample_tokens", calls.draws)]
    if isinstance(drafter, AutoregressiveDrafter):
        places += [(drafter.steps, "forward", calls.draft), (drafter.head, "logits", calls.draft)]
        places.append((drafter.steps, "write_kv", calls.learn))
    runner.graphs = CapturedSteps()
    for owner, name, into in places:
        setattr(owner, name, calls.watched(getattr(owner, name), into))
    try:
        yield calls
    finally:
        for owner, name, _ in places:
            delattr(owner, name)  # what the class has is there again
        runner.graphs = graphs


@torch.inference_mode()
def parts(engine: LocalEngine, width: int) -> Parts:
    """Of the next step of all running requests, who decode, were it one with so many drafts: as many were made in the
    last one. Nothing is in flight. The requests go on in it, of which the scheduler does not hear: they are to be
    aborted.
    """
    runner, plan = engine.runner, upcoming(engine, width)
    alone = partial(seconds, engine)
    forwarded = runner.forward(plan)
    assert forwarded is not None, "there are running requests"
    verify = alone(lambda: runner.forward(plan))
    with watching(engine) as calls:
        eager = replace(forwarded, graph=None)
        runner.draft(eager, runner.sample(eager), width)
    made = recorded if engine.config.device == "cuda" else together
    lists: list[list[Call]] = [calls.draft, calls.learn, [*calls.draws]]
    draft, learn, draws = (alone(made(some)) if some else 0.0 for some in lists)
    if not isinstance(runner.sampler, SimulatedAcceptance):
        return Parts(verify, draft, learn, 0.0)
    judged = runner.sampler.sampler
    plain: list[Call] = [partial(judged.sample_tokens, *draw.args) for draw in calls.draws]
    return Parts(verify, draft, learn, max(draws - alone(made(plain)), 0.0) if plain else 0.0)


def upcoming(engine: LocalEngine, width: int) -> StepPlan:
    """The next step of the running requests, each with so many drafts."""
    scheduler = engine.loop.scheduler
    rows = [plans.Row(r.uid, r.slot, r.num_tokens - 1, 1 + width, width, True) for r in scheduler.live.values()]
    reach = max(row.start + row.n for row in rows)
    return StepPlan(scheduler.step, scheduler.last_committed_step, tuple(rows), num_drafts=width, max_kv_len=reach)


def seconds(engine: LocalEngine, work: Call) -> float:
    """Of the work, done many times without a wait between them: of the device where there is one."""
    now, cuda, times = step_clock(engine.config), engine.config.device == "cuda", TIMES[engine.config.device]
    for _ in range(WARM_UPS):
        work()
    found = []
    for _ in range(TURNS):
        if cuda:
            torch.cuda.synchronize()
        begun = now()
        for _ in range(times):
            work()
        if cuda:
            torch.cuda.synchronize()
        found.append((now() - begun) / times)
    return min(found)


def together(calls: list[Call]) -> Call:
    """All of them, one after the other."""

    def work() -> None:
        for call in calls:
            call()

    return work


def recorded(calls: list[Call]) -> Call:
    """The same as one CUDA graph; as they are where they cannot be recorded, since they upload lengths, as those of
    trees do.
    """
    work, tape = together(calls), GraphPool()
    try:
        with tape.running("forwards alone"):
            for _ in range(WARM_UPS):
                work()
            tape.begin()
            work()
            replay: Call = tape.end().replay
    except UnsupportedConfig:
        return work
    return replay


SETTLED = 2  # steps behind the last prompt, in which drafts are made


def overhead(engine: LocalEngine, prompts: Sequence[Sequence[int]], case: DecodeCase, width: int, step: float) -> Row:
    """Seconds of a step in the target's forward, in the drafter's, in what it learns, and in none of them. step:
    seconds of a whole one.
    """
    params = SamplingParams(temperature=0.0, max_tokens=engine.context - case.input, ignore_eos=True)
    waiting = {uid for prompt in prompts for uid in engine.submit(prompt, params)}
    uids, further = tuple(waiting), SETTLED
    while further and not engine.idle:
        waiting -= {one.uid for one in engine.step()}
        further -= not waiting
    engine.loop.commit_until(0)
    if not engine.loop.scheduler.live:  # the context has no room for more
        return {}
    found = parts(engine, width)
    engine.abort(uids)
    while not engine.idle:
        engine.step()
    told: Row = {f"{name}_seconds": seconds for name, seconds in found._asdict().items()}
    return told | {"overhead_seconds": step - sum(found)}


def add_overhead(
    shape: DraftShape, resolved: Resolved, engine: LocalEngine, cases: Sequence[DecodeCase], rows: Sequence[Row]
) -> None:
    """Where a step's time goes, into the rows of these cases whose width is a number."""
    policies = policies_of(shape, engine)
    for case in cases:
        prompts = prompts_of(resolved, case)
        for row in rows:
            width, step = row["width"], row["step_latency"]
            here = (row["shape"], row["batch_size"], row["input_len"]) == (shape.name, case.batch, case.input)
            if here and isinstance(width, int) and isinstance(step, float) and step and width != ADAPTIVE:
                engine.loop.scheduler.draft_length = policies[width]
                row.update(overhead(engine, prompts, case, width, step))
