"""How many distinct experts a decode step reads in each layer: what random weights and random tokens really chose, not
what they should have.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    if engine.runner.planes.device.type != "cuda" or not isinstance(model, nn.Module):
        return ()
    from thalweg.layers.kernel_moe import KernelMoe  # needs Triton

    parts = [part for part in model.modules() if isinstance(part, KernelMoe)]
    if not parts:
        return ()
    seen: list[list[tuple[int, Tensor]]] = [[] for _ in parts]
    runner, runs = engine.runner, [part.run for part in parts]
    recorded = runner.steps, runner.graphs
    try:
        runner.eager()
        for part, into in zip(parts, seen, strict=True):
            part.run = _Watched(part.run, part.rule.experts, into)
        time_batch(engine, prompts, STEPS + 2)
    finally:
        runner.steps, runner.graphs = recorded
        for part, run in zip(parts, runs, strict=True):
            part.run = run
    return tuple(_mean(each, len(prompts)) for each in seen)


def _mean(seen: Sequence[tuple[int, Tensor]], rows: int) -> float:
    """Of the steps that decode so many rows; one that overran the end of all of them chose nothing."""
    counts = [int(count) for tokens, count in seen if tokens == rows]
    chosen = [count for count in counts if count]
    return sum(chosen) / len(chosen) if chosen else 0.0


class _Watched:
    """A runner of experts that keeps how many different ones each call was given."""

    def __init__(self, run: Any, experts: int, into: list[tuple[int, Tensor]]) -> None:
        self.run, self.experts, self.into = run, experts, into

    def __call__(self, out_TH: Tensor, x: Any, routed: Any, weights: Any, accumulate: bool = True) -> None:
        from thalweg.kernels.experts.triton import coverage

        self.into.append((len(x), coverage(routed.ids_TK, self.experts)))
        self.run(out_TH, x, routed, weights, accumulate)
