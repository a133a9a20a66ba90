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
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import NoPrefixCache, RadixTree
from thalweg.config.engine import EngineConfig
from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError
from thalweg.core.format import format_bytes
from thalweg.core.kernels import TORCH_ATTENTION, KernelConfig
from thalweg.core.plan import PAGE
from thalweg.core.sampling import MAX_EOS_IDS
from thalweg.engine.admin import AdminOperations
from thalweg.engine.calibration_drafts import measured, planning_clock
from thalweg.engine.calibration_memory import RESERVE, Sums, free, measure, probe, provisional, settle, taken
from thalweg.engine.calibration_mixed import paced
from thalweg.engine.calibration_warmup import warm
from thalweg.engine.fallback import with_or_without
from thalweg.engine.grammars import GrammarRegistry
from thalweg.engine.loop import Channel, Loop
from thalweg.engine.recording import StepRecorder
from thalweg.engine.worker import DeviceStream, InlineStream, ThreadStream, Worker
from thalweg.kernels.tuned import TUNED
from thalweg.layers.factory import LayerFactory
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.catalog import published_dtype, read_facts
from thalweg.models.decoder import Model
from thalweg.models.token_by_token import TokenByToken
from thalweg.models.traced import TracedModel, traced
from thalweg.quant.catalog import Declared, Schemes
from thalweg.runner.drafting import DrafterError, blamed_on_drafter
from thalweg.runner.runner import Runner
from thalweg.runner.tree_graphs import forms
from thalweg.sampling.catalog import draft_sampling_for, with_acceptance_rule
from thalweg.sampling.simulated_acceptance import SimulatedAcceptance
from thalweg.scheduler.draft_length import FixedDraftLength, MeasuredDraftLength, draft_length_choices
from thalweg.scheduler.requests import Limits
from thalweg.scheduler.scheduler import Scheduler
from thalweg.spec.catalog import build_drafter
from thalweg.spec.drafter import Drafter, HasWeights
from thalweg.text.grammar import GrammarCompiler
from thalweg.text.tokenizer import Tokenizer
from thalweg.weights.cache_scales import read_cache_scales
from thalweg.weights.loader import load
from thalweg.weights.random import load_random
from thalweg.weights.stream import Safetensors, schemes_in
from thalweg.weights.update import quantization_of

log = logging.getLogger("thalweg.engine")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rank(NamedTuple):
    """What `build` makes. config: with what start-up has measured and corrected."""

    loop: Loop
    runner: Runner
    facts: ModelFacts
    config: EngineConfig


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


def build_runner(config: EngineConfig, facts: ModelFacts, phases: Phases) -> tuple[EngineConfig, Runner]:
    """Loads the checkpoint and allocates planes and slots. Raises CheckpointError, UnsupportedConfig."""
    torch.set_num_threads(config.threads)
    TUNED.use(config.tuned_kernels)
    device = torch.device(config.device)
    is_random = config.load_format == "dummy"
    schemes = None if is_random else schemes_in(Path(config.model_path), facts.quantization_config)
    factory = layer_factory(facts, config.device, config.kernels, config.dtype, schemes)
    model = catalog.assemble(facts, factory)
    phases.done("model")
    draft_sampling = draft_sampling_for(config.speculative_acceptance, config.num_drafts, facts.vocab, device)
    drafter = build_drafter(
        config.speculative_algorithm, model, config.speculative_draft_model_path, draft_sampling, config.tree
    )
    load_weights(model, drafter.modules(), config)
    load_own(drafter.own(), config)
    phases.done("weights")
    alone = config.deterministic_inference and config.decode_attention_backend in TORCH_ATTENTION
    if device.type == "cuda":
        return _on_gpu(config, TokenByToken(model) if alone else model, drafter, device, phases)
    planes = _planes(model, drafter, config, device)
    steps = traced(model, planes)
    if isinstance(steps, TracedModel):
        with blamed_on_drafter():
            drafter.record(planes)
    slots = Slots(config.max_running_requests, config.context_length, device, drafter.fields(), config.tree)
    phases.done("recorded steps")
    whole: tuple[Model, Model] = (TokenByToken(model), TokenByToken(steps)) if alone else (model, steps)
    runner = _ruled(Runner(*whole, planes, slots, drafter), config)
    return measured(taken(config, runner), runner), runner


def _on_gpu(
    config: EngineConfig, model: Model, drafter: Drafter, device: torch.device, phases: Phases
) -> tuple[EngineConfig, Runner]:
    """Compiles, measures what steps and graphs need, and gives the cache what is left. Raises UnsupportedConfig."""
    torch.cuda.synchronize(device)
    specs = *model.planes(), *drafter.planes()
    context = provisional(config, specs, device)
    first = _ruled(probe(config, model, drafter, context, device), config)
    if config.warmup:
        with _bar("running every kind of step", config.show_progress) as progress:
            warm(first, config, context, progress)
        phases.done("kernels")
    largest = msgspec.structs.replace(
        config,
        cuda_graph_bs=config.cuda_graph_bs[-1:],
        piecewise_cuda_graph_tokens=config.piecewise_cuda_graph_tokens[-1:],
        context_length=context,
        show_progress=False,
    )

    def record_largest(runner: Runner) -> int:
        _recorded(largest, runner)
        return max(-(-_recordings(config) // max(_recordings(largest), 1)), len(config.piecewise_cuda_graph_tokens))

    step, graphs, slots = measure(config, first, context, record_largest)
    del first
    sums = Sums(free(device), step, graphs, slots, RESERVE, Planes.page_cost(specs))
    config = settle(config, sums)
    phases.done("memory")
    planes = _planes(model, drafter, config, device)
    kept = Slots(config.max_running_requests + 1, config.context_length, device, drafter.fields(), config.tree)
    runner = _ruled(Runner(model, model, planes, kept, drafter), config)
    before = free(device)
    beside = int(torch.cuda.mem_get_info(device)[1]) - before - torch.cuda.memory_reserved(device)
    _recorded(config, runner)
    left = free(device)
    log.info("CUDA graphs took %s; %s were expected", format_bytes(before - left), format_bytes(graphs))
    config = taken(config, runner, step=step, graphs=before - left, mixed_step_limits=beside)
    phases.done("graphs")
    config = measured(paced(config, runner), runner)
    phases.done("times of steps")
    return config, runner


def _ruled(runner: Runner, config: EngineConfig) -> Runner:
    """Drafts are judged by the rule of this configuration, or accepted by decree."""
    sampling = with_acceptance_rule(
        runner.sampler,
        config.speculative_acceptance,
        config.speculative_relaxed_topk,
        config.speculative_relaxed_delta,
    )
    imposed = config.speculative_simulate_accept_length
    runner.sampler = SimulatedAcceptance(sampling, imposed) if imposed else sampling
    return runner


def layer_factory(
    facts: ModelFacts, device: str, kernels: KernelConfig, dtype: str, schemes: Schemes | None = None
) -> LayerFactory:
    """What makes a model's layers. schemes: of the checkpoint's weights; None goes by its configuration."""
    published = published_dtype(facts)
    if kernels.decode == "reference":
        return ReferenceLayers(DTYPES[dtype], torch.device(device), kernels=kernels, published=published)
    from thalweg.layers.kernel_layers import KernelLayers  # needs Triton, which a CPU installation does not have

    by = schemes or Declared(facts.quantization_config)
    return KernelLayers(DTYPES[dtype], torch.device(device), kernels, published=published, schemes=by)


def _recorded(config: EngineConfig, runner: Runner) -> Runner:
    """The runner with its steps recorded as CUDA graphs; the last slot is nobody's. Raises UnsupportedConfig,
    DrafterFails.
    """
    if config.cuda_graph_bs or config.piecewise_cuda_graph_tokens:
        from thalweg.runner.graphs import record  # needs Triton

        with _bar("recording CUDA graphs", config.show_progress) as progress:
            mixed = config.cuda_graph_mode == "full"
            sizes = config.cuda_graph_bs, config.piecewise_cuda_graph_tokens, mixed
            limits = config.context_length, config.max_running_requests
            record(runner, *sizes, *limits, progress, draft_length_choices(_fits(config))[1:])
    return runner


def _recordings(config: EngineConfig) -> int:
    """Whole steps that are recorded, trees too."""
    trees = forms(config.cuda_graph_bs, draft_length_choices(_fits(config)), config.tree, config.max_running_requests)
    return len(config.cuda_graph_bs) + len(trees)


def _fits(config: EngineConfig) -> int:
    """Drafts of a sequence at most, which is verified in one step."""
    return min(config.num_drafts, config.chunked_prefill_size - 1)


@contextlib.contextmanager
def _bar(text: str, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr; gives what tells it (done, of how many)."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _planes(model: Model, drafter: Drafter, config: EngineConfig, device: torch.device) -> Planes:
    """The KV cache; of an FP8 one the scales that the checkpoint has, else 1. Raises CheckpointError."""
    planes = Planes((*model.planes(), *drafter.planes()), config.num_pages + 1, device)
    if config.kv_cache_dtype == "fp8_e4m3" and config.load_format != "dummy":
        with Safetensors(Path(config.model_path)) as stream:
            read_cache_scales(model.table(), stream, planes)
    return planes


def load_weights(model: Model, besides: Sequence[HasWeights], config: EngineConfig) -> None:
    """Fills the model, and modules `besides` it, from its checkpoint, or with random numbers; shows a bar. Raises
    CheckpointError.
    """
    facts, quantization = model.facts, model.facts.quantization_config
    for module in (model, *besides):
        assert isinstance(module, torch.nn.Module), "a model is a module: its parameters are what is filled"
        if config.load_format == "dummy":
            with _bar("making weights", config.show_progress) as progress:
                load_random(module, module.table(), quantization, config.random_seed, facts.tied, progress)
        else:
            with (
                _bar("loading weights", config.show_progress) as progress,
                Safetensors(Path(config.model_path)) as stream,
            ):
                load(module, module.table(), stream, quantization, progress)
        for folder in map(Path, config.weight_updates):
            changed = quantization_of(folder, facts, read_facts)
            with _bar("replacing weights", config.show_progress) as progress, Safetensors(folder) as stream:
                load(module, module.table(), stream, changed, progress, is_partial=True)


def load_own(modules: Sequence[HasWeights], config: EngineConfig) -> None:
    """Fills what a drafter has from its own folder, and reads no other; or with random numbers. Raises CheckpointError,
    and DrafterFails where it holds what is no number: what an EAGLE-3 head makes of such weights would pass for a fault
    of the target's states.
    """
    for module in modules:
        assert isinstance(module, torch.nn.Module), "a drafter's model is a module: its parameters are what is filled"
        quantization = module.facts.quantization_config
        if config.load_format == "dummy":
            load_random(module, module.table(), quantization, config.random_seed, module.facts.tied)
            continue
        with (
            _bar("loading the drafter", config.show_progress) as progress,
            Safetensors(Path(config.speculative_draft_model_path)) as stream,
        ):
            try:
                load(module, module.table(), stream, quantization, progress)
            except CheckpointError as error:
                raise CheckpointError(f"the drafter in {config.speculative_draft_model_path}: {error}") from error
        for name, held in module.named_parameters():
            if held.dtype.itemsize > 1 and not held.sum(dtype=torch.float32).isfinite():
                raise DrafterError(f"{config.speculative_draft_model_path} holds what is no finite number, in {name}")


def build_loop(config: EngineConfig, facts: ModelFacts, runner: Runner, channel: Channel) -> Loop:
    """The brain and the loop around a runner."""
    tree = RadixTree(PAGE) if config.radix_cache else NoPrefixCache(PAGE)
    limits = Limits(
        slots=config.max_running_requests,
        budget=config.chunked_prefill_size,
        mixed_step_limits=config.mixed_step_limits or (),
        context=config.context_length,
        vocab=facts.vocab,
        eos_ids=config.eos_ids,
        policy=config.schedule_policy,
        seed=config.random_seed,
        tree=config.tree,
    )
    grammars = GrammarRegistry(
        lambda: GrammarCompiler(Tokenizer(Path(config.model_path)), facts.vocab, config.eos_ids or facts.eos),
        facts.vocab,
    )
    times = config.speculative_step_times
    widths = MeasuredDraftLength(times, planning_clock(config)) if times else FixedDraftLength(_fits(config))
    scheduler = Scheduler(limits, PageAllocator(config.num_pages + 1, tree), draft_length=widths, grammars=grammars)
    worker = Worker(runner, _stream(config), grammars)
    recorder = StepRecorder(config, scheduler.requests) if config.crash_dump_folder else None
    return Loop(channel, scheduler, worker, config.max_steps_in_flight, recorder, AdminOperations(runner, worker))


def _stream(config: EngineConfig) -> DeviceStream:
    if config.device == "cpu":
        return InlineStream() if config.max_steps_in_flight == 1 else ThreadStream()
    from thalweg.engine.cuda_stream import CudaStream

    return CudaStream()


def build(config: EngineConfig, channel: Channel) -> Rank:
    """A whole rank. Raises CheckpointError, UnsupportedConfig."""
    phases, facts = Phases(), read_facts(Path(config.model_path))
    if len(config.eos_ids) > MAX_EOS_IDS:
        raise CheckpointError(
            f"{config.model_path}: {len(config.eos_ids)} end-of-sequence ids; at most {MAX_EOS_IDS} are kept a slot"
        )
    config, runner = with_or_without(lambda wish: build_runner(wish, facts, phases), config)
    runner.drafting.forget()
    loop = build_loop(config, facts, runner, channel)
    loop.scheduler.counters.drafter_failures += config.drafter_left_out
    log.info("started: %s", phases)
    return Rank(loop, runner, facts, config)
