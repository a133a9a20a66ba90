"""A draft head whose small steps run as TorchScript programs; see `models.traced`."""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.kernels.gemm.prefetch import PREFETCH_SINK
from thalweg.memory.planes import Planes
from thalweg.models.draft_head import DraftHead
from thalweg.models.torchscript import Program, trace
from thalweg.models.traced import Kind, inputs_of, kind_of, longest_of, traced_kinds


class TracedHead:
    """The traced forward and `write_kv` of a draft head, for up to ROWS tokens."""

    def __init__(self, head: DraftHead, planes: Planes) -> None:
        self.head, self.planes, self._memory = head, planes, planes.tensors()
        self._forward: dict[Kind | None, Program] = {}
        self._write_kv: dict[int, Program] = {}

        def forward(batch: Batch, state_TW: Tensor) -> Tensor:
            return head.forward(batch.ids_T, state_TW, batch, planes)

        def write_kv(batch: Batch, state_TW: Tensor) -> Tensor:
            head.write_kv(batch.ids_T, state_TW, batch, planes)
            return state_TW

        for kind, batch in traced_kinds(head.facts):
            rows, is_long = kind
            inputs = *inputs_of(batch), torch.zeros(rows, head.width, dtype=head.dtype), *self._memory
            modules, longest = (head, head.main[0]), longest_of(head.facts, kind)
            self._forward[kind] = trace(forward, modules, inputs, longest, 1)
            if not is_long and not head.attends:
                self._write_kv[rows] = trace(write_kv, modules, inputs, longest, 1)

    def forward(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor:
        program = self._forward.get(kind_of(self.head.facts, batch)) if planes is self.planes else None
        if program is None:
            return self.head.forward(ids_T, state_TW, batch, planes)
        return program(ids_T, *inputs_of(batch)[1:], state_TW, *self._memory)

    def write_kv(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None:
        program = self._write_kv.get(len(ids_T)) if planes is self.planes else None
        if program is None:
            self.head.write_kv(ids_T, state_TW, batch, planes)
            return
        table_RP = batch.table_RP.new_zeros(len(ids_T), 1)  # it reads no context: any table will do
        inputs = ids_T, batch.positions_T, batch.write_T, table_RP, batch.real_T, PREFETCH_SINK
        program(*inputs, state_TW, *self._memory)
