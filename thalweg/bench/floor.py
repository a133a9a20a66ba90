"""Floors: the least time in which the GPUs of a layout can read, compute and send what a step, or the output of a run,
needs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from thalweg.config.machines import Hardware
from thalweg.core.errors import ThalwegError
from thalweg.launch.planning import roofline
from thalweg.launch.planning.collectives import collectives
from thalweg.launch.planning.layouts import ONE, ParallelLayout
from thalweg.launch.planning.roofline import Ceilings, StepShape
from thalweg.launch.planning.weights import PlannedModel, RankModel
from thalweg.models.catalog import read_facts


@cache
def _model(folder: Path, layout: ParallelLayout) -> RankModel:
    """On one GPU of a layout, with weights as published and a KV cache in bfloat16."""
    return PlannedModel(read_facts(folder)).on(layout)


def step_seconds(
    folder: Path, shape: StepShape, top: Ceilings, layout: ParallelLayout = ONE, hardware: Hardware | None = None
) -> float:
    """The least time of one step. folder: with config.json. shape: of each attention, see `roofline.divided`. hardware:
    whose links the layout's collectives take; None leaves them out. Raises CheckpointError and UnsupportedConfig.
    """
    model = _model(folder, layout)
    sends = [] if hardware is None else collectives(model.facts, shape, layout)
    return roofline.seconds(roofline.phases(model, shape), top) + sum(
        one.seconds(hardware) for one in sends if hardware
    )


def share_of_floor(
    folder: Path,
    hardware: Hardware | None,
    requests: int,
    inputs: int,
    outputs: int,
    batch: float,
    seconds: float,
    *,
    layout: ParallelLayout = ONE,
) -> float | None:
    """Floor of all decode steps of a run / its seconds; None without output, or for an unknown GPU or model.

    A step has `batch` rows, the mean number of requests under way, at the mean context: the prompt and half of the
    output. Each row gives one token. Rates are those of the GPU's data sheet. inputs, outputs: tokens of all requests.
    """
    if hardware is None or not outputs:
        return None
    rows, context, chip = max(1, round(batch)), round((inputs + outputs / 2) / requests), hardware.chip
    shape, top = roofline.divided(layout, rows, 1, context), Ceilings(chip.read, chip.bf16, chip.fp8)
    try:
        step = step_seconds(folder, shape, top, layout, hardware)
    except ThalwegError:
        return None
    return outputs / rows * step / seconds
