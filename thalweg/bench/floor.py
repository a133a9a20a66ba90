"""The decode floor of a GPU: the least time in which it can read what the output tokens of a run need."""

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
def _model(folder: Path) -> RankModel | None:
    """On one GPU, with weights as published and a KV cache in bfloat16; None where the model is unknown."""
    try:
        return PlannedModel(read_facts(folder)).on(ONE)
    except ThalwegError:
        return None


def share_of_floor(
    folder: Path, hardware: Hardware | None, requests: int, inputs: int, outputs: int, batch: float, seconds: float
) -> float | None:
    """Floor of all decode steps of a run / its seconds; None without output, or for an unknown GPU or model.

    A step has `batch` rows, the mean number of requests under way, at the mean context: the prompt and half of the
    output. Each row gives one token. Rates are those of the GPU's data sheet.

    folder: with config.json. inputs, outputs: tokens of all requests.
    """
    model = _model(folder)
    if hardware is None or model is None or not outputs:
        return None
    chip = hardware.chip
    rows, context = max(1, round(batch)), round((inputs + outputs / 2) / requests)
    phases = roofline.phases(model, StepShape(rows, 1, context))
    step = roofline.seconds(phases, Ceilings(chip.read, chip.bf16, chip.fp8))
    return outputs / rows * step / seconds
