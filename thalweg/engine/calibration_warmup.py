"""Runs every kind of step once before the first request, on one layer of each kind, so that no kernel is compiled or
loaded within one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Callable

import numpy as np
import torch
from torch import nn

from thalweg.config.engine import EngineConfig
from thalweg.core.grammar import GrammarMasks
from thalweg.core.kernels import TORCH
from thalweg.core.plan import StepPlan
from thalweg.engine.calibration_plans import GREEDY, fine, kinds, samplings, scored, singles
from thalweg.models.decoder import Model
from thalweg.models.token_by_token import TokenByToken
from thalweg.runner.runner import ForwardResult, Runner

PLAIN_CONTEXT = 1024  # tokens

Progress = Callable[[int, int], None]  # steps done, of how many


def thin(model: Model) -> Model:
    """The same model with one layer of each kind, the parameters shared: what it runs is compiled as what the whole
    model runs.
    """
    assert isinstance(model, nn.Module) and isinstance(model.layers, nn.ModuleList)
    by_kind = {
        tuple((name, parameter.shape, parameter.dtype) for name, parameter in layer.named_parameters()): layer
        for layer in reversed(model.layers)
    }
    slim = copy.copy(model)
    slim._modules = dict(model._modules)
    slim.layers = nn.ModuleList(reversed(by_kind.values()))
    vars(slim)["watched"] = (0,) * len(vars(model)["watched"])  # as many, of the layers that there are
    return slim


def warm(runner: Runner, config: EngineConfig, context: int, progress: Progress) -> None:
    """Compiles. The runner's slots hold no requests: every row is padding, and touches the null page only."""
    work = [*_sampling(runner, config, context)]
    if config.decode_attention_backend != "reference":  # which has no kernels
        work += [*_steps(runner, config, context), *_products(runner, config)]
    with torch.inference_mode():
        for done, each in enumerate(work, 1):
            each()
            progress(done, len(work))
    torch.cuda.synchronize()


def _sampling(runner: Runner, config: EngineConfig, context: int) -> Iterator[Callable[[], object]]:
    """Draws from logits that no model made; under a grammar too, of the first row and of all."""
    vocab, slots = runner.model.facts.vocab, runner.slots

    def forwarded(plan: StepPlan) -> ForwardResult:
        slot_E = torch.arange(len(plan.rows), device=slots.ints_SI.device)
        logits_EV = torch.zeros(len(slot_E), vocab, device=slot_E.device)
        return ForwardResult(plan, logits_EV, slot_E, slots.ints_SI.index_select(0, slot_E), {})

    def masks(rows: int) -> GrammarMasks:
        return GrammarMasks(tuple(range(rows)), np.full((rows, -(-vocab // 32)), -1, dtype=np.int32))

    for plan in samplings(min(config.max_running_requests, config.chunked_prefill_size), context):
        yield partial(lambda plan: runner.sample(forwarded(plan)), plan)
        if plan.needs == GREEDY:
            yield partial(lambda plan: runner.sample(forwarded(plan), masks(len(plan.rows))), plan)
            yield partial(lambda plan: runner.sample(forwarded(plan), masks(1)), plan)


def _steps(runner: Runner, config: EngineConfig, context: int) -> Iterator[Callable[[], object]]:
    if (
        config.decode_attention_backend == TORCH
    ):  # no kernel goes by the context, and a choice of a long one takes its time
        context = min(context, max(PLAIN_CONTEXT, -(-config.chunked_prefill_size // config.max_running_requests)))
    model = thin(_whole(runner.model))
    narrow = Runner(model, model, runner.planes, runner.slots, runner.drafting.drafter)
    if isinstance(runner.model, TokenByToken):  # whatever the step, what is computed is one token at a time
        whole = TokenByToken(model)
        alone = Runner(whole, whole, runner.planes, runner.slots)
        for plan in scored(min(config.chunked_prefill_size, context)):
            yield partial(lambda plan: alone.sample(alone.forward(plan)), plan)
        plans = singles(context)
    else:
        plans = kinds(
            config.max_running_requests, config.chunked_prefill_size, context, config.num_drafts, config.tree.is_tree
        )
    for plan in plans:
        width = plan.sampled_per_row - 1 or config.num_drafts
        yield partial(lambda plan, width: narrow.sample(narrow.forward(plan), width=width), plan, width)


def _products(runner: Runner, config: EngineConfig) -> Iterator[Callable[[], object]]:
    rows = [1] if isinstance(runner.model, TokenByToken) else fine(config.chunked_prefill_size)
    for part, inputs in fp8_products(_whole(runner.model)):
        for count in rows:
            x = partial(torch.zeros, count, inputs, dtype=torch.bfloat16, device=runner.planes.device)
            yield partial(lambda part, x: part.forward(x()), part, x)


def _whole(model: Model) -> Model:
    """What a model that computes one token at a time computes it with."""
    return model.model if isinstance(model, TokenByToken) else model


def fp8_products(model: Model) -> list[tuple[nn.Module, int]]:
    """One of each shape of the layers that multiply by an FP8 weight, and their inputs: a library may have a kernel for
    every few rows more.
    """
    assert isinstance(model, nn.Module)
    found: dict[torch.Size, tuple[nn.Module, int]] = {}
    for part in model.modules():
        for name, weight in part.named_parameters(recurse=False):
            if name == "weight" and weight.dtype == torch.float8_e4m3fn:
                found[weight.shape] = part, weight.shape[1]
    return list(found.values())
