"""Numbers of distinct experts that a decode step reads in each layer, counted on random weights and random tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor, nn

from thalweg.bench.in_process import Tokens, time_batch
from thalweg.engine.local import LocalEngine

STEPS = 4  # decode steps that are looked at


def of_decode(engine: LocalEngine, prompts: Sequence[Tokens]) -> tuple[float, ...]:
    """Distinct routed experts of each layer with experts, the mean of some decode steps of this batch, run eagerly. ()
    where nothing routes on a GPU.
    """
    model = engine.runner.model
    if engine.runner.planes.device.type != "cuda" or not isinstance(model, nn.Module) or engine.config.processes > 1:
        return ()
    from thalweg.layers.kernel_moe import KernelMoe  # needs Triton

    parts = [part for part in model.modules() if isinstance(part, KernelMoe)]
    if not parts:
        return ()
    seen: list[list[Tensor]] = [[] for _ in parts]
    runner, runs = engine.runner, [part.run for part in parts]
    recorded = runner.forward_model, runner.graphs
    try:
        runner.disable_graphs()
        for part, into in zip(parts, seen, strict=True):
            part.run = _watched(part.run, part.router.rule.experts, len(prompts), into)
        time_batch(engine, prompts, STEPS + 2)
    finally:
        runner.forward_model, runner.graphs = recorded
        for part, run in zip(parts, runs, strict=True):
            part.run = run
    # a step that overran the end of all rows chose nothing
    chosen = ([count for count in map(int, counts) if count] for counts in seen)
    return tuple(fmean(counts) if counts else 0.0 for counts in chosen)


def _watched(run: Callable[..., None], experts: int, rows: int, into: list[Tensor]) -> Callable[..., None]:
    """A runner of experts that keeps how many different ones each call with so many rows chose."""
    from thalweg.kernels.experts.triton import coverage

    def watched(out_TH: Tensor, x: Any, routed: Any, *rest: Any, **options: Any) -> None:
        if len(x) == rows:
            into.append(coverage(routed.ids_TK, experts))
        run(out_TH, x, routed, *rest, **options)

    return watched
