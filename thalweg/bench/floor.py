"""Floors: the least time in which the GPUs of a layout can read, compute and send what a step, or the output of a run,
needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from thalweg.config.engine import EngineConfig
from thalweg.config.machines import Hardware
from thalweg.core.errors import ThalwegError
from thalweg.launch.planning import roofline
from thalweg.launch.planning.collectives import sending_seconds
from thalweg.launch.planning.layouts import ParallelLayout, layout_of
from thalweg.launch.planning.roofline import Ceilings, StepShape
from thalweg.launch.planning.weights import PlannedModel, RankModel
from thalweg.models.catalog import read_facts

# of /server_info, SGLang's too
LAYOUT = ("tp_size", "pp_size", "dp_size", "dcp_size", "ep_size", "attn_cp_size", "enable_dp_attention")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as it is served: the folder with config.json, the layout, and `EngineConfig.index_topk_pattern`."""

    folder: Path
    layout: ParallelLayout
    index_pattern: str = ""

    @classmethod
    def of(cls, folder: Path, config: EngineConfig) -> ServedModel:
        return cls(folder, layout_of(config), config.index_topk_pattern)

    @classmethod
    def of_server(cls, folder: Path, info: Mapping[str, Any]) -> ServedModel:
        """info: see `ServerInfo.settings`."""
        sizes = {name: info[name] for name in LAYOUT if isinstance(info.get(name), int)}
        pattern = info.get("resolved", {}).get("index_topk_pattern", {}).get("value", "")
        return cls.of(folder, EngineConfig(model_path="", index_topk_pattern=pattern, **sizes))


@cache
def _on_a_gpu(model: ServedModel) -> RankModel:
    """With weights as published and a KV cache in bfloat16."""
    return PlannedModel(read_facts(model.folder, model.index_pattern)).on(model.layout)


def step_seconds(model: ServedModel, shape: StepShape, top: Ceilings, hardware: Hardware | None) -> float:
    """The least time of one step. shape: of each attention, see `roofline.divided`. hardware: see `sending_seconds`.
    Raises CheckpointError and UnsupportedConfig.
    """
    part = _on_a_gpu(model)
    computing = roofline.seconds(roofline.phases(part, shape), top)
    return computing + sending_seconds(part.facts, shape, model.layout, hardware)


def share_of_floor(
    model: ServedModel,
    hardware: Hardware | None,
    requests: int,
    inputs: int,
    outputs: int,
    batch: float,
    seconds: float,
) -> float | None:
    """Floor of all decode steps of a run / its seconds; None without output, or for an unknown GPU or model.

    A step has `batch` rows, the mean number of requests under way, at the mean context: the prompt and half of the
    output. Each row gives one token. Rates are those of the GPU's data sheet. inputs, outputs: tokens of all requests.
    """
    if hardware is None or not outputs:
        return None
    rows, context, chip = max(1, round(batch)), round((inputs + outputs / 2) / requests), hardware.chip
    shape, top = roofline.divided(model.layout, rows, 1, context), Ceilings(chip.read, chip.bf16, chip.fp8, chip.fp4)
    try:
        step = step_seconds(model, shape, top, hardware)
    except ThalwegError:
        return None
    return outputs / rows * step / seconds
