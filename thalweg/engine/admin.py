"""Operations on a rank between two steps: weight updates, profiles, and random caches for benchmarks.

A trace has ranges for each step: "forward step 17 rows 8 tokens 8", "sample step 17 …" and, with a drafter,
"draft step 17 …". Without a profile the worker calls its runner directly.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from thalweg.core.agreement import AgreedStep
from thalweg.core.errors import CheckpointError, InvalidRequest
from thalweg.core.grammar import GrammarMasks
from thalweg.core.messages import DumpExperts, FillCache, StartProfile, StopProfile, UpdateWeights
from thalweg.core.plan import StepPlan
from thalweg.engine.recording import file_stamp, make_folder
from thalweg.engine.worker import Worker
from thalweg.memory.random_fill import fill_planes
from thalweg.models.catalog import read_facts
from thalweg.models.token_by_token import TokenByToken
from thalweg.parallel.axis import gather_number, gather_texts
from thalweg.parallel.balancer import ExpertBalancer
from thalweg.runner.runner import ForwardResult, Runner
from thalweg.sampling.sample import Sampled
from thalweg.spec.drafter import DraftOutput
from thalweg.weights.loader import check_loadable, load, quantization_of
from thalweg.weights.stream import Safetensors

log = logging.getLogger("thalweg.engine")


class ProfiledRunner(Runner):
    """A runner whose calls are ranges of a profile. It shares all state with the one that it replaces."""

    def __init__(self, runner: Runner) -> None:
        self.__dict__ = vars(runner)

    def forward(self, plan: StepPlan, agreed: AgreedStep | None = None) -> ForwardResult | None:
        with record_function(f"forward {_name(plan)}"):
            return super().forward(plan, agreed)

    def sample(self, forwarded: ForwardResult | None, masks: GrammarMasks | None = None) -> Sampled | None:
        with record_function(f"sample {_name(forwarded.plan)}" if forwarded else "sample"):
            return super().sample(forwarded, masks)

    def draft(self, forwarded: ForwardResult | None, sampled: Sampled | None, num_drafts: int) -> DraftOutput | None:
        if forwarded is None or self.drafting.is_off:
            return super().draft(forwarded, sampled, num_drafts)
        with record_function(f"draft {_name(forwarded.plan)}"):
            return super().draft(forwarded, sampled, num_drafts)


def _name(plan: StepPlan) -> str:
    return f"step {plan.step} rows {len(plan.rows)} tokens {plan.tokens}"


class AdminOperations:
    """Operations on a rank, with no step in flight. Captured steps use new weights, which are written in place."""

    def __init__(self, runner: Runner, worker: Worker) -> None:
        self.worker, self.planes, self.has_gpu = worker, runner.planes, runner.planes.device.type == "cuda"
        self.model = runner.model.model if isinstance(runner.model, TokenByToken) else runner.model
        self.drafting = runner.drafting
        self._running: tuple[profile, Runner, Path] | None = None  # profiler, the runner to put back, folder

    def update_weights(self, wish: UpdateWeights, alive: Callable[[], None]) -> Callable[[], tuple[int, int]]:
        """Reads and checks everything. The returned function writes the tensors: (replaced, total). Raises
        InvalidRequest, on all processes if one of them refuses its part.

        alive: called often while tensors are read and written.
        """
        self.worker.followers.control(wish)
        models, folder = (self.model, *self.drafting.drafter.modules()), Path(wish.path)
        pipe, device = self.model.factory.layout.pipe, self.model.factory.device
        try:
            quantization = quantization_of(folder, self.model.facts, read_facts)
            stream = Safetensors(folder)
            given = stream, quantization, lambda *_: alive()
            with stream:
                counts = [
                    check_loadable(_module(model), model.table(), *given, model is self.model and pipe.stages == 1)
                    for model in models
                ]
            problem = ""
        except (CheckpointError, OSError) as error:
            problem = f"{error}; nothing was changed"
        problems = gather_texts(self.model.factory.layout.world, problem, device)
        if problem := next(filter(None, problems), ""):
            raise InvalidRequest("model_path", problem)
        own = [sum(count) for count in zip(*counts, strict=True)]
        of_model, replaced, total = (
            int(sum(gather_number(pipe.hidden, count, device))) for count in (counts[0][0], *own)
        )
        if not of_model:  # of any stage
            raise InvalidRequest("model_path", "it holds none of the model's tensors; nothing was changed")

        def write() -> tuple[int, int]:
            for model in models:
                load(_module(model), model.table(), *given, is_partial=True)
            log.info("%d of %d tensors replaced, from %s", replaced, total, folder)
            return replaced, total

        return write

    def start_profile(self, wish: StartProfile) -> str:
        """Starts torch's profiler over the whole process. Returns what is profiled.

        Raises InvalidRequest if a profile runs already, and for a folder or an activity that is not there.
        """
        self.worker.followers.control(wish)
        if self._running is not None:
            raise InvalidRequest("", f"a profile runs already, into {self._running[2]}: POST /stop_profile ends it")
        with_gpu = wish.gpu and self.has_gpu
        if not wish.cpu and not with_gpu:
            raise InvalidRequest("activities", "there is no GPU here: only CPU can be profiled")
        folder = Path(wish.folder)
        if problem := make_folder(folder):
            raise InvalidRequest("output_dir", problem)
        profiler = profile(
            activities=[ProfilerActivity.CPU] * wish.cpu + [ProfilerActivity.CUDA] * with_gpu,
            record_shapes=wish.shapes,
            with_stack=wish.stacks,
            # on a CPU the steps run on a thread of their own, which torch would not see otherwise
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        profiler.start()
        self._running = profiler, self.worker.runner, folder
        self.worker.runner = ProfiledRunner(self.worker.runner)
        return " and ".join(["CPU"] * wish.cpu + ["GPU"] * with_gpu)

    def stop_profile(self) -> str:
        """Writes the Chrome trace and returns its path. Raises InvalidRequest if none runs or it cannot be written."""
        self.worker.followers.control(StopProfile(0))
        if self._running is None:
            raise InvalidRequest("", "no profile runs: POST /start_profile starts one")
        (profiler, self.worker.runner, folder), self._running = self._running, None
        profiler.stop()
        world = self.model.factory.layout.world
        rank = f"rank{world.rank}-" if world.size > 1 else ""
        path = folder / f"thalweg-{rank}{file_stamp()}.trace.json.gz"
        try:
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise InvalidRequest("output_dir", f"{path} could not be written: {error}") from error
        return str(path)

    def dump_experts(self, wish: DumpExperts) -> str:
        """Writes a file that `--init-expert-location` reads and returns its path. Raises InvalidRequest if experts are
        not counted, or it cannot be written.
        """
        self.worker.followers.control(wish)
        balancer, factory, facts = self.worker.runner.balancer, self.model.factory, self.model.facts
        if not isinstance(balancer, ExpertBalancer) or facts.moe is None:
            raise InvalidRequest("", "experts are not counted: start the engine with --enable-eplb")
        record = balancer.record(facts.layers, facts.moe.experts)
        path = Path(wish.folder) / f"experts-{file_stamp()}.json"
        world, problem = factory.layout.world, ""
        if world.rank == 0 and not (problem := make_folder(path.parent)):
            try:
                path.write_text(json.dumps(record))
            except OSError as error:
                problem = f"{path} could not be written: {error.strerror}"
        problem, _, written = gather_texts(world, f"{problem}\n{path}", factory.device)[0].partition("\n")
        if problem:
            raise InvalidRequest("output_dir", problem)
        return written

    def fill_cache(self, wish: FillCache) -> str:
        """Random vectors in all pages of this rank. Returns nothing to tell."""
        self.worker.followers.control(msgspec.structs.replace(wish, prompts=()))
        layout = self.model.factory.layout
        fill_planes(self.planes, wish.seed, layout.tp.rank, layout.dcp.rank)
        return ""


def _module(model: object) -> nn.Module:
    assert isinstance(model, nn.Module), "a model is a module: its parameters are replaced"
    return model
