"""Start-up calibration of GPU memory: the KV cache gets what is free once weights, compiled kernels and libraries are
loaded, less what a step and the CUDA graphs take, which is measured, less a reserve.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from typing import Callable, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.batch.slots import Slots
from thalweg.config.engine import EngineConfig
from thalweg.core.errors import InsufficientMemory
from thalweg.core.format import format_bytes
from thalweg.core.kernels import TORCH_ATTENTION
from thalweg.core.plan import StepPlan
from thalweg.core.report import START_UP, Decision
from thalweg.engine import calibration_plans as plans
from thalweg.engine.calibration import run_step
from thalweg.layers.factory import LayerFactory
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models.interface import Model
from thalweg.models.token_by_token import TokenByToken
from thalweg.parallel.axis import SINGLE, Axis, gather_number
from thalweg.runner.runner import Runner
from thalweg.spec.drafter import Drafter

log = logging.getLogger("thalweg.engine")

REFERENCE_CONTEXT = 8192  # tokens
RESERVE = 1 << 30  # bytes that stay free for fragmentation and for other users of the GPU
PLAUSIBLE = 64 << 20  # driver bytes of one captured bucket that are believed at once; a kernel takes a few kB
CAPTURES = 3  # of a bucket that seems to take more: other processes change the device's free memory too


class MemoryBudget(NamedTuple):
    """Bytes of a GPU."""

    free: int  # beside the weights
    step: int  # of the largest step while it runs
    graphs: int  # expected, of the CUDA graphs
    slots: int
    reserve: int
    page: int  # of a page in all planes on the device
    most: int = sys.maxsize  # pages that host memory has room for

    @property
    def left(self) -> int:
        """For pages other than the null page."""
        return self.free - self.step - self.graphs - self.slots - self.reserve - self.page

    @property
    def pages(self) -> int:
        return max(min(self.left // self.page, self.most), 0)

    def __str__(self) -> str:
        uses = (self.step, "a step"), (self.graphs, "graphs"), (self.slots, "slots"), (self.reserve, "reserve")
        parts = " - ".join(f"{format_bytes(count)} {name}" for count, name in uses)
        return (
            f"({format_bytes(self.free)} free beside the weights - {parts}) / {format_bytes(self.page)} a page ="
            f" {self.left // self.page}"
            + (f", and host memory has room for {self.most}" if self.most < self.left // self.page else "")
        )


def shared_budget(budget: MemoryBudget, factory: LayerFactory) -> MemoryBudget:
    """The budget with which every rank has room: all of them hold as many pages."""
    world, device = factory.layout.world, factory.device
    free, step, graphs = (gather_number(world, value, device) for value in (budget.free, budget.step, budget.graphs))
    return budget._replace(free=int(min(free)), step=int(max(step)), graphs=int(max(graphs)))


class GraphMemory(NamedTuple):
    """Bytes that capturing the largest bucket took."""

    pool: int  # of torch, shared by all buckets
    driver: int  # of the driver, for each bucket

    def predict(self, buckets: int) -> int:
        return self.pool + buckets * self.driver


def free_memory(device: torch.device) -> int:
    """Bytes that the driver could allocate now."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def provisional_context(
    config: EngineConfig, specs: tuple[PlaneSpec, ...], device: torch.device, world: Axis = SINGLE
) -> int:
    """The longest possible context, before other uses of memory are known; the same on all ranks."""
    if config.num_pages:
        return config.context_length
    free = int(min(gather_number(world, free_memory(device), device)))
    return max(min(config.context_length, free // Planes.page_cost(specs) * config.page_size), 1)


def runner_without_cache(
    config: EngineConfig, model: Model, drafter: Drafter, context: int, device: torch.device
) -> Runner:
    """A runner whose rows are all padding, which needs the null page only."""
    requests = config.max_running_requests + 1
    planes = Planes((*model.planes(), *drafter.planes()), 1, device, requests, context)
    slots = Slots(requests, context, device, drafter.fields(), config.tree, config.page_size)
    return Runner(model, model, planes, slots, drafter)


def measure_memory(
    config: EngineConfig, runner: Runner, context: int, capture: Callable[[Runner], int]
) -> MemoryBudget:
    """The budget of a runner without a cache.

    capture: captures the largest bucket and returns how many there will be; 0: there are no graphs.
    """
    device = runner.planes.device
    step = _measure_step(config, runner, context, device)
    graphs = _measure_graphs(runner, capture, device, runner.model.factory.layout.world)
    slots, specs = runner.slots.nbytes + runner.planes.slots_nbytes, runner.planes.specs
    host_page = Planes.page_cost(specs, in_host=True)
    most = config.hisparse_host_memory // host_page - 1 if host_page else sys.maxsize
    return MemoryBudget(0, step, graphs, slots, RESERVE, Planes.page_cost(specs), most)


def _measure_step(config: EngineConfig, runner: Runner, context: int, device: torch.device) -> int:
    free_memory(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        for step_runner, plan in _largest_steps(config, runner, context):
            run_step(step_runner, plan, config.num_drafts)
    except torch.cuda.OutOfMemoryError as error:
        raise InsufficientMemory(
            f"memory: a step of {config.chunked_prefill_size} tokens and {config.max_running_requests} requests does"
            " not fit beside the weights; use a smaller --chunked-prefill-size or --max-running-requests"
        ) from error
    return int(torch.cuda.max_memory_reserved(device)) - before + _hidden_bytes(config, runner.model)


def _largest_steps(config: EngineConfig, runner: Runner, context: int) -> Iterator[tuple[Runner, StepPlan]]:
    """The steps that take most memory, and the runner of each."""
    slots, budget, model = config.max_running_requests, config.chunked_prefill_size, runner.model
    decoding = min(slots, budget)
    if isinstance(model, TokenByToken):
        # one token, by the inner model because padding would see no context here; and the sampling of all rows
        inner = Runner(model.model, model.model, runner.planes, runner.slots)
        yield inner, plans.plan([(context - 1, 1, True)])
        yield runner, plans.plan([(context - 1, 1, True)] * decoding, plans.ALL_NEEDS)
    elif config.decode_attention_backend in TORCH_ATTENTION:
        # Prompts take minutes over long contexts, and their score tiles are as large over short ones. But gathered KV
        # is as long as the context: of all decoding rows together, and of a prompt, whose tiles then have few tokens.
        for plan in plans.largest_steps(slots, budget, min(context, REFERENCE_CONTEXT), config.num_drafts):
            yield runner, plan
        n = min(plans.DENSE, context, budget - decoding + 1)
        if context > REFERENCE_CONTEXT:
            yield runner, plans.plan([(context - 1, 1, True)] * (decoding - 1) + [(context - n, n, True)])
    else:
        for plan in plans.largest_steps(slots, budget, context, config.num_drafts):
            yield runner, plan
        indexer = model.facts.indexer  # contexts of which it chooses are not expanded, shorter ones are
        for reach in {context, context if indexer is None else min(context, indexer.topk)}:
            for plan in plans.cached_prompts(slots, budget, reach):
                yield runner, plan


def _hidden_bytes(config: EngineConfig, model: Model) -> int:
    """Hidden states of a step whose tokens are computed one by one: first apart, then together."""
    if not isinstance(model, TokenByToken):
        return 0
    return 2 * config.chunked_prefill_size * model.facts.hidden * model.factory.dtype.itemsize


def _measure_graphs(
    runner: Runner, capture: Callable[[Runner], int], device: torch.device, world: Axis = SINGLE
) -> int:
    buckets = capture(runner)
    if not buckets:
        return 0
    # The first capture includes what all captures need once, so a later one is measured. All are kept alive: the driver
    # would reuse the memory of a freed one.
    captured = [(runner.forward_model, runner.graphs)]
    measured: list[GraphMemory] = []
    while not measured or (measured[-1].driver > PLAUSIBLE and len(measured) < CAPTURES):
        before, reserved = free_memory(device), torch.cuda.memory_reserved(device)
        capture(runner)
        captured.append((runner.forward_model, runner.graphs))
        pool = torch.cuda.memory_reserved(device) - reserved
        driver = gather_number(world, max(before - free_memory(device) - pool, 0), device)
        measured.append(GraphMemory(pool, int(max(driver))))  # all ranks capture as often
    runner.disable_graphs()
    return min(measured, key=lambda memory: memory.driver).predict(buckets)


def with_pages(config: EngineConfig, budget: MemoryBudget) -> EngineConfig:
    """The configuration with pages and context from the budget. Values that the user set stay.

    Raises InsufficientMemory.
    """
    pages, context = config.num_pages or budget.pages, config.context_length
    if config.num_pages and config.num_pages * budget.page > budget.left + budget.reserve:
        raise InsufficientMemory(
            f"memory: {config.num_pages} pages do not fit: {budget}, and"
            f" {(budget.left + budget.reserve) // budget.page} without a reserve; use --max-total-tokens"
            f" {max(budget.pages, 1) * config.page_size}, or leave --mem-fraction-static and --max-total-tokens to the"
            " engine"
        )
    if pages < 1:
        raise InsufficientMemory(
            f"memory: {budget}: no page is left for the KV cache; use a smaller --chunked-prefill-size,"
            " --max-running-requests or --cuda-graph-max-bs, or a GPU with more memory"
        )
    tokens = pages * config.page_size
    if config.min_context_length > tokens:
        raise InsufficientMemory(
            f"context_length: {config.min_context_length} is more than the KV cache holds: {budget}; use at most"
            f" {tokens}"
        )
    decisions = []
    if not config.num_pages:
        decisions.append(Decision("max_total_tokens", tokens, START_UP, f"{config.page_size} tokens a page: {budget}"))
        if context > tokens:
            decisions.append(Decision("context_length", tokens, START_UP, "what the KV cache holds"))
    log.info("memory: %s%s", budget, f"; {config.num_pages} were asked for" if config.num_pages else "")
    return config.started(decisions, max_total_tokens=tokens, context_length=min(context, tokens))


# On a CPU there are no graphs and nothing is set aside for steps.
REASONS = {
    "weights": "measured: the loaded model, drafter included",
    "kv": "measured: all planes, the null page included",
    "slots": "measured: state of the requests",
    "step": "measured: the largest step while it ran",
    "graphs": "measured: all CUDA graphs",
    "beside": "measured: the rest of the GPU's used memory: the driver's context, compiled kernels, libraries",
}


def with_memory_report(config: EngineConfig, runner: Runner, **others: int) -> EngineConfig:
    """The configuration with a report of bytes in use, which `thalweg plan --check` compares with its prediction."""
    model, slots, drafter = runner.model, runner.slots, runner.drafting.drafter
    inner = model.model if isinstance(model, TokenByToken) else model
    modules = [
        module for module in (inner, *drafter.modules(), *drafter.own_weight_modules()) if isinstance(module, nn.Module)
    ]
    sizes = {
        "weights": _bytes([tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]),
        "kv": _bytes(list(runner.planes.bytes.values())),
        "slots": _bytes(
            [value for value in (*vars(slots).values(), *slots.extra.values()) if isinstance(value, Tensor)]
        )
        + runner.planes.slots_nbytes,
        **others,
    }
    return config.started(Decision(f"memory_{name}", size, START_UP, REASONS[name]) for name, size in sizes.items())


def _bytes(tensors: list[Tensor]) -> int:
    """Bytes of the tensors; memory that several share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
