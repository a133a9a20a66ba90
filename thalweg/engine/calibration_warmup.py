"""Start-up warm-up: runs every kind of step once, on one layer of each kind, so that no request has to wait for a
kernel to be compiled or loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Callable

import numpy as np
import torch
from torch import nn

from thalweg.config.backends import DECODE
from thalweg.config.engine import EngineConfig
from thalweg.core.grammar import GrammarMasks
from thalweg.core.plan import StepPlan
from thalweg.engine import calibration_plans as plans
from thalweg.engine.calibration import run_step
from thalweg.models.interface import Model
from thalweg.models.one_of_each import one_layer_of_each_kind
from thalweg.models.token_by_token import TokenByToken
from thalweg.runner.runner import ForwardResult, Runner

TORCH_CONTEXT = 1024  # tokens
OFTEN = 4
Work = Callable[[], object]


def warm_up(
    runner: Runner, config: EngineConfig, context: int, progress: Callable[[int, int], None], is_warm: bool = False
) -> None:
    """Runs all kinds of steps on empty slots: every row is padding and uses the null page only.

    progress: called with (steps done, steps in all). is_warm: all kernels are in the cache folder; then every OFTEN-th
    step is run, since a kernel that is still missing takes some ms to load.
    """
    work = warm_up_work(runner, config, context)[:: OFTEN if is_warm else 1]
    with torch.inference_mode():
        for done, run in enumerate(work, 1):
            run()
            progress(done, len(work))
    torch.cuda.synchronize()


def warm_up_work(runner: Runner, config: EngineConfig, context: int) -> list[Work]:
    """All kinds of steps, FP8 products last."""
    work = [*_samplings(runner, config, context)]
    if config.decode_attention_backend != "reference":  # it has no kernels
        work += [*_steps(runner, config, context), *_fp8_products(runner, config)]
    return work


def _samplings(runner: Runner, config: EngineConfig, context: int) -> Iterator[Work]:
    """Samples from zero logits; greedy steps also with grammar masks for all rows and for the first one."""
    vocab, width, slots = runner.model.facts.vocab, len(runner.model.shards.here), runner.slots

    def forwarded(plan: StepPlan) -> ForwardResult:
        slot_E = torch.arange(len(plan.rows), device=slots.ints_SI.device)
        logits_EV = torch.zeros(len(slot_E), width, device=slot_E.device)
        return ForwardResult(plan, logits_EV, slot_E, slots.ints_SI.index_select(0, slot_E), {})

    def sample(plan: StepPlan, masked: int) -> None:
        bits = np.full((masked, -(-vocab // 32)), -1, dtype=np.int32)
        runner.sample(forwarded(plan), GrammarMasks(tuple(range(masked)), bits) if masked else None)

    for plan in plans.sampling_steps(min(config.max_running_requests, config.chunked_prefill_size), context):
        for masked in (0, len(plan.rows), 1) if plan.needs == plans.GREEDY else (0,):
            yield partial(sample, plan, masked)


def _steps(runner: Runner, config: EngineConfig, context: int) -> Iterator[Work]:
    budget = config.chunked_prefill_size
    if DECODE[
        config.decode_attention_backend
    ].mla_layer:  # no kernel depends on the context, and long ones take their time
        context = min(context, max(TORCH_CONTEXT, -(-budget // config.max_running_requests)))
    model = one_layer_of_each_kind(_inner(runner.model))
    thin_runner = Runner(model, model, runner.planes, runner.slots, runner.drafting.drafter)
    if isinstance(runner.model, TokenByToken):  # every step is computed one token at a time
        one_by_one = TokenByToken(model)
        scoring_runner = Runner(one_by_one, one_by_one, runner.planes, runner.slots)
        for plan in plans.scored_prompts(min(budget, context)):
            yield partial(run_step, scoring_runner, plan)
        steps = plans.single_tokens(context)
    else:
        steps = plans.all_steps(config.max_running_requests, budget, context, config.num_drafts, config.tree.is_tree)
    for plan in steps:
        yield partial(run_step, thin_runner, plan, plan.sampled_per_row - 1 or config.num_drafts)


def _fp8_products(runner: Runner, config: EngineConfig) -> Iterator[Work]:
    sizes = [1] if isinstance(runner.model, TokenByToken) else plans.fine_token_counts(config.chunked_prefill_size)
    for layer, inputs in fp8_layers(_inner(runner.model)):
        for count in sizes:
            x = partial(torch.zeros, count, inputs, dtype=torch.bfloat16, device=runner.planes.device)
            yield partial(lambda layer, x: layer.forward(x()), layer, x)


def _inner(model: Model) -> Model:
    """The model that a token-by-token model runs."""
    return model.model if isinstance(model, TokenByToken) else model


def fp8_layers(model: Model) -> list[tuple[nn.Module, int]]:
    """(layer, inputs): one layer for each shape of FP8 weights. A library may have a kernel for every few rows more."""
    assert isinstance(model, nn.Module)
    layers: dict[torch.Size, tuple[nn.Module, int]] = {}
    for layer in model.modules():
        for name, weight in layer.named_parameters(recurse=False):
            if name == "weight" and weight.dtype == torch.float8_e4m3fn:
                layers[weight.shape] = layer, weight.shape[1]
    return list(layers.values())
