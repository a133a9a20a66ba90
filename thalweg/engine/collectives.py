"""How the tensor-parallel ranks of a start add up their parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import START_UP, Decision
from thalweg.models.interface import Model
from thalweg.parallel.axis import gather_texts
from thalweg.parallel.process_axis import ProcessAxis

log = logging.getLogger(__name__)


def with_sum_and_norm(config: EngineConfig, model: Model, device: torch.device) -> EngineConfig:
    """Gives the tensor-parallel ranks the kernel that adds and norms few rows, if their GPUs address each other's
    memory. Deterministic ones sum in one way only, whatever the number of rows.
    """
    axis = model.factory.layout.tp
    if not isinstance(axis, ProcessAxis) or config.deterministic_inference:
        return config
    from thalweg.parallel.sum_and_norm import SumAndNorm  # needs Triton

    kernel, why = None, ""
    try:
        kernel = SumAndNorm(axis, axis.group, model.facts.hidden, device)
    except UnsupportedConfig as error:
        why = str(error)
    if reasons := [text for text in gather_texts(axis, why, device) if text]:
        log.warning("%s: sums over ranks take the library's collectives", reasons[0])
        return config.started([Decision("sum_and_norm", "library", START_UP, reasons[0])])
    assert kernel is not None
    kernel.with_codes = any(getattr(module, "reads_codes", False) for module in cast(nn.Module, model).modules())
    times = kernel.measure()
    axis.sum_and_norm = kernel
    chosen = f"one-shot to {kernel.one_shot_rows} rows, two-shot to {kernel.rows}"
    shown = "; ".join(f"{rows} rows: {_microseconds(by_way)}" for rows, by_way in times.items())
    return config.started([Decision("sum_and_norm", chosen, START_UP, f"measured: {shown}")])


def with_exchange(config: EngineConfig, model: Model, device: torch.device) -> EngineConfig:
    """Gives expert-parallel ranks the one-sided kernels for few rows, if their GPUs address each other's memory.
    Deterministic inference always adds in the library's order.
    """
    moe, layout = model.facts.moe, model.factory.layout
    axis = layout.ep if config.moe_a2a_backend == "alltoall" else layout.dp
    is_own = config.moe_a2a_backend != "deepep" and config.dtype == "bfloat16"  # it rounds results to that
    if moe is None or not isinstance(axis, ProcessAxis) or config.deterministic_inference or not is_own:
        return config
    from thalweg.parallel.peer_exchange import PeerExchange  # needs Triton

    kernel, why, name = None, "", "expert_exchange"
    row_bytes = 8 * (moe.topk + moe.shared) + 2 * model.facts.hidden  # slots, weights, activations
    try:
        kernel = PeerExchange(axis, axis.group, row_bytes, model.facts.hidden, device)
    except UnsupportedConfig as error:
        why = str(error)
    if reasons := [text for text in gather_texts(axis, why, device) if text]:
        return config.started([Decision(name, "library", START_UP, reasons[0])])
    assert kernel is not None
    times = kernel.measure()
    axis.exchange = kernel if kernel.rows else None
    shown = "; ".join(f"{rows} rows: {_microseconds(by_way)}" for rows, by_way in times.items())
    return config.started([Decision(name, f"one-sided to {kernel.rows} rows", START_UP, f"measured: {shown}")])


def failure_flag(model: Model) -> Tensor | None:
    """What kernels set that have waited for another rank in vain; None without such kernels."""
    layout = model.factory.layout
    if all(axis.sum_and_norm is None and axis.exchange is None for axis in (layout.tp, layout.dp, layout.ep)):
        return None
    from thalweg.kernels.peer_words import failed_on  # needs Triton

    return failed_on(model.factory.device)


def _microseconds(by_way: Mapping[str, float]) -> str:
    return ", ".join(f"{way} {us:.1f} us" for way, us in by_way.items())
