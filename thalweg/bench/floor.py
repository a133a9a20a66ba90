"""The decode floor of a GPU: the least time in which it can read what the output tokens of a run need."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

from thalweg.config.machines import Hardware
from thalweg.core.errors import ThalwegError
from thalweg.launch.planning import roofline
from thalweg.launch.planning.layouts import ONE
from thalweg.launch.planning.roofline import Ceilings, StepShape
from thalweg.launch.planning.weights import PlannedModel, RankModel
from thalweg.models.catalog import read_facts


class DecodeFloor(NamedTuple):
    """A checkpoint on one GPU, with the rates of its data sheet."""

    model: RankModel  # weights as published, KV cache in bfloat16
    top: Ceilings

    def share(self, requests: int, tokens: tuple[float, float], batch: float, seconds: float) -> float | None:
        """Floor of all decode steps / seconds of the run; None without output. tokens: of all prompts and outputs.
        batch: mean number of requests under way.

        A step has `batch` rows at the mean context: the prompt and half of the output. Each row gives one token.
        """
        inputs, outputs = tokens
        if not outputs:
            return None
        rows, context = max(1, round(batch)), round((inputs + outputs / 2) / requests)
        step = roofline.seconds(roofline.phases(self.model, StepShape(rows, 1, context)), self.top)
        return outputs / rows * step / seconds


@cache
def decode_floor(folder: Path, hardware: Hardware | None) -> DecodeFloor | None:
    """None where the machine has no known GPU, or `folder` no config.json of a known model."""
    if hardware is None:
        return None
    try:
        model = PlannedModel(read_facts(folder)).on(ONE)
    except ThalwegError:
        return None
    return DecodeFloor(model, Ceilings(hardware.chip.read, hardware.chip.bf16, hardware.chip.fp8))
