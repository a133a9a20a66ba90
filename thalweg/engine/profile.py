"""A profile of some steps: torch's profiler over the whole engine process, written as a Chrome trace.

In it every step stands twice under its name: "A step 17 rows 8 tokens 8" is prepare → forward → logits, "B step 17 …"
accept → publish. Without a profile nothing of this is there: the worker calls its runner itself.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from thalweg.core.errors import InvalidRequest
from thalweg.core.grammar import GrammarMasks
from thalweg.core.messages import StartProfile
from thalweg.core.plan import Output, StepPlan
from thalweg.engine.worker import Halves
from thalweg.runner.runner import ForwardResult, StepResult


class Hands(Protocol):
    """A worker, which calls A and B of `runner`."""

    runner: Halves


class Named:
    """A and B of `runner`, under the step's name."""

    def __init__(self, runner: Halves) -> None:
        self.runner = runner

    def forward(self, plan: StepPlan) -> ForwardResult | None:
        with record_function(f"A {_name(plan)}"):
            return self.runner.forward(plan)

    def sample(
        self, forwarded: ForwardResult | None, masks: GrammarMasks | None = None, width: int = 0
    ) -> StepResult | None:
        if forwarded is None:
            return self.runner.sample(forwarded, masks, width)
        with record_function(f"B {_name(forwarded.plan)}"):
            return self.runner.sample(forwarded, masks, width)

    def outputs(self, published: StepResult | None) -> tuple[Output, ...]:
        return self.runner.outputs(published)


def _name(plan: StepPlan) -> str:
    return f"step {plan.step} rows {len(plan.rows)} tokens {sum(row.n for row in plan.rows)}"


@dataclass(frozen=True, slots=True)
class _Running:
    profile: profile
    runner: Halves
    folder: Path


class Profiler:
    """One profile at a time, between steps. gpu: whether there is one to watch."""

    def __init__(self, hands: Hands, gpu: bool) -> None:
        self.hands, self.gpu = hands, gpu
        self._running: _Running | None = None

    def start(self, wish: StartProfile) -> str:
        """Says what is watched. Raises InvalidRequest where one runs, and for a folder or an activity that is not
        there.
        """
        if self._running is not None:
            raise InvalidRequest("", f"a profile runs already, into {self._running.folder}: POST /stop_profile ends it")
        if not wish.cpu and not (wish.gpu and self.gpu):
            raise InvalidRequest("activities", "there is no GPU here: CPU is all that can be watched")
        folder = Path(wish.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest("output_dir", f"{folder}: {error.strerror}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InvalidRequest("output_dir", f"{folder}: may not be written to")
        watched = [ProfilerActivity.CPU] * wish.cpu + [ProfilerActivity.CUDA] * (wish.gpu and self.gpu)
        made = profile(
            activities=watched,
            record_shapes=wish.shapes,
            with_stack=wish.stacks,
            # on a CPU the steps run on a thread of their own, which torch would not see otherwise
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        made.start()
        self._running = _Running(made, self.hands.runner, folder)
        self.hands.runner = Named(self.hands.runner)
        return " and ".join(one.name.replace("CUDA", "GPU") for one in watched)

    def stop(self) -> str:
        """Writes the trace; its path. Raises InvalidRequest where none runs, and where the trace cannot be written."""
        if self._running is None:
            raise InvalidRequest("", "no profile runs: POST /start_profile starts one")
        running, self._running = self._running, None
        self.hands.runner = running.runner
        running.profile.stop()
        now = time.time()
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
        path = running.folder / f"thalweg-{stamp}-{int(now * 1e6) % 10**6:06}-{os.getpid()}.trace.json.gz"
        try:
            running.profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise InvalidRequest("output_dir", f"{path} could not be written: {error}") from error
        return str(path)
