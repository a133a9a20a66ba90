"""How many pages the KV cache gets on a GPU: what is really free once weights, compiled kernels and libraries are
there, less what a step and the CUDA graphs take, which is measured, less a stated reserve.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Callable, NamedTuple

import torch
from torch import Tensor, nn

from thalweg.batch.slots import Slots
from thalweg.config.engine import EngineConfig
from thalweg.core.errors import InsufficientMemory
from thalweg.core.format import format_bytes
from thalweg.core.kernels import TORCH_ATTENTION
from thalweg.core.plan import PAGE, StepPlan
from thalweg.core.report import START_UP, Decision
from thalweg.engine import calibration_plans
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models.decoder import Model
from thalweg.models.token_by_token import TokenByToken
from thalweg.runner.runner import Runner
from thalweg.spec.drafter import Drafter

log = logging.getLogger("thalweg.engine")

REFERENCE_CONTEXT = 8192  # tokens
RESERVE = 1 << 30  # bytes that stay free: what fragments, and what others take on this GPU
# bytes of the driver for one recorded bucket that are believed at once: it takes some kB for each kernel
LIKELY = 64 << 20
LOOKS = 3  # at a bucket that seems to take more: free memory is the device's, and others on it come and go


class Sums(NamedTuple):
    """Bytes. free: beside the weights. step: what the largest step takes while it runs. graphs: what the CUDA graphs
    are expected to take. slots: state of the requests. page: of a page in all planes.
    """

    free: int
    step: int
    graphs: int
    slots: int
    reserve: int
    page: int

    @property
    def left(self) -> int:
        """For pages, the null page not counted."""
        return self.free - self.step - self.graphs - self.slots - self.reserve - self.page

    @property
    def pages(self) -> int:
        return max(self.left // self.page, 0)

    def __str__(self) -> str:
        taken = (self.step, "a step"), (self.graphs, "graphs"), (self.slots, "slots"), (self.reserve, "reserve")
        parts = " - ".join(f"{format_bytes(count)} {name}" for count, name in taken)
        return (
            f"({format_bytes(self.free)} free beside the weights - {parts}) / {format_bytes(self.page)} a page ="
            f" {self.pages}"
        )


class Graphs(NamedTuple):
    """What recording one of the largest bucket took. pool: bytes of torch's, which all buckets share. driver: beside
    it, each bucket anew.
    """

    pool: int
    driver: int

    def of(self, buckets: int) -> int:
        """The prediction for so many."""
        return self.pool + buckets * self.driver


def free(device: torch.device) -> int:
    """Bytes that a driver's allocation could have now."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def provisional(config: EngineConfig, specs: tuple[PlaneSpec, ...], device: torch.device) -> int:
    """The longest context there can be, before it is known what else needs memory."""
    if config.num_pages:
        return config.context_length
    return max(min(config.context_length, free(device) // Planes.page_cost(specs) * PAGE), 1)


def probe(config: EngineConfig, model: Model, drafter: Drafter, context: int, device: torch.device) -> Runner:
    """A runner without a cache: all its rows are padding, which needs the null page only."""
    planes = Planes((*model.planes(), *drafter.planes()), 1, device)
    slots = Slots(config.max_running_requests + 1, context, device, drafter.fields(), config.tree)
    return Runner(model, model, planes, slots, drafter)


def measure(
    config: EngineConfig, runner: Runner, context: int, record: Callable[[Runner], int]
) -> tuple[int, int, int]:
    """(step, graphs, slots) of `Sums`. record: records a largest bucket on the runner, with the largest of each kind
    of tree, and returns how many times as much there will be."""
    device = runner.planes.device
    step = _step(config, runner, context, device)
    return step, _graphs(runner, record, device), runner.slots.nbytes


def _step(config: EngineConfig, runner: Runner, context: int, device: torch.device) -> int:
    free(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        for of, plan in _largest(config, runner, context):
            made = of.sample(of.forward(plan), width=config.num_drafts)
            del made
    except torch.cuda.OutOfMemoryError as error:
        raise InsufficientMemory(
            f"memory: a step of {config.chunked_prefill_size} tokens and {config.max_running_requests} requests does"
            " not fit beside the weights; use a smaller --chunked-prefill-size or --max-running-requests"
        ) from error
    return int(torch.cuda.max_memory_reserved(device)) - before + _kept(config, runner.model)


def _largest(config: EngineConfig, runner: Runner, context: int) -> Iterator[tuple[Runner, StepPlan]]:
    """The steps that take most memory, and what runs each."""
    slots, budget, model = config.max_running_requests, config.chunked_prefill_size, runner.model
    decoding = min(slots, budget)
    if isinstance(model, TokenByToken):
        # what one token takes, by the model itself, since padding would see no context here; and the sampling of all
        # rows
        yield (
            Runner(model.model, model.model, runner.planes, runner.slots),
            calibration_plans.plan([(context - 1, 1, True)]),
        )
        yield runner, calibration_plans.plan([(context - 1, 1, True)] * decoding, calibration_plans.ALL_NEEDS)
    elif config.decode_attention_backend in TORCH_ATTENTION:
        # prompts take minutes over long contexts, and tiles of their scores are as large over short ones; but what is
        # gathered of a context is as long as the context: of as many rows as decode in one span, and of a prompt, whose
        # tiles then have few tokens
        yield from (
            (runner, plan)
            for plan in calibration_plans.largest(slots, budget, min(context, REFERENCE_CONTEXT), config.num_drafts)
        )
        n = min(calibration_plans.DENSE, context, budget - decoding + 1)
        if context > REFERENCE_CONTEXT:
            yield runner, calibration_plans.plan([(context - 1, 1, True)] * (decoding - 1) + [(context - n, n, True)])
    else:
        for plans in (
            calibration_plans.largest(slots, budget, context, config.num_drafts),
            calibration_plans.cached(slots, budget, context),
        ):
            yield from ((runner, plan) for plan in plans)


def _kept(config: EngineConfig, model: Model) -> int:
    """Bytes of the hidden states of a step whose tokens are computed one by one: apart, and then together."""
    one_by_one = isinstance(model, TokenByToken)
    return 2 * config.chunked_prefill_size * model.facts.hidden * model.factory.dtype.itemsize if one_by_one else 0


def _graphs(runner: Runner, record: Callable[[Runner], int], device: torch.device) -> int:
    buckets = record(runner)
    if not buckets:
        return 0
    # the first recording brings what recordings need once, and is not what one more takes; it is kept, as the others
    # are, since the driver gives what was an earlier one's to the next
    kept = [(runner.steps, runner.graphs, runner.tree_graphs)]
    found: list[Graphs] = []
    while not found or (found[-1].driver > LIKELY and len(found) < LOOKS):
        before, held = free(device), torch.cuda.memory_reserved(device)
        record(runner)
        kept.append((runner.steps, runner.graphs, runner.tree_graphs))
        pool = torch.cuda.memory_reserved(device) - held
        found.append(Graphs(pool, max(before - free(device) - pool, 0)))
    runner.eager()
    return min(found, key=lambda one: one.driver).of(buckets)


def settle(config: EngineConfig, sums: Sums) -> EngineConfig:
    """The configuration with pages and context as the sums give them. What the user set stays, or is refused.

    Raises InsufficientMemory.
    """
    pages, context = config.num_pages or sums.pages, config.context_length
    if config.num_pages and config.num_pages * sums.page > sums.left + sums.reserve:
        raise InsufficientMemory(
            f"memory: {config.num_pages} pages do not fit: {sums}, and {(sums.left + sums.reserve) // sums.page}"
            f" without a reserve; use --max-total-tokens {max(sums.pages, 1) * PAGE}, or leave --mem-fraction-static"
            " and --max-total-tokens to the engine"
        )
    if pages < 1:
        raise InsufficientMemory(
            f"memory: {sums}: no page is left for the KV cache; use a smaller --chunked-prefill-size,"
            " --max-running-requests or --cuda-graph-max-bs, or a GPU with more memory"
        )
    held = pages * PAGE
    if config.min_context_length > held:
        raise InsufficientMemory(
            f"context_length: {config.min_context_length} is more than the KV cache holds: {sums}; use at most {held}"
        )
    decisions = []
    if not config.num_pages:
        decisions.append(Decision("max_total_tokens", held, START_UP, f"{PAGE} tokens a page: {sums}"))
        if context > held:
            decisions.append(Decision("context_length", held, START_UP, "what the KV cache holds"))
    log.info("memory: %s%s", sums, f"; {config.num_pages} were asked for" if config.num_pages else "")
    return config.started(decisions, max_total_tokens=held, context_length=min(context, held))


# why each is what it is; on a CPU nothing is set aside for steps and there are no graphs
REASONS = {
    "weights": "measured: of the model as it is loaded",
    "kv": "measured: of all planes, the null page included",
    "slots": "measured: state of the requests",
    "step": "measured: what the largest step took while it ran",
    "graphs": "measured: what recording all CUDA graphs took",
    "beside": (
        "measured: of the GPU, what neither the above nor anything free accounts for: the driver's context, compiled"
        " kernels, libraries"
    ),
}


def taken(config: EngineConfig, runner: Runner, **others: int) -> EngineConfig:
    """The configuration with a report of the bytes of weights (the drafter's included), KV cache and slots, and of
    `others`, by the names in `REASONS`.
    """
    model, planes, slots = runner.model, runner.planes, runner.slots
    plain = model.model if isinstance(model, TokenByToken) else model
    drafter = runner.drafting.drafter
    modules = [one for one in (plain, *drafter.modules(), *drafter.own()) if isinstance(one, nn.Module)]
    found = {
        "weights": _bytes([tensor for one in modules for tensor in (*one.parameters(), *one.buffers())]),
        "kv": _bytes(list(planes.bytes.values())),
        "slots": _bytes(
            [value for value in (*vars(slots).values(), *slots.extra.values()) if isinstance(value, Tensor)]
        ),
        **others,
    }
    return config.started(Decision(f"memory_{name}", value, START_UP, REASONS[name]) for name, value in found.items())


def _bytes(tensors: list[Tensor]) -> int:
    """Of their memory, that which several share counted once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())
