"""Dispatch by DeepEP V1 (github.com/deepseek-ai/DeepEP), an optional library for GPUs that reach each other by NVLink.

Its normal kernels move each token once to each rank, its low-latency ones once to each expert. Both have static sizes
here, so that graphs capture them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from thalweg.core.errors import UnsupportedConfig
from thalweg.parallel.dispatch import Dispatched, OwnTokens
from thalweg.parallel.layout import Layout
from thalweg.parallel.process_axis import ProcessAxis

FEW = 128  # tokens of a rank up to which the low-latency kernels are used; their buffers grow with it


def missing() -> str:
    """Why DeepEP cannot be used; "" where it can."""
    if find_spec("deep_ep") is None:
        return "the library deep_ep (DeepEP V1) is not installed"
    return ""


@cache
def _buffer(axis: ProcessAxis, hidden: int, slots: int, mode: str) -> Any:
    """Memory that all ranks of an axis write to; one for all layers."""
    import deep_ep

    kind, row, few, nvlink = deep_ep.Buffer, 2 * hidden, 0, 0
    if mode != "low_latency":
        configs = kind.get_dispatch_config(axis.size), kind.get_combine_config(axis.size)
        nvlink = max(config.get_nvl_buffer_size_hint(row, axis.size) for config in configs)
    if mode != "normal":
        few = kind.get_low_latency_rdma_size_hint(FEW, hidden, axis.size, slots)
    return kind(axis.group, nvlink, few, low_latency_mode=few > 0, num_qps_per_rank=max(slots // axis.size, 1))


class DeepEPDispatch:
    """Raises UnsupportedConfig if the library is not installed."""

    is_local = True

    def __init__(self, layout: Layout) -> None:
        if reason := missing():
            raise UnsupportedConfig(f"moe_a2a_backend: {reason}; use allgather or alltoall")
        self.own, self.ep, self.mode = OwnTokens(layout), layout.ep, layout.experts.deepep_mode
        self.sends_codes = self.mode == "normal"  # the low-latency kernels take bf16 rows

    def dispatch(self, slot_TK: Tensor, stride: int, weights_TK: Tensor, rows: Sequence[Tensor]) -> Dispatched:
        assert isinstance(self.ep, ProcessAxis), "experts are on several processes"
        slot_NK, weights_NK, *rows_N = self.own.take(slot_TK, weights_TK, *rows)
        slots, tokens = stride * self.ep.size, len(slot_TK)
        buffer = _buffer(self.ep, rows[0].shape[1], slots, self.mode)
        is_few = self.mode == "low_latency" or self.mode == "auto" and len(slot_NK) <= FEW
        way = self._low_latency if is_few else self._normal
        slot_MK, received, back = way(buffer, slot_NK.long(), weights_NK, rows_N, stride)
        return Dispatched(slot_MK, received, lambda partial: self.own.put(back(partial).float(), tokens))

    def _normal(self, buffer: Any, slot_NK: Tensor, weights_NK: Tensor, rows: list[Tensor], stride: int) -> Any:
        """A received row has all experts of its token on this rank, and comes back as their sum."""
        slots, x = stride * self.ep.size, tuple(rows) if len(rows) > 1 else rows[0]
        of_rank, of_node, of_expert, is_in_rank, _ = buffer.get_dispatch_layout(slot_NK, slots)
        x, local_MK, weights_MK, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=of_rank,
            num_tokens_per_rdma_rank=of_node,
            num_tokens_per_expert=of_expert,
            is_token_in_rank=is_in_rank,
            topk_idx=slot_NK,
            topk_weights=weights_NK,
            num_worst_tokens=len(slot_NK) * self.ep.size,
        )
        slot_MK = torch.where(local_MK >= 0, local_MK + self.ep.rank * stride, -1).int()
        received = (weights_MK, *(x if isinstance(x, tuple) else (x,)))
        return slot_MK, received, lambda partial_MH: buffer.combine(partial_MH.to(torch.bfloat16), handle)[0]

    def _low_latency(self, buffer: Any, slot_NK: Tensor, weights_NK: Tensor, rows: list[Tensor], stride: int) -> Any:
        """A received row is for one expert, and comes back without its weight."""
        if len(slot_NK) > FEW:
            raise UnsupportedConfig(
                f"deepep_mode: low_latency sends {FEW} tokens of a rank at most, and a step has {len(slot_NK)};"
                " use auto"
            )
        x_SMH, count_S, handle, *_ = buffer.low_latency_dispatch(
            rows[0], slot_NK, FEW, stride * self.ep.size, use_fp8=False
        )
        places, first = x_SMH.shape[1], self.ep.rank * stride
        slot_S1 = torch.arange(first, first + stride, dtype=torch.int32, device=x_SMH.device).unsqueeze(1)
        is_filled_SM = torch.arange(places, device=x_SMH.device) < count_S.unsqueeze(1)
        slot_M1 = torch.where(is_filled_SM, slot_S1, -1).view(-1, 1)
        ones_M1 = torch.ones(slot_M1.shape, dtype=weights_NK.dtype, device=x_SMH.device)

        def back(partial_MH: Tensor) -> Tensor:
            results = partial_MH.to(torch.bfloat16).view(x_SMH.shape)
            combined: Tensor = buffer.low_latency_combine(results, slot_NK, weights_NK, handle)[0]
            return combined

        return slot_M1, (ones_M1, x_SMH.flatten(0, 1)), back
