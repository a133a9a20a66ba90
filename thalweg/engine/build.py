"""Puts a rank together: model, planes, slots, runner, worker, scheduler, loop."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thalweg.batch.slots import Slots
from thalweg.cache.books import Books
from thalweg.cache.radix import NoTree, RadixTree
from thalweg.config.model import ModelFacts, read_facts
from thalweg.core.errors import CheckpointError
from thalweg.core.kernels import KernelChoice
from thalweg.core.plan import PAGE
from thalweg.core.sampling import MAX_EOS_IDS
from thalweg.engine.gpu import GpuWorker
from thalweg.engine.grammars import GrammarBook
from thalweg.engine.loop import NO_RECORDER, Channel, Loop, OneRank, Worker
from thalweg.engine.recording import Ring
from thalweg.engine.settings import EngineSettings
from thalweg.engine.worker import CpuWorker, stream_for
from thalweg.layers.parts import Parts, ReferenceParts
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.base import Model
from thalweg.models.traced import Traced, traced
from thalweg.runner.runner import Runner
from thalweg.scheduler.limits import Limits
from thalweg.scheduler.scheduler import Scheduler
from thalweg.text.grammar import Compiler
from thalweg.text.tokenizer import Tokenizer
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors, fill_dummy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_runner(settings: EngineSettings, facts: ModelFacts) -> Runner:
    """Loads the checkpoint and allocates planes and slots. Raises CheckpointError."""
    torch.set_num_threads(settings.threads)
    device = torch.device(settings.device)
    model = catalog.assemble(
        facts, parts(settings.device, settings.kernels, settings.dtype, facts.fp8_block is not None)
    )
    load_weights(model, settings)
    planes = Planes(model.planes(), settings.pages + 1, device)
    if device.type == "cuda":
        return _recorded(settings, Runner(model, model, planes, Slots(settings.slots + 1, settings.context, device)))
    steps = traced(model, device)
    if isinstance(steps, Traced):
        steps.record(planes)
    return Runner(model, steps, planes, Slots(settings.slots, settings.context, device))


def parts(device: str, kernels: KernelChoice, dtype: str, fp8: bool) -> Parts:
    """What a model is made of. fp8: whether its weights stay in FP8 blocks, which the kernels of a GPU compute with."""
    if kernels.decode == "reference":
        return ReferenceParts(DTYPES[dtype], torch.device(device))
    from thalweg.layers.kernel_parts import KernelParts  # needs Triton, which a CPU installation does not have

    return KernelParts(DTYPES[dtype], torch.device(device), kernels, fp8)


def _recorded(settings: EngineSettings, runner: Runner) -> Runner:
    """The runner with its decode steps recorded as CUDA graphs; the last slot is nobody's."""
    if settings.graphs:
        from thalweg.runner.graphs import record  # needs Triton

        with _bar("recording CUDA graphs", settings.progress) as progress:
            runner.graphs = record(
                settings.graphs, settings.context, runner.model, runner.planes, runner.slots, settings.slots, progress
            )
    return runner


@contextlib.contextmanager
def _bar(text: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; gives what tells it (done, of how many)."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def load_weights(model: Model, settings: EngineSettings) -> None:
    """Fills the model from its checkpoint, or with random numbers; shows a bar. Raises CheckpointError."""
    assert isinstance(model, torch.nn.Module), "a model is a module: its parameters are what is filled"
    if settings.load_format == "dummy":
        fill_dummy(model, settings.seed)
        return
    with _bar("loading weights", settings.progress) as progress, Safetensors(Path(settings.path)) as stream:
        load(model, model.table(), stream, model.facts.fp8_block, progress)


def build_loop(settings: EngineSettings, facts: ModelFacts, runner: Runner, channel: Channel) -> Loop:
    """The brain and the loop around a runner."""
    tree = RadixTree(PAGE) if settings.radix else NoTree(PAGE)
    limits = Limits(
        slots=settings.slots,
        budget=settings.budget,
        context=settings.context,
        vocab=facts.vocab,
        eos_ids=settings.eos_ids,
        policy=settings.policy,
        seed=settings.seed,
    )
    grammars = GrammarBook(
        lambda: Compiler(Tokenizer(Path(settings.path)), facts.vocab, settings.eos_ids or facts.eos), facts.vocab
    )
    scheduler = Scheduler(limits, Books(settings.pages + 1, tree), grammars=grammars)
    worker: Worker = CpuWorker(runner, stream_for(settings.depth), grammars)
    if runner.planes.device.type == "cuda":
        worker = GpuWorker(runner, grammars)
    recorder = Ring(settings, scheduler.requests) if settings.crash_dump_folder else NO_RECORDER
    return Loop(channel, scheduler, worker, OneRank(), settings.depth, recorder)


def build(settings: EngineSettings, channel: Channel) -> tuple[Loop, Runner, ModelFacts]:
    """A whole rank. Raises CheckpointError."""
    facts = read_facts(Path(settings.path))
    if len(settings.eos_ids) > MAX_EOS_IDS:
        raise CheckpointError(
            f"{settings.path}: {len(settings.eos_ids)} end-of-sequence ids; at most {MAX_EOS_IDS} are kept a slot"
        )
    runner = build_runner(settings, facts)
    return build_loop(settings, facts, runner, channel), runner, facts
