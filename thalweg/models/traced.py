"""A model whose small decode steps run as TorchScript programs: the CPU's CUDA graphs.

A decode step of a small model is some 500 operations of 1 to 3 µs each, and more than half of that is Python.
TorchScript traces them once and replays them without: the bundled model's step for one row went from 2.6 to 1.5 ms
(torch 2.13, one EPYC core), bit for bit the same. A program is good for any context: page tables of any width are
inputs, and so are the planes, which it writes. It follows weights that change in place. Larger batches spend their time
in the operations themselves and run eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from thalweg.attention.selection import select_top_k
from thalweg.batch.batch import Batch, Group, RowExtent
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.kernels.experts.ref import SCRIPTABLE
from thalweg.kernels.gemm.prefetch import PREFETCH_SINK
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import CODECS, Planes
from thalweg.models.interface import Model, WrappedModel
from thalweg.models.torchscript import Program, trace

ROWS = 4  # decode rows up to which a step is traced

Kind = tuple[int, bool]  # rows, and whether a context is longer than the indexer's top-k


def traced(model: Model, planes: Planes) -> Model:
    """The model with traced decode steps; the model itself where that is not possible."""
    return TracedModel(model, planes) if can_trace(model, planes.device) else model


def can_trace(model: Model, device: torch.device) -> bool:
    """Not on an accelerator, on several ranks, with Python ≥ 3.14, with another selection of context than the model's
    own, with latents in host memory, or with an FP8 cache, which TorchScript does not know.
    """
    factory = model.factory
    own = isinstance(factory, ReferenceLayers) and (model.facts.mla is None or factory.selection is select_top_k)
    known = all(CODECS[spec.codec].itemsize > 1 and not spec.hot for spec in model.planes())
    return device.type == "cpu" and SCRIPTABLE and own and known and factory.layout.world.size == 1


class TracedModel(WrappedModel):
    """`model` behind the same interface. Every kind of step is traced at once, so that no request waits for it."""

    def __init__(self, model: Model, planes: Planes) -> None:
        super().__init__(model)
        self._planes, self._memory = planes, planes.tensors()

        def step(batch: Batch) -> Tensor:
            return model.forward(batch, planes)

        self._programs: dict[Kind | None, Program] = {
            kind: trace(step, (model,), (*inputs_of(batch), *self._memory), longest_of(self.facts, kind))
            for kind, batch in traced_kinds(self.facts)
        }

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        if batch.groups[0].query > 1 and len(batch.logits_indices_N) == len(batch.ids_T) <= ROWS:  # a verification
            batch = one_token_rows(batch)
        program = self._programs.get(kind_of(self.facts, batch)) if planes is self._planes else None
        return self.model.forward(batch, planes) if program is None else program(*inputs_of(batch), *self._memory)


def traced_kinds(facts: ModelFacts) -> Iterator[tuple[Kind, Batch]]:
    """Every kind of step that is traced, and an example. What it stores goes into the null page."""
    lengths = [1] if facts.indexer is None else [1, facts.indexer.topk + 1]
    for rows in range(1, ROWS + 1):
        for length in lengths:
            zeros = torch.zeros(rows, dtype=torch.int64)
            table_RP = torch.zeros(rows, -(-length // PAGE), dtype=torch.int64)
            groups = (Group(0, rows, 0, 1, length),)
            yield (rows, length > 1), Batch(zeros, zeros, zeros, table_RP, zeros == 0, zeros, groups)


def kind_of(facts: ModelFacts, batch: Batch) -> Kind | None:
    """None: such steps are not traced."""
    group, indexer = batch.groups[0], facts.indexer
    if batch.tree is not None or batch.draft_selection is not None or len(batch.groups) > 1 or group.query > 1:
        return None
    return group.rows, indexer is not None and group.max_kv_len > indexer.topk


def longest_of(facts: ModelFacts, kind: Kind) -> Group:
    """The longest context of a kind: what is sized by it in a program is then only an upper bound."""
    rows, is_long = kind
    indexer = facts.indexer
    return Group(0, rows, 0, 1, facts.context if is_long or indexer is None else min(indexer.topk, facts.context))


def inputs_of(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    table_RP = batch.table_RP[:, : -(-batch.groups[0].max_kv_len // PAGE)]
    return batch.ids_T, batch.positions_T, batch.write_T, table_RP, batch.real_T, PREFETCH_SINK


def one_token_rows(batch: Batch) -> Batch:
    """A batch of one group with each token as a row of its own: a layer stores what it keeps of all tokens before any
    of them attends.
    """
    group = batch.groups[0]
    if batch.tree is not None or len(batch.groups) > 1:
        return batch
    return replace(
        batch,
        table_RP=batch.table_RP.repeat_interleave(group.query, 0),
        groups=(Group(0, group.rows * group.query, 0, 1, group.max_kv_len),),
        extents=tuple(RowExtent(1, max_kv_len) for query, max_kv_len in batch.extents for _ in range(query)),
    )
