"""How many pages the KV cache gets on a GPU: what is really free once weights, compiled kernels and libraries are there, less what a step and
the CUDA graphs take, which is measured, less a stated reserve."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import msgspec
import torch

from thalweg.batch.slots import Slots
from thalweg.core.errors import InsufficientMemory
from thalweg.core.format import format_bytes
from thalweg.core.kernels import TORCH_ATTENTION
from thalweg.core.plan import PAGE, StepPlan
from thalweg.engine import kinds
from thalweg.engine.settings import EngineSettings
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
    """Bytes. free: beside the weights. step: what the largest step takes while it runs. graphs: what the CUDA graphs are expected to take.
    slots: state of the requests. page: of a page in all planes."""

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
        return f"({format_bytes(self.free)} free beside the weights - {parts}) / {format_bytes(self.page)} a page = {self.pages}"


class Graphs(NamedTuple):
    """What recording one of the largest bucket took. pool: bytes of torch's, which all buckets share. driver: beside it, each bucket anew."""

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


def provisional(settings: EngineSettings, specs: tuple[PlaneSpec, ...], device: torch.device) -> int:
    """The longest context there can be, before it is known what else needs memory."""
    if settings.pages:
        return settings.context
    return max(min(settings.context, free(device) // Planes.page_cost(specs) * PAGE), 1)


def probe(settings: EngineSettings, model: Model, drafter: Drafter, context: int, device: torch.device) -> Runner:
    """A runner without a cache: all its rows are padding, which needs the null page only."""
    planes = Planes((*model.planes(), *drafter.planes()), 1, device)
    slots = Slots(settings.slots + 1, context, device, drafter.fields(), settings.tree)
    return Runner(model, model, planes, slots, drafter)


def measure(
    settings: EngineSettings, runner: Runner, context: int, record: Callable[[Runner], int]
) -> tuple[int, int, int]:
    """(step, graphs, slots) of `Sums`. record: records a largest bucket on the runner, with the largest of each kind
    of tree, and returns how many times as much there will be."""
    device = runner.planes.device
    step = _step(settings, runner, context, device)
    return step, _graphs(runner, record, device), runner.slots.nbytes


def _step(settings: EngineSettings, runner: Runner, context: int, device: torch.device) -> int:
    free(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        for of, plan in _largest(settings, runner, context):
            made = of.sample(of.forward(plan), width=settings.width)
            del made
    except torch.cuda.OutOfMemoryError as error:
        raise InsufficientMemory(
            f"memory: a step of {settings.budget} tokens and {settings.slots} requests does not fit beside the weights; use a smaller "
            "--chunked-prefill-size or --max-running-requests"
        ) from error
    return int(torch.cuda.max_memory_reserved(device)) - before + _kept(settings, runner.model)


def _largest(settings: EngineSettings, runner: Runner, context: int) -> Iterator[tuple[Runner, StepPlan]]:
    """The steps that take most memory, and what runs each."""
    slots, budget, model = settings.slots, settings.budget, runner.model
    decoding = min(slots, budget)
    if isinstance(model, TokenByToken):
        # what one token takes, by the model itself, since padding would see no context here; and the sampling of all rows
        yield Runner(model.model, model.model, runner.planes, runner.slots), kinds.plan([(context - 1, 1, True)])
        yield runner, kinds.plan([(context - 1, 1, True)] * decoding, kinds.ALL_NEEDS)
    elif settings.kernels.decode in TORCH_ATTENTION:
        # prompts take minutes over long contexts, and tiles of their scores are as large over short ones; but what is gathered of a context is
        # as long as the context: of as many rows as decode in one span, and of a prompt, whose tiles then have few tokens
        yield from (
            (runner, plan) for plan in kinds.largest(slots, budget, min(context, REFERENCE_CONTEXT), settings.width)
        )
        n = min(kinds.DENSE, context, budget - decoding + 1)
        if context > REFERENCE_CONTEXT:
            yield runner, kinds.plan([(context - 1, 1, True)] * (decoding - 1) + [(context - n, n, True)])
    else:
        for plans in (kinds.largest(slots, budget, context, settings.width), kinds.cached(slots, budget, context)):
            yield from ((runner, plan) for plan in plans)


def _kept(settings: EngineSettings, model: Model) -> int:
    """Bytes of the hidden states of a step whose tokens are computed one by one: apart, and then together."""
    one_by_one = isinstance(model, TokenByToken)
    return 2 * settings.budget * model.facts.hidden * model.factory.dtype.itemsize if one_by_one else 0


def _graphs(runner: Runner, record: Callable[[Runner], int], device: torch.device) -> int:
    buckets = record(runner)
    if not buckets:
        return 0
    # the first recording brings what recordings need once, and is not what one more takes; it is kept, as the others are, since the driver gives
    # what was an earlier one's to the next
    kept = [(runner.steps, runner.graphs, runner.groves)]
    found: list[Graphs] = []
    while not found or (found[-1].driver > LIKELY and len(found) < LOOKS):
        before, held = free(device), torch.cuda.memory_reserved(device)
        record(runner)
        kept.append((runner.steps, runner.graphs, runner.groves))
        pool = torch.cuda.memory_reserved(device) - held
        found.append(Graphs(pool, max(before - free(device) - pool, 0)))
    runner.eager()
    return min(found, key=lambda one: one.driver).of(buckets)


def settle(settings: EngineSettings, sums: Sums) -> EngineSettings:
    """The settings with pages and context as the sums give them, and the report that says so. What was asked for stays, or is refused.

    Raises InsufficientMemory.
    """
    pages, context = settings.pages or sums.pages, settings.context
    if settings.pages and settings.pages * sums.page > sums.left + sums.reserve:
        raise InsufficientMemory(
            f"memory: {settings.pages} pages do not fit: {sums}, and {(sums.left + sums.reserve) // sums.page} without a reserve; "
            f"use --max-total-tokens {max(sums.pages, 1) * PAGE}, or leave --mem-fraction-static and --max-total-tokens to the engine"
        )
    if pages < 1:
        raise InsufficientMemory(
            f"memory: {sums}: no page is left for the KV cache; use a smaller --chunked-prefill-size, --max-running-requests or "
            "--cuda-graph-max-bs, or a GPU with more memory"
        )
    held = pages * PAGE
    if settings.least_context > held:
        raise InsufficientMemory(
            f"context_length: {settings.least_context} is more than the KV cache holds: {sums}; use at most {held}"
        )
    report = json.loads(settings.report)
    if not settings.pages:
        report["pages"] = _decision("pages", pages, str(sums))
        if context > held:
            report["context_length"] = _decision("context_length", held, "what the KV cache holds")
    log.info("memory: %s%s", sums, f"; {settings.pages} were asked for" if settings.pages else "")
    return msgspec.structs.replace(settings, pages=pages, context=min(context, held), report=json.dumps(report))


def _decision(name: str, value: int, reason: str) -> dict[str, Any]:
    """As `launch.resolved.Decision`, in plain values."""
    return {"name": name, "value": value, "source": "auto", "reason": reason}
