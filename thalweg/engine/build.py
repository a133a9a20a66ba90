"""Builds a rank: model, planes, slots, runner, worker, scheduler and loop."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Callable, NamedTuple, TypeVar

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from thalweg.batch.slots import Slots
from thalweg.cache.page_allocator import PageAllocator
from thalweg.cache.radix import NoPrefixCache, RadixTree
from thalweg.config.drafters import NO_DRAFTER
from thalweg.config.engine import EngineConfig
from thalweg.config.model import ModelFacts
from thalweg.core.errors import (
    CheckpointError,
    InsufficientMemory,
    UnsupportedConfig,
    WeightUpdateError,
    is_out_of_memory,
)
from thalweg.core.format import format_bytes
from thalweg.core.kernels import TORCH_ATTENTION, KernelConfig
from thalweg.core.report import START_UP, Decision
from thalweg.core.sampling import MAX_EOS_IDS
from thalweg.engine import caches
from thalweg.engine.admin import AdminOperations
from thalweg.engine.calibration import calibrate, planning_clock
from thalweg.engine.calibration_checks import check_backends
from thalweg.engine.calibration_memory import (
    free_memory,
    measure_memory,
    provisional_context,
    runner_without_cache,
    shared_budget,
    with_memory_report,
    with_pages,
)
from thalweg.engine.calibration_warmup import warm_up
from thalweg.engine.collectives import failure_flag, with_exchange, with_sum_and_norm
from thalweg.engine.compile_ahead import CompileAhead, NothingAhead, compile_ahead
from thalweg.engine.coordination import OWN_PLAN, Coordinator, DataParallelSteps, SingleSchedulerSteps
from thalweg.engine.follower import Follower, PlanSender
from thalweg.engine.grammars import GrammarRegistry
from thalweg.engine.group import ALONE, RankContext, timeout_of
from thalweg.engine.loop import Channel, Loop
from thalweg.engine.recording import StepRecorder
from thalweg.engine.worker import NO_FOLLOWERS, InlineStream, ThreadStream, Worker
from thalweg.kernels.tuned import TUNED
from thalweg.layers.factory import LayerFactory
from thalweg.layers.moe import ExpertStacks
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.catalog import published_dtype, read_facts
from thalweg.models.interface import Model
from thalweg.models.stages import stage_borders
from thalweg.models.token_by_token import TokenByToken
from thalweg.models.traced import TracedModel, traced
from thalweg.parallel.balancer import BalancePolicy, ExpertBalancer
from thalweg.parallel.expert_file import ExpertSizes, read_expert_location
from thalweg.parallel.layout import SINGLE_RANK, ExpertLayout, Layout
from thalweg.parallel.plan_channel import PlanReader
from thalweg.parallel.step_records import StepExchange
from thalweg.quant.catalog import Declared, Schemes
from thalweg.runner.captured import tree_shapes
from thalweg.runner.drafting import DrafterError, raise_as_drafter_error
from thalweg.runner.runner import Runner
from thalweg.sampling.catalog import draft_sampling_for, sampler_on, with_acceptance_rule
from thalweg.sampling.sharded import sharded
from thalweg.sampling.simulated_acceptance import SimulatedAcceptance
from thalweg.scheduler.draft_length import FixedDraftLength, MeasuredDraftLength, draft_length_choices
from thalweg.scheduler.plan_builder import LatencyTargets, PromptShare, WholeBudget
from thalweg.scheduler.prompt_share import CostBasedShare, StepCost
from thalweg.scheduler.requests import Limits
from thalweg.scheduler.scheduler import Scheduler
from thalweg.spec.catalog import build_drafter
from thalweg.spec.drafter import Drafter, HasWeights
from thalweg.text.grammar import GrammarCompiler
from thalweg.text.tokenizer import Tokenizer
from thalweg.weights.loader import load, quantization_of, read_cache_scales
from thalweg.weights.random import load_random
from thalweg.weights.stream import Safetensors, schemes_in

log = logging.getLogger("thalweg.engine")

BAR_COLUMNS = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
LEFT_OUT = "there is no room for the drafter, and decoding goes on without it: %s"
T = TypeVar("T")
NOTES_SHOWN = 3  # of weights that are dequantized
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Rank(NamedTuple):
    """A built rank."""

    loop: Loop
    runner: Runner
    facts: ModelFacts
    config: EngineConfig  # with what start-up measured and corrected


class StartupTimes:
    """Durations of the phases of a start, for the log."""

    def __init__(self) -> None:
        self.begun = self.last = time.monotonic()
        self.phases: list[str] = []

    def end_phase(self, name: str) -> None:
        now = time.monotonic()
        self.phases.append(f"{name} {now - self.last:.1f} s")
        log.debug("start: %s took %.2f s", name, now - self.last)
        self.last = now

    def __str__(self) -> str:
        return f"{', '.join(self.phases)}; {self.last - self.begun:.1f} s in all"


def build(config: EngineConfig, channel: Channel, rank_context: RankContext = ALONE) -> Rank:
    """Builds a rank, in the process of its scheduler. Raises CheckpointError and UnsupportedConfig."""
    times = StartupTimes()
    config, facts, runner = prepare(config, rank_context, times)
    loop = build_loop(config, facts, runner, channel, rank_context)
    loop.scheduler.counters.drafter_failures += config.drafter_left_out
    if config.log_start:
        log.info("started: %s", times)
    return Rank(loop, runner, facts, config)


def build_follower(config: EngineConfig, rank_context: RankContext) -> Follower:
    """Builds what another process of a rank runs. Raises as `build`."""
    config, _, runner = prepare(config, rank_context, StartupTimes())
    assert rank_context.member.plans is not None, "a follower has a leader"
    reader = PlanReader(rank_context.member.plans, rank_context.member.follower)
    on_cpu = config.device == "cpu"  # its steps run in this thread, so that an error is noticed in its own step
    worker = Worker(runner, InlineStream() if on_cpu else _stream(config))
    return Follower(reader, worker, AdminOperations(runner, worker), 1 if on_cpu else config.max_steps_in_flight)


def prepare(
    config: EngineConfig, rank_context: RankContext, times: StartupTimes
) -> tuple[EngineConfig, ModelFacts, Runner]:
    """The runner of this process, ready for the first step, and the configuration with what the start measured."""
    facts = read_facts(Path(config.model_path), config.index_topk_pattern)
    caches.use(config.cache_dir)
    if len(config.eos_ids) > MAX_EOS_IDS:
        raise CheckpointError(
            f"{config.model_path}: {len(config.eos_ids)} end-of-sequence ids; a slot has room for {MAX_EOS_IDS}"
        )
    if config.device == "cuda" and config.decode_attention_backend != "reference":
        from thalweg.kernels.compilations import use_stable_keys  # needs Triton

        use_stable_keys()
    wished = config
    with compile_ahead(config) as ahead:
        if ahead.is_warm:
            config = msgspec.structs.replace(config, step_times=caches.step_times(wished))
        times.end_phase("device")
        config = check_backends(config)
        times.end_phase("libraries")
        config, runner = build_or_drop_drafter(
            lambda wish: build_runner(wish, facts, times, ahead, rank_context), config
        )
    runner.drafting.drop_deferred()
    if config.enable_eplb:
        runner.balancer = _balancer(config, facts, runner)
    is_as_wished = config.kernels == wished.kernels and not config.drafter_left_out  # else another start may need more
    if config.device == "cuda" and config.warmup and is_as_wished:
        caches.mark_warm(wished, config.step_times)
    return config, facts, runner


def build_or_drop_drafter(build: Callable[[EngineConfig], T], config: EngineConfig) -> T:
    """Calls `build` with this configuration, and if the drafter fails or does not fit, with one without a drafter.

    It only accelerates, so an engine starts without a drafter that does not fit into memory, cannot be captured, or has
    weights that are NaN or infinite. Of several processes that share a model one cannot do that alone: it raises
    UnsupportedConfig.
    """
    try:
        return build(config)
    except DrafterError as error:
        why = str(error).partition("\n")[0]
        if config.copy_processes > 1:
            raise UnsupportedConfig(f"the drafter fails: {why}. Use --speculative-algorithm NONE") from error
        log.error("the drafter is left out, and decoding goes on without it: %s", error, exc_info=error.__cause__)
    except (InsufficientMemory, MemoryError, RuntimeError) as error:
        if config.speculative_algorithm == "NONE" or not is_out_of_memory(error):
            raise
        why = str(error).partition("\n")[0]
        if config.copy_processes > 1:
            raise InsufficientMemory(f"{why}. Use --speculative-algorithm NONE, which needs less") from error
        log.error(LEFT_OUT, why)
        why = f"no room for it: {why}"
    # after the except block the error's frames, and the memory that they hold, are gone
    gc.collect()
    torch.cuda.empty_cache()
    return build(without_drafter(config, why))


def without_drafter(config: EngineConfig, why: str) -> EngineConfig:
    """The configuration of plain decoding. The decisions about speculation no longer apply."""
    name = "speculative_algorithm"
    others = [key for key in config.report.current() if key.startswith("speculative_") and key != name]
    plain = {f.name: f.default for f in msgspec.structs.fields(EngineConfig) if f.name.startswith("speculative_")}
    return config.started(
        [Decision(name, "NONE", START_UP, why), *(Decision(key, None, START_UP, "no drafter") for key in others)],
        drafter_left_out=True,
        **plain,
    )


def expert_sizes(config: EngineConfig, facts: ModelFacts) -> ExpertSizes:
    """Of a model with experts."""
    assert facts.moe is not None, "experts are divided"
    groups = facts.moe.groups if config.eplb_algorithm == "deepseek_hierarchical" else 1
    experts = facts.moe.experts
    nodes = math.gcd(config.ep_size, max(config.tp_size // config.node_processes, 1))
    return ExpertSizes(facts.layers, experts, experts + config.ep_num_redundant_experts, config.ep_size, groups, nodes)


def complete_layout(layout: Layout, config: EngineConfig, facts: ModelFacts) -> Layout:
    """The layout with the places of experts, and how tokens and index heads are divided. Raises UnsupportedConfig for a
    file that does not fit.
    """
    indexer = layout.tp if config.shard_indexer else layout.indexer
    layout = replace(layout, cp_strategy=config.cp_strategy, indexer=indexer)
    if config.ep_size == 1 or facts.moe is None:
        return layout
    by_slot = read_expert_location(config.init_expert_location, expert_sizes(config, facts))
    experts = ExpertLayout(
        config.ep_num_redundant_experts, by_slot, config.enable_eplb, config.moe_a2a_backend, config.deepep_mode
    )
    return replace(layout, experts=experts)


def _balancer(config: EngineConfig, facts: ModelFacts, runner: Runner) -> ExpertBalancer:
    model = runner.model.model if isinstance(runner.model, TokenByToken) else runner.model
    parts = [part for part in (model, *runner.drafting.drafter.modules()) if isinstance(part, torch.nn.Module)]
    layers = [module for part in parts for module in part.modules() if isinstance(module, ExpertStacks)]
    sizes = expert_sizes(config, facts)
    policy = BalancePolicy(
        config.eplb_rebalance_num_iterations,
        config.eplb_rebalance_layers_per_chunk,
        config.eplb_min_rebalancing_utilization_threshold,
        sizes.groups,
        sizes.nodes,
    )
    return ExpertBalancer(layers, model.factory.layout, policy, model.factory.device)


def assemble(
    config: EngineConfig, facts: ModelFacts, device: torch.device, layout: Layout = SINGLE_RANK
) -> tuple[LayerFactory, Model, Drafter]:
    """A model and its drafter without weights. Raises CheckpointError."""
    is_random = config.load_format == "dummy"
    schemes = None if is_random else schemes_in(Path(config.model_path), facts.quantization_config)
    layout = complete_layout(layout, config, facts)
    factory = layer_factory(facts, str(device), config.kernels, config.dtype, schemes, layout)
    pipe = layout.pipe
    stages = stage_borders(facts, pipe.stages, config.pp_layer_partition)
    model = catalog.assemble(facts, factory, stages[pipe.stage])
    draft_sampling = draft_sampling_for(config.speculative_acceptance, config.num_drafts, facts.vocab, device)
    algorithm = config.speculative_algorithm if pipe.is_last else NO_DRAFTER
    drafter = build_drafter(
        algorithm,
        model,
        config.speculative_draft_model_path,
        draft_sampling,
        config.tree,
        config.index_share_for_mtp_iteration,
    )
    model.watch(pipe.of_last_stage(model.watched, facts.layers + 1, device))
    return factory, model, drafter


def build_runner(
    config: EngineConfig,
    facts: ModelFacts,
    times: StartupTimes,
    ahead: CompileAhead | NothingAhead,
    rank_context: RankContext = ALONE,
) -> tuple[EngineConfig, Runner]:
    """Loads the checkpoint and allocates planes and slots. Raises CheckpointError and UnsupportedConfig."""
    torch.set_num_threads(config.threads)
    TUNED.use(config.tuned_kernels)
    device, layout = rank_context.device or torch.device(config.device), rank_context.layout
    factory, model, drafter = assemble(config, facts, device, layout)
    times.end_phase("model")
    if factory.notes:
        shown = "; ".join(factory.notes[:NOTES_SHOWN])
        config = config.started([Decision("dequantized_weights", len(factory.notes), START_UP, shown)])
    with updated_together(layout, config):
        load_weights(model, drafter.modules(), config)
    load_drafter(drafter.own_weight_modules(), config)
    times.end_phase("weights")
    one_by_one = config.deterministic_inference and config.decode_attention_backend in TORCH_ATTENTION
    if device.type == "cuda":
        with _progress_bar("compiling kernels ahead", config.show_progress) as progress:
            ahead.finish(progress)
        times.end_phase("kernels ahead")
        steps = TokenByToken(model) if one_by_one else model
        return _build_on_gpu(config, steps, drafter, device, times, ahead.is_warm)
    rows = config.max_running_requests + (layout.world.size > 1)  # padding of drafts has a slot of its own
    planes = _allocate_planes(model, drafter, config, device, rows)
    steps = traced(model, planes)
    if isinstance(steps, TracedModel):
        with raise_as_drafter_error():
            drafter.capture(planes)
    slots = Slots(rows, config.context_length, device, drafter.fields(), config.tree, config.page_size)
    times.end_phase("captured steps")
    models: tuple[Model, Model] = (TokenByToken(model), TokenByToken(steps)) if one_by_one else (model, steps)
    runner = _with_acceptance_rule(Runner(*models, planes, slots, drafter), config)
    return calibrate(with_memory_report(config, runner), runner), runner


def _build_on_gpu(
    config: EngineConfig, model: Model, drafter: Drafter, device: torch.device, times: StartupTimes, is_warm: bool
) -> tuple[EngineConfig, Runner]:
    """Warms up, measures memory, and gives the KV cache what is left. is_warm: see `warm_up`. Raises
    UnsupportedConfig.
    """
    torch.cuda.synchronize(device)
    config = with_exchange(with_sum_and_norm(config, model, device), model, device)
    specs = *model.planes(), *drafter.planes()
    context = provisional_context(config, specs, device, model.factory.layout.world)
    first = _with_acceptance_rule(runner_without_cache(config, model, drafter, context, device), config)
    if config.warmup:
        with _progress_bar("running every kind of step", config.show_progress) as progress:
            warm_up(first, config, context, progress, is_warm)
        times.end_phase("kernels")
    largest = msgspec.structs.replace(
        config,
        cuda_graph_bs=config.cuda_graph_bs[-1:],
        piecewise_cuda_graph_tokens=config.piecewise_cuda_graph_tokens[-1:],
        context_length=context,
        show_progress=False,
    )

    def capture_largest(runner: Runner) -> int:
        _capture(largest, runner)
        return max(-(-_num_captured(config) // max(_num_captured(largest), 1)), len(config.piecewise_cuda_graph_tokens))

    budget = measure_memory(config, first, context, capture_largest)
    del first
    config = with_pages(config, shared_budget(budget._replace(free=free_memory(device)), model.factory))
    times.end_phase("memory")
    rows = config.max_running_requests + 1
    planes = _allocate_planes(model, drafter, config, device, rows)
    slots = Slots(rows, config.context_length, device, drafter.fields(), config.tree, config.page_size)
    runner = _with_acceptance_rule(Runner(model, model, planes, slots, drafter), config)
    runner.failed = failure_flag(model)
    before = free_memory(device)
    beside = int(torch.cuda.mem_get_info(device)[1]) - before - torch.cuda.memory_reserved(device)
    _capture(config, runner)
    graphs = before - free_memory(device)
    log.info("CUDA graphs took %s; %s were expected", format_bytes(graphs), format_bytes(budget.graphs))
    config = with_memory_report(config, runner, step=budget.step, graphs=graphs, beside=beside)
    times.end_phase("graphs")
    config = calibrate(config, runner)
    times.end_phase("calibration")
    return config, runner


def _with_acceptance_rule(runner: Runner, config: EngineConfig) -> Runner:
    """The runner with the configured acceptance of drafts, real or simulated."""
    rule = config.speculative_acceptance, config.speculative_relaxed_topk, config.speculative_relaxed_delta
    sampler = with_acceptance_rule(sampler_on(runner.planes.device), *rule)
    if length := config.speculative_simulate_accept_length:
        sampler = SimulatedAcceptance(sampler, length)
    runner.sampler = sharded(sampler, runner.model.shards)
    return runner


def layer_factory(
    facts: ModelFacts,
    device: str,
    kernels: KernelConfig,
    dtype: str,
    schemes: Schemes | None = None,
    layout: Layout = SINGLE_RANK,
) -> LayerFactory:
    """The factory of a model's layers. schemes: of the checkpoint's weights; None: as its configuration declares."""
    published, schemes = published_dtype(facts), schemes or Declared(facts.quantization_config)
    if kernels.decode == "reference":
        return ReferenceLayers(DTYPES[dtype], torch.device(device), kernels, layout, published, schemes=schemes)
    from thalweg.layers.kernel_layers import KernelLayers  # needs Triton, which a CPU installation does not have

    return KernelLayers(DTYPES[dtype], torch.device(device), kernels, layout, published, schemes=schemes)


def _capture(config: EngineConfig, runner: Runner) -> None:
    """Captures the steps as CUDA graphs; the last slot is for padding. Raises UnsupportedConfig and DrafterError."""
    if config.cuda_graph_bs or config.piecewise_cuda_graph_tokens:
        from thalweg.runner.graphs import capture_steps  # needs Triton

        with _progress_bar("capturing CUDA graphs", config.show_progress) as progress:
            is_full = config.cuda_graph_mode == "full"
            sizes = config.cuda_graph_bs, config.piecewise_cuda_graph_tokens, is_full
            limits = config.context_length, config.max_running_requests
            capture_steps(runner, *sizes, *limits, progress, draft_length_choices(_max_drafts(config))[1:])


def _num_captured(config: EngineConfig) -> int:
    """Captured whole steps, trees included."""
    choices = draft_length_choices(_max_drafts(config))
    return len(config.cuda_graph_bs) + len(
        tree_shapes(config.cuda_graph_bs, choices, config.tree, config.max_running_requests)
    )


def _max_drafts(config: EngineConfig) -> int:
    """Most drafts of a sequence that one step can verify."""
    return min(config.num_drafts, config.chunked_prefill_size - 1)


@contextlib.contextmanager
def _progress_bar(text: str, is_shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr where that is a terminal. Yields the function that advances it: (done, total)."""
    console = Console(stderr=True)
    is_shown &= console.is_interactive
    with Progress(*BAR_COLUMNS, console=console, disable=not is_shown, transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _allocate_planes(model: Model, drafter: Drafter, config: EngineConfig, device: torch.device, slots: int) -> Planes:
    """The KV cache, with hot sets for so many slots. An FP8 cache gets the checkpoint's scales, or 1.

    Raises CheckpointError.
    """
    specs = *model.planes(), *drafter.planes()
    planes = Planes(specs, config.num_pages + 1, device, slots, config.context_length)
    if config.kv_cache_dtype == "fp8_e4m3" and config.load_format != "dummy":
        with Safetensors(Path(config.model_path)) as stream:
            read_cache_scales(model.table(), stream, planes)
    return planes


def load_weights(model: Model, modules: Sequence[HasWeights], config: EngineConfig) -> None:
    """Fills the model, and drafter modules in its checkpoint. Raises CheckpointError, and WeightUpdateError for the
    weights that replace these.
    """
    with _raise_as_weight_update_error():  # before minutes of loading
        folders = [Path(folder) for folder in config.weight_updates]
        updates = [(quantization_of(folder, model.facts, read_facts), Safetensors(folder)) for folder in folders]
    for module in (model, *modules):
        weights = _fill(module, model.facts, Path(config.model_path), config, "loading weights")
        for quantization, update in updates:
            show = _progress_bar("replacing weights", config.show_progress)
            with _raise_as_weight_update_error(), show as progress, update as stream:
                load(weights, module.table(), stream, quantization, progress, is_partial=True)


@contextlib.contextmanager
def updated_together(layout: Layout, config: EngineConfig) -> Iterator[None]:
    """Raises WeightUpdateError on all ranks if one raises it: they start again with the starting weights together."""
    failure = None
    try:
        yield
    except WeightUpdateError as error:
        failure = error
    if config.weight_updates and layout.world.size > 1:
        failed = layout.world.all_gather(torch.tensor([failure is not None], dtype=torch.int32, device=config.device))
        if failed.any() and failure is None:
            ranks = failed.flatten().nonzero().flatten().tolist()
            raise WeightUpdateError(f"{' and '.join(f'rank {rank}' for rank in ranks)} cannot load them")
    if failure is not None:
        raise failure


@contextlib.contextmanager
def _raise_as_weight_update_error() -> Iterator[None]:
    try:
        yield
    except (CheckpointError, OSError) as error:
        raise WeightUpdateError(str(error)) from error


def load_drafter(modules: Sequence[HasWeights], config: EngineConfig) -> None:
    """Fills the modules of a drafter that has a folder of its own.

    Raises CheckpointError, and DrafterError for NaN: an EAGLE-3 head would turn it into a fault of the target's states.
    """
    folder = config.speculative_draft_model_path
    for module in modules:
        try:
            weights = _fill(module, module.facts, Path(folder), config, "loading the drafter")
        except CheckpointError as error:
            raise CheckpointError(f"the drafter in {folder}: {error}") from error
        for name, parameter in weights.named_parameters():
            if parameter.dtype.itemsize > 1 and not parameter.sum(dtype=torch.float32).isfinite():
                raise DrafterError(f"{folder}: {name} holds values that are not finite numbers")


def _fill(
    module: Model | HasWeights, facts: ModelFacts, folder: Path, config: EngineConfig, text: str
) -> torch.nn.Module:
    """Loads the parameters from `folder`, or makes random ones."""
    assert isinstance(module, torch.nn.Module), "the parameters of a module are filled"
    if config.load_format == "dummy":
        with _progress_bar("making weights", config.show_progress) as progress:
            load_random(module, module.table(), facts.quantization_config, config.random_seed, facts.tied, progress)
    else:
        with _progress_bar(text, config.show_progress) as progress, Safetensors(folder) as stream:
            load(module, module.table(), stream, facts.quantization_config, progress)
    return module


def build_loop(
    config: EngineConfig, facts: ModelFacts, runner: Runner, channel: Channel, rank_context: RankContext = ALONE
) -> Loop:
    """Builds the scheduler, the worker and the loop around a runner."""
    tree = (RadixTree if config.radix_cache else NoPrefixCache)(config.page_size)
    limits = Limits(
        slots=config.max_running_requests,
        budget=config.chunked_prefill_size,
        context=config.context_length,
        vocab=facts.vocab,
        eos_ids=config.eos_ids,
        policy=config.schedule_policy,
        seed=config.random_seed,
        tree=config.tree,
        stages=config.pp_size,
    )
    grammars = GrammarRegistry(
        lambda: GrammarCompiler(Tokenizer(Path(config.model_path)), facts.vocab, config.eos_ids or facts.eos),
        facts.vocab,
    )
    times = config.speculative_step_times
    policy = MeasuredDraftLength(times, planning_clock(config)) if times else FixedDraftLength(_max_drafts(config))
    pages, share = PageAllocator(config.num_pages + 1, tree), _prompt_share(config)
    scheduler = Scheduler(limits, pages, draft_length=policy, prompt_share=share, grammars=grammars)
    member = rank_context.member
    followers = NO_FOLLOWERS if member.plans is None else PlanSender(member.plans, timeout_of(config))
    worker = Worker(runner, _stream(config), grammars, followers)
    recorder = StepRecorder(config, scheduler.requests) if config.crash_dump_folder else None
    admin, coordinator = AdminOperations(runner, worker), _coordinator(worker, rank_context)
    experts = runner.balancer.stats
    return Loop(channel, scheduler, worker, config.max_steps_in_flight, recorder, admin, coordinator, experts)


def _coordinator(worker: Worker, rank_context: RankContext) -> Coordinator:
    layout, step_records = rank_context.layout, rank_context.member.step_records
    if layout.world.size == 1:
        return OWN_PLAN
    if step_records is None:
        return SingleSchedulerSteps(worker, layout.world.size)
    return DataParallelSteps(worker, StepExchange(step_records, layout.scheduler), layout.world.size)


def _prompt_share(config: EngineConfig) -> PromptShare:
    if config.step_times is None:
        return WholeBudget()
    targets = LatencyTargets(config.max_ttft_ms / 1000, config.max_itl_ms / 1000)
    return CostBasedShare(StepCost(config.step_times), targets, time.monotonic, config.pp_size)


def _stream(config: EngineConfig) -> InlineStream:
    if config.device == "cpu":
        return InlineStream() if config.max_steps_in_flight == 1 else ThreadStream()
    from thalweg.engine.cuda_stream import CudaStream

    return CudaStream()
