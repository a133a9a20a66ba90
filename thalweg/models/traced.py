"""A model whose small decode steps run as recorded programs: the CPU's CUDA graphs.

A decode step of a small model is some 500 operations of 1 to 3 µs each, and more than half of that is Python. TorchScript records them
once and replays them without: the bundled model's step for one row went from 2.6 to 1.5 ms (torch 2.13, one EPYC core), bit for bit
the same. A program is good for any context: page tables of any width enter as an input, and so do the planes, which it writes; weights that are
changed in place are followed. Larger batches spend their time in the operations themselves and are left as they are.
"""

from __future__ import annotations

import warnings
from typing import Callable

import torch
from torch import Tensor, nn

from thalweg.attention.selection import best
from thalweg.batch.batch import Batch, Group
from thalweg.core.plan import PAGE
from thalweg.kernels.experts import script
from thalweg.kernels.gemm.warm import SINK
from thalweg.layers.parts import ReferenceParts
from thalweg.memory.planes import CODECS, FP8, Planes, PlaneSpec
from thalweg.models.base import Model
from thalweg.weights.table import Table

ROWS = 4  # decode rows up to which a step is recorded
AFTER = 8  # steps of a kind before it is recorded: recording costs 0.15 s

Program = Callable[..., Tensor]


def traced(model: Model, device: torch.device | str = "cpu") -> Model:
    """The model with recorded decode steps; the model itself where that is not possible (an accelerator, Python ≥ 3.14, a choice of
    context that is not the model's own, a cache in FP8, which TorchScript does not know)."""
    parts = model.parts
    own = isinstance(parts, ReferenceParts) and (model.facts.mla is None or parts.selection is best)
    known = all(CODECS[spec.codec] != FP8 for spec in model.planes())
    if torch.device(device).type == "cpu" and script.AVAILABLE and own and known:
        return Traced(model)
    return model


class Traced:
    """`model` behind the same interface."""

    def __init__(self, model: Model) -> None:
        self.model, self.facts, self.parts, self.steps = model, model.facts, model.parts, model.steps
        self._planes: Planes | None = None
        self._memory: tuple[Tensor, ...] = ()
        self._seen: dict[tuple[int, bool], int] = {}
        self._programs: dict[tuple[int, bool], Program] = {}

    def planes(self) -> tuple[PlaneSpec, ...]:
        return self.model.planes()

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return self.model.logits(hidden_NH)

    def table(self) -> Table:
        return self.model.table()

    @torch.inference_mode()
    def record(self, planes: Planes) -> None:
        """Records every kind of step now, so that no request waits for it. What it computes goes into the null page."""
        self._planes, self._memory = planes, planes.tensors()
        indexer = self.facts.indexer
        reaches = [1] if indexer is None else [1, indexer.topk + 1]
        for rows in range(1, ROWS + 1):
            for reach in reaches:
                zeros = torch.zeros(rows, dtype=torch.int64)
                table_RP = torch.zeros(rows, -(-reach // PAGE), dtype=torch.int64)
                batch = Batch(zeros, zeros, zeros, table_RP, zeros == 0, zeros, (Group(0, rows, 0, 1, reach),))
                self._programs[rows, reach > 1] = self._record((rows, reach > 1), batch, planes)

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        group = batch.groups[0]
        if len(batch.groups) > 1 or group.query > 1 or group.rows > ROWS:
            return self.model.forward(batch, planes)
        if planes is not self._planes:
            self._seen, self._programs = {}, {}
            self._planes, self._memory = planes, planes.tensors()
        indexer = self.facts.indexer
        key = (group.rows, indexer is not None and group.reach > indexer.topk)
        if key in self._programs:
            return self._programs[key](*_inputs(batch, group), *self._memory)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] >= AFTER:
            self._programs[key] = self._record(key, batch, planes)
        return self.model.forward(batch, planes)

    def _record(self, key: tuple[int, bool], batch: Batch, planes: Planes) -> Program:
        rows, chosen = key
        indexer = self.facts.indexer
        # the longest context of its kind: what is sized by it in the program is then only an upper bound
        reach = self.facts.context if chosen or indexer is None else min(indexer.topk, self.facts.context)
        groups = (Group(0, rows, 0, 1, reach),)
        inputs = (*_inputs(batch, batch.groups[0]), *self._memory)

        with warnings.catch_warnings():
            # Python values that are constants of this kind of step; and torch prefers torch.compile, which needs a C++ compiler here
            warnings.simplefilter("ignore")
            program: Program = torch.jit.trace(  # type: ignore[no-untyped-call]
                _Step(self.model, groups, planes), inputs, check_trace=False
            )
        for _ in range(2):  # TorchScript optimises in its first runs; they write what the step itself writes
            program(*inputs)
        return program


class _Step(nn.Module):
    """A step as a module that holds the model: TorchScript then refers to its parameters. Of a plain function they would be constants, copied, merged
    where they are equal, and never freed."""

    def __init__(self, model: Model, groups: tuple[Group, ...], planes: Planes) -> None:
        super().__init__()
        self.model, self.groups, self.planes = model, groups, planes

    # written: the sink and the planes' own tensors; that they are inputs keeps TorchScript from dropping what only writes
    def forward(
        self, ids_T: Tensor, positions_T: Tensor, write_T: Tensor, table_RP: Tensor, real_T: Tensor, *written: Tensor
    ) -> Tensor:
        return self.model.forward(Batch(ids_T, positions_T, write_T, table_RP, real_T, ids_T, self.groups), self.planes)


def _inputs(batch: Batch, group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    table_RP = batch.table_RP[:, : -(-group.reach // PAGE)]
    return batch.ids_T, batch.positions_T, batch.write_T, table_RP, batch.real_T, SINK
