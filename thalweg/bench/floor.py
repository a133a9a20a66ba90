"""Floors: the least time in which one GPU can read and compute what a step, or the output of a run, needs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from thalweg.config.machines import Hardware
from thalweg.core.errors import ThalwegError
from thalweg.launch.planning import roofline
from thalweg.launch.planning.layouts import ONE
from thalweg.launch.planning.roofline import Ceilings, StepShape
from thalweg.launch.planning.weights import PlannedModel, RankModel
from thalweg.models.catalog import read_facts


@cache
def _model(folder: Path) -> RankModel:
    """On one GPU, with weights as published and a KV cache in bfloat16."""
    return PlannedModel(read_facts(folder)).on(ONE)


def step_seconds(folder: Path, shape: StepShape, top: Ceilings) -> float:
    """The least time of one step. folder: with config.json. Raises CheckpointError."""
    return roofline.seconds(roofline.phases(_model(folder), shape), top)


def share_of_floor(
    folder: Path, hardware: Hardware | None, requests: int, inputs: int, outputs: int, batch: float, seconds: float
) -> float | None:
    """Floor of all decode steps of a run / its seconds; None without output, or for an unknown GPU or model.

    A step has `batch` rows, the mean number of requests under way, at the mean context: the prompt and half of the
    output. Each row gives one token. Rates are those of the GPU's data sheet. inputs, outputs: tokens of all requests.
    """
    if hardware is None or not outputs:
        return None
    rows, context, chip = max(1, round(batch)), round((inputs + outputs / 2) / requests), hardware.chip
    try:
        step = step_seconds(folder, StepShape(rows, 1, context), Ceilings(chip.read, chip.bf16, chip.fp8))
    except ThalwegError:
        return None
    return outputs / rows * step / seconds
