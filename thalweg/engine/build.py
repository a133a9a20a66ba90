"""Puts a rank together: model, planes, slots, runner, worker, scheduler, loop."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Callable, NamedTuple

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thalweg.batch.slots import Slots
from thalweg.cache.books import Books
from thalweg.cache.radix import NoTree, RadixTree
from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError
from thalweg.core.format import format_bytes
from thalweg.core.kernels import TORCH_ATTENTION, KernelConfig
from thalweg.core.plan import PAGE
from thalweg.core.sampling import MAX_EOS_IDS
from thalweg.engine.gpu import GpuWorker
from thalweg.engine.grammars import GrammarBook
from thalweg.engine.loop import NO_RECORDER, Channel, Loop, OneRank
from thalweg.engine.memory import RESERVE, Sums, free, measure, probe, provisional, settle
from thalweg.engine.pace import paced
from thalweg.engine.recording import Ring
from thalweg.engine.roomless import with_or_without
from thalweg.engine.settings import EngineSettings
from thalweg.engine.taken import taken
from thalweg.engine.warm import warm
from thalweg.engine.widths import measured, planning_clock
from thalweg.engine.worker import CpuWorker, stream_for
from thalweg.engine.workshop import Workshop
from thalweg.kernels.tuned import TUNED
from thalweg.layers.interface import LayerFactory
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.catalog import published_dtype, read_facts
from thalweg.models.compiled import compile_parts
from thalweg.models.decoder import Model
from thalweg.models.token_by_token import TokenByToken
from thalweg.models.traced import Traced, traced
from thalweg.quant.catalog import Declared, Schemes
from thalweg.runner.drafting import DrafterFails, blamed_on_drafter
from thalweg.runner.runner import Runner
from thalweg.runner.tree_graphs import forms
from thalweg.sampling.catalog import drawing_for, ruled
from thalweg.sampling.imposed import Imposed
from thalweg.scheduler.limits import Limits
from thalweg.scheduler.scheduler import Scheduler
from thalweg.scheduler.widths import ConstantWidth, MeasuredWidth, choices
from thalweg.spec.catalog import build_drafter
from thalweg.spec.drafter import Drafter, Weighted
from thalweg.text.grammar import Compiler
from thalweg.text.tokenizer import Tokenizer
from thalweg.weights.cache_scales import read_cache_scales
from thalweg.weights.loader import load
from thalweg.weights.random import load_random
from thalweg.weights.stream import Safetensors, schemes_in
from thalweg.weights.update import quantization_of

log = logging.getLogger("thalweg.engine")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rank(NamedTuple):
    """What `build` makes. settings: those it was given, with what the engine has decided itself."""

    loop: Loop
    runner: Runner
    facts: ModelFacts
    settings: EngineSettings


class Phases:
    """Where the time of a start goes."""

    def __init__(self) -> None:
        self.begun = self.last = time.monotonic()
        self.words: list[str] = []

    def done(self, name: str) -> None:
        now = time.monotonic()
        self.words.append(f"{name} {now - self.last:.1f} s")
        self.last = now

    def __str__(self) -> str:
        return f"{', '.join(self.words)}; {self.last - self.begun:.1f} s in all"


def build_runner(settings: EngineSettings, facts: ModelFacts, phases: Phases) -> tuple[EngineSettings, Runner]:
    """Loads the checkpoint and allocates planes and slots. Raises CheckpointError, UnsupportedConfig."""
    torch.set_num_threads(settings.threads)
    TUNED.use(settings.tuned)
    device = torch.device(settings.device)
    is_random = settings.load_format == "dummy"
    schemes = None if is_random else schemes_in(Path(settings.path), facts.quantization_config)
    factory = layer_factory(facts, settings.device, settings.kernels, settings.dtype, schemes)
    model = catalog.assemble(facts, factory)
    phases.done("model")
    drawing = drawing_for(settings.acceptance, settings.width, facts.vocab, device)
    drafter = build_drafter(settings.drafter, model, settings.drafter_path, drawing, settings.tree)
    load_weights(model, drafter.modules(), settings)
    load_own(drafter.own(), settings)
    phases.done("weights")
    if settings.torch_compile:
        compile_parts(model)
        phases.done("torch.compile")
    alone = settings.kernels.deterministic and settings.kernels.decode in TORCH_ATTENTION
    if device.type == "cuda":
        return _on_gpu(settings, TokenByToken(model) if alone else model, drafter, device, phases)
    planes = _planes(model, drafter, settings, device)
    steps = model if settings.torch_compile else traced(model, device)
    if isinstance(steps, Traced):
        steps.record(planes)
        with blamed_on_drafter():
            drafter.record(planes)
    slots = Slots(settings.slots, settings.context, device, drafter.fields(), settings.tree)
    phases.done("recorded steps")
    whole: tuple[Model, Model] = (TokenByToken(model), TokenByToken(steps)) if alone else (model, steps)
    runner = _ruled(Runner(*whole, planes, slots, drafter), settings)
    return measured(taken(settings, runner), runner), runner


def _on_gpu(
    settings: EngineSettings, model: Model, drafter: Drafter, device: torch.device, phases: Phases
) -> tuple[EngineSettings, Runner]:
    """Compiles, measures what steps and graphs need, and gives the cache what is left. Raises UnsupportedConfig."""
    torch.cuda.synchronize(device)
    specs = *model.planes(), *drafter.planes()
    context = provisional(settings, specs, device)
    first = _ruled(probe(settings, model, drafter, context, device), settings)
    if settings.warm:
        with _bar("running every kind of step", settings.progress) as progress:
            warm(first, settings, context, progress)
        phases.done("kernels")
    largest = msgspec.structs.replace(
        settings, graphs=settings.graphs[-1:], pieces=settings.pieces[-1:], context=context, progress=False
    )

    def record_largest(runner: Runner) -> int:
        _recorded(largest, runner)
        return max(-(-_recordings(settings) // max(_recordings(largest), 1)), len(settings.pieces))

    step, graphs, slots = measure(settings, first, context, record_largest)
    del first
    sums = Sums(free(device), step, graphs, slots, RESERVE, Planes.page_cost(specs))
    settings = settle(settings, sums)
    phases.done("memory")
    planes = _planes(model, drafter, settings, device)
    kept = Slots(settings.slots + 1, settings.context, device, drafter.fields(), settings.tree)
    runner = _ruled(Runner(model, model, planes, kept, drafter), settings)
    before = free(device)
    beside = int(torch.cuda.mem_get_info(device)[1]) - before - torch.cuda.memory_reserved(device)
    _recorded(settings, runner)
    left = free(device)
    log.info("CUDA graphs took %s; %s were expected", format_bytes(before - left), format_bytes(graphs))
    settings = taken(settings, runner, step=step, graphs=before - left, beside=beside)
    phases.done("graphs")
    settings = measured(paced(settings, runner), runner)
    phases.done("times of steps")
    return settings, runner


def _ruled(runner: Runner, settings: EngineSettings) -> Runner:
    """Drafts are judged by the rule of these settings, or accepted by decree."""
    sampling = ruled(runner.sampling, settings.acceptance, *settings.relaxed)
    runner.sampling = Imposed(sampling, settings.imposed) if settings.imposed else sampling
    return runner


def layer_factory(
    facts: ModelFacts, device: str, kernels: KernelConfig, dtype: str, schemes: Schemes | None = None
) -> LayerFactory:
    """What makes a model's layers. schemes: of the checkpoint's weights; None goes by its configuration."""
    published = published_dtype(facts)
    if kernels.decode == "reference":
        return ReferenceLayers(DTYPES[dtype], torch.device(device), choice=kernels, published=published)
    from thalweg.layers.kernel_layers import KernelLayers  # needs Triton, which a CPU installation does not have

    by = schemes or Declared(facts.quantization_config)
    return KernelLayers(DTYPES[dtype], torch.device(device), kernels, by, published=published)


def _recorded(settings: EngineSettings, runner: Runner) -> Runner:
    """The runner with its steps recorded as CUDA graphs; the last slot is nobody's. Raises UnsupportedConfig, DrafterFails."""
    if settings.graphs or settings.pieces:
        from thalweg.runner.graphs import record  # needs Triton

        with _bar("recording CUDA graphs", settings.progress) as progress:
            sizes = settings.graphs, settings.pieces, settings.mixed_graphs
            record(runner, *sizes, settings.context, settings.slots, progress, choices(_fits(settings))[1:])
    return runner


def _recordings(settings: EngineSettings) -> int:
    """Whole steps that are recorded, trees too."""
    trees = forms(settings.graphs, choices(_fits(settings)), settings.tree, settings.slots)
    return len(settings.graphs) + len(trees)


def _fits(settings: EngineSettings) -> int:
    """Drafts of a sequence at most, which is verified in one step."""
    return min(settings.width, settings.budget - 1)


@contextlib.contextmanager
def _bar(text: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; gives what tells it (done, of how many)."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _planes(model: Model, drafter: Drafter, settings: EngineSettings, device: torch.device) -> Planes:
    """The KV cache; of an FP8 one the scales that the checkpoint has, else 1. Raises CheckpointError."""
    planes = Planes((*model.planes(), *drafter.planes()), settings.pages + 1, device)
    if settings.kernels.kv == "fp8_e4m3" and settings.load_format != "dummy":
        with Safetensors(Path(settings.path)) as stream:
            read_cache_scales(model.table(), stream, planes)
    return planes


def load_weights(model: Model, besides: Sequence[Weighted], settings: EngineSettings) -> None:
    """Fills the model, and modules `besides` it, from its checkpoint, or with random numbers; shows a bar. Raises CheckpointError."""
    facts, config = model.facts, model.facts.quantization_config
    for module in (model, *besides):
        assert isinstance(module, torch.nn.Module), "a model is a module: its parameters are what is filled"
        if settings.load_format == "dummy":
            with _bar("making weights", settings.progress) as progress:
                load_random(module, module.table(), config, settings.seed, facts.tied, progress)
        else:
            with _bar("loading weights", settings.progress) as progress, Safetensors(Path(settings.path)) as stream:
                load(module, module.table(), stream, config, progress)
        for folder in map(Path, settings.updates):
            changed = quantization_of(folder, facts, read_facts)
            with _bar("replacing weights", settings.progress) as progress, Safetensors(folder) as stream:
                load(module, module.table(), stream, changed, progress, is_partial=True)


def load_own(modules: Sequence[Weighted], settings: EngineSettings) -> None:
    """Fills what a drafter has from its own folder, and reads no other; or with random numbers. Raises CheckpointError, and DrafterFails where it
    holds what is no number: what an EAGLE-3 head makes of such weights would pass for a fault of the target's states."""
    for module in modules:
        assert isinstance(module, torch.nn.Module), "a drafter's model is a module: its parameters are what is filled"
        config = module.facts.quantization_config
        if settings.load_format == "dummy":
            load_random(module, module.table(), config, settings.seed, module.facts.tied)
            continue
        with (
            _bar("loading the drafter", settings.progress) as progress,
            Safetensors(Path(settings.drafter_path)) as stream,
        ):
            try:
                load(module, module.table(), stream, config, progress)
            except CheckpointError as error:
                raise CheckpointError(f"the drafter in {settings.drafter_path}: {error}") from error
        for name, held in module.named_parameters():
            if held.dtype.itemsize > 1 and not held.sum(dtype=torch.float32).isfinite():
                raise DrafterFails(f"{settings.drafter_path} holds what is no finite number, in {name}")


def build_loop(settings: EngineSettings, facts: ModelFacts, runner: Runner, channel: Channel) -> Loop:
    """The brain and the loop around a runner."""
    tree = RadixTree(PAGE) if settings.radix else NoTree(PAGE)
    limits = Limits(
        slots=settings.slots,
        budget=settings.budget,
        beside=settings.beside or (),
        context=settings.context,
        vocab=facts.vocab,
        eos_ids=settings.eos_ids,
        policy=settings.policy,
        seed=settings.seed,
        tree=settings.tree,
    )
    grammars = GrammarBook(
        lambda: Compiler(Tokenizer(Path(settings.path)), facts.vocab, settings.eos_ids or facts.eos), facts.vocab
    )
    widths = (
        MeasuredWidth(settings.times, planning_clock(settings)) if settings.times else ConstantWidth(_fits(settings))
    )
    scheduler = Scheduler(limits, Books(settings.pages + 1, tree), widths=widths, grammars=grammars)
    on_gpu = runner.planes.device.type == "cuda"
    worker = GpuWorker(runner, grammars) if on_gpu else CpuWorker(runner, stream_for(settings.depth), grammars)
    recorder = Ring(settings, scheduler.requests) if settings.crash_dump_folder else NO_RECORDER
    return Loop(channel, scheduler, worker, OneRank(), settings.depth, recorder, Workshop(runner, worker))


def build(settings: EngineSettings, channel: Channel) -> Rank:
    """A whole rank. Raises CheckpointError, UnsupportedConfig."""
    phases, facts = Phases(), read_facts(Path(settings.path))
    if len(settings.eos_ids) > MAX_EOS_IDS:
        raise CheckpointError(
            f"{settings.path}: {len(settings.eos_ids)} end-of-sequence ids; at most {MAX_EOS_IDS} are kept a slot"
        )
    settings, runner = with_or_without(lambda wish: build_runner(wish, facts, phases), settings)
    runner.drafting.forget()
    loop = build_loop(settings, facts, runner, channel)
    loop.scheduler.tally.drafter_failures += settings.left_out
    log.info("started: %s", phases)
    return Rank(loop, runner, facts, settings)
