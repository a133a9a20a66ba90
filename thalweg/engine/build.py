"""Puts a rank together: model, planes, slots, runner, worker, scheduler, loop."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thalweg.batch.slots import Slots
from thalweg.cache.books import Books
from thalweg.cache.radix import NoTree, RadixTree
from thalweg.config.model import ModelFacts, read_facts
from thalweg.core.errors import CheckpointError
from thalweg.core.plan import PAGE
from thalweg.core.sampling import MAX_EOS_IDS
from thalweg.engine.grammars import GrammarBook
from thalweg.engine.loop import Channel, Loop, OneRank
from thalweg.engine.settings import EngineSettings
from thalweg.engine.worker import CpuWorker, stream_for
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
    model = catalog.build(facts, DTYPES[settings.dtype], device)
    load_weights(model, settings)
    planes = Planes(model.planes(), settings.pages + 1, device)
    steps = traced(model, device)
    if isinstance(steps, Traced):
        steps.record(planes)
    return Runner(model, steps, planes, Slots(settings.slots, settings.context, device))


def load_weights(model: Model, settings: EngineSettings) -> None:
    """Fills the model from its checkpoint, or with random numbers; shows a bar. Raises CheckpointError."""
    assert isinstance(model, torch.nn.Module), "a model is a module: its parameters are what is filled"
    if settings.load_format == "dummy":
        fill_dummy(model, settings.seed)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with (
        Progress(*columns, console=console, disable=not settings.progress) as bar,
        Safetensors(Path(settings.path)) as stream,
    ):
        task = bar.add_task("loading weights", total=None)
        load(
            model,
            model.table(),
            stream,
            model.facts.fp8_block,
            lambda done, total: bar.update(task, completed=done, total=total),
        )


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
    return Loop(channel, scheduler, CpuWorker(runner, stream_for(settings.depth), grammars), OneRank(), settings.depth)


def build(settings: EngineSettings, channel: Channel) -> tuple[Loop, Runner, ModelFacts]:
    """A whole rank. Raises CheckpointError."""
    facts = read_facts(Path(settings.path))
    if len(settings.eos_ids) > MAX_EOS_IDS:
        raise CheckpointError(
            f"{settings.path}: {len(settings.eos_ids)} end-of-sequence ids; at most {MAX_EOS_IDS} are kept a slot"
        )
    runner = build_runner(settings, facts)
    return build_loop(settings, facts, runner, channel), runner, facts
