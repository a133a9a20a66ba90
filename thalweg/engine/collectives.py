"""How the tensor-parallel ranks of a start add up their parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import UnsupportedConfig
from thalweg.core.report import START_UP, Decision
from thalweg.kernels.exchange.ref import bf16_row
from thalweg.models.interface import Model
from thalweg.parallel.axis import Axis, gather_texts
from thalweg.parallel.process_axis import ProcessAxis

log = logging.getLogger(__name__)

OF_ONE_NODE = "these ranks are on several nodes, which cannot address each other's memory"
T = TypeVar("T")


def with_sum_and_norm(config: EngineConfig, model: Model, device: torch.device) -> EngineConfig:
    """Gives the tensor-parallel ranks the kernel that adds and norms few rows, if their GPUs address each other's
    memory. Deterministic ones sum in one way only, whatever the number of rows.
    """
    axis = model.factory.layout.tp
    if not isinstance(axis, ProcessAxis) or config.deterministic_inference:
        return config
    if not axis.is_on_one_node:
        return config.started([Decision("sum_and_norm", "library", START_UP, OF_ONE_NODE)])
    from thalweg.parallel.sum_and_norm import SumAndNorm  # needs Triton

    kernel, reason = _on_all_ranks(axis, device, lambda: SumAndNorm(axis, axis.group, model.facts.hidden, device))
    if kernel is None:
        log.warning("%s: sums over ranks take the library's collectives", reason)
        return config.started([Decision("sum_and_norm", "library", START_UP, reason)])
    kernel.with_codes = any(getattr(module, "reads_codes", False) for module in cast(nn.Module, model).modules())
    times = kernel.measure()
    axis.sum_and_norm = kernel
    chosen = f"one-shot to {kernel.one_shot_rows} rows, two-shot to {kernel.rows}"
    return config.started([Decision("sum_and_norm", chosen, START_UP, _shown(times))])


def with_exchange(config: EngineConfig, model: Model, device: torch.device) -> EngineConfig:
    """Gives expert-parallel ranks the one-sided kernels for few rows, if their GPUs address each other's memory.
    Deterministic inference always adds in the library's order.
    """
    moe, layout = model.facts.moe, model.factory.layout
    axis = layout.ep if config.moe_a2a_backend == "alltoall" else layout.dp
    sends_bf16 = config.moe_a2a_backend != "deepep" and config.dtype == "bfloat16"
    if moe is None or not isinstance(axis, ProcessAxis) or config.deterministic_inference or not sends_bf16:
        return config
    if not axis.is_on_one_node:
        return config.started([Decision("expert_exchange", "library", START_UP, OF_ONE_NODE)])
    from thalweg.parallel.peer_exchange import PeerExchange  # needs Triton

    hidden = model.facts.hidden
    row_bytes = bf16_row(moe.topk + moe.shared, hidden)
    kernel, reason = _on_all_ranks(axis, device, lambda: PeerExchange(axis, axis.group, row_bytes, hidden, device))
    if kernel is None:
        return config.started([Decision("expert_exchange", "library", START_UP, reason)])
    times = kernel.measure()
    axis.exchange = kernel if kernel.rows else None
    return config.started([Decision("expert_exchange", f"one-sided to {kernel.rows} rows", START_UP, _shown(times))])


def _on_all_ranks(axis: Axis, device: torch.device, make: Callable[[], T]) -> tuple[T | None, str]:
    """What every rank has made, or None and the reason of the first one that cannot."""
    made, why = None, ""
    try:
        made = make()
    except UnsupportedConfig as error:
        why = str(error)
    reasons = [text for text in gather_texts(axis, why, device) if text]
    return (None, reasons[0]) if reasons else (made, "")


def failure_flag(model: Model) -> Tensor | None:
    """See `kernels.peer_words.failed_on`; None without kernels that wait for other ranks."""
    layout = model.factory.layout
    if all(axis.sum_and_norm is None and axis.exchange is None for axis in (layout.tp, layout.dp, layout.ep)):
        return None
    from thalweg.kernels.peer_words import failed_on  # needs Triton

    return failed_on(model.factory.device).zero_()  # an earlier engine of this process may have set it


def _shown(times: Mapping[int, Mapping[str, float]]) -> str:
    """Microseconds by row count and way, in words."""
    rows = (
        f"{rows} rows: {', '.join(f'{way} {us:.1f} us' for way, us in by_way.items())}"
        for rows, by_way in times.items()
    )
    return f"measured: {'; '.join(rows)}"
