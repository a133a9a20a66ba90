"""A model whose small decode steps run as recorded programs: the CPU's CUDA graphs.

A decode step of a small model is some 500 operations of 1 to 3 µs each, and more than half of that is Python.
TorchScript records them once and replays them without: the bundled model's step for one row went from 2.6 to 1.5 ms
(torch 2.13, one EPYC core), bit for bit the same. A program is good for any context: page tables of any width enter as
an input, and so do the planes, which it writes; weights that are changed in place are followed. Larger batches spend
their time in the operations themselves and are left as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor, nn

from thalweg.attention.selection import select_top_k
from thalweg.batch.batch import Batch, Group, RowExtent
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.kernels.experts import script
from thalweg.kernels.gemm.prefetch import PREFETCH_SINK
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import CODECS, FP8, Planes, PlaneSpec
from thalweg.models.decoder import Model
from thalweg.models.draft_head import DraftHead
from thalweg.weights.table import WeightTable

ROWS = 4  # decode rows up to which a step is recorded
AFTER = 8  # steps of a kind before it is recorded: recording costs 0.15 s

Program = Callable[..., Tensor]


def traced(model: Model, device: torch.device | str = "cpu") -> Model:
    """The model with recorded decode steps; the model itself where that is not possible."""
    return Traced(model) if recordable(model, torch.device(device)) else model


def recordable(model: Model, device: torch.device) -> bool:
    """Not on an accelerator, with Python ≥ 3.14, a choice of context that is not the model's own, or a cache in FP8,
    which TorchScript does not know.
    """
    factory = model.factory
    own = isinstance(factory, ReferenceLayers) and (model.facts.mla is None or factory.selection is select_top_k)
    known = all(CODECS[spec.codec] != FP8 for spec in model.planes())
    return device.type == "cpu" and script.AVAILABLE and own and known


class Traced:
    """`model` behind the same interface."""

    def __init__(self, model: Model) -> None:
        self.model, self.facts, self.factory, self.metadata = model, model.facts, model.factory, model.metadata
        self._planes: Planes | None = None
        self._memory: tuple[Tensor, ...] = ()
        self._seen: dict[tuple[int, bool], int] = {}
        self._programs: dict[tuple[int, bool], Program] = {}

    def planes(self) -> tuple[PlaneSpec, ...]:
        return self.model.planes()

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return self.model.logits(hidden_NH)

    def table(self) -> WeightTable:
        return self.model.table()

    @torch.inference_mode()
    def record(self, planes: Planes) -> None:
        """Records every kind of step now, so that no request waits for it. What it computes goes into the null page."""
        self._planes, self._memory = planes, planes.tensors()
        indexer = self.facts.indexer
        reaches = [1] if indexer is None else [1, indexer.topk + 1]
        for rows in range(1, ROWS + 1):
            for max_kv_len in reaches:
                zeros = torch.zeros(rows, dtype=torch.int64)
                table_RP = torch.zeros(rows, -(-max_kv_len // PAGE), dtype=torch.int64)
                batch = Batch(zeros, zeros, zeros, table_RP, zeros == 0, zeros, (Group(0, rows, 0, 1, max_kv_len),))
                self._programs[rows, max_kv_len > 1] = self._record((rows, max_kv_len > 1), batch, planes)

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        group = batch.groups[0]
        verified = 1 < group.query and len(batch.emit_N) == len(batch.ids_T)  # every token is sampled
        if (
            batch.tree is not None
            or len(batch.groups) > 1
            or group.query * group.rows > ROWS
            or (group.query > 1 and not verified)
        ):
            return self.model.forward(batch, planes)
        if verified:
            return self.forward(singles(batch, group), planes)
        if planes is not self._planes:
            self._seen, self._programs = {}, {}
            self._planes, self._memory = planes, planes.tensors()
        indexer = self.facts.indexer
        key = (group.rows, indexer is not None and group.max_kv_len > indexer.topk)
        if key in self._programs:
            return self._programs[key](*_inputs(batch, group), *self._memory)
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] >= AFTER:
            self._programs[key] = self._record(key, batch, planes)
        return self.model.forward(batch, planes)

    def _record(self, key: tuple[int, bool], batch: Batch, planes: Planes) -> Program:
        inputs = (*_inputs(batch, batch.groups[0]), *self._memory)
        return _recorded(_step(self.model, (_longest(self.facts, *key),), planes), (self.model,), inputs)


class TracedHead:
    """A head behind the same interface, with what it does for up to ROWS tokens recorded: drafting, and learning of a
    step.
    """

    def __init__(self, head: DraftHead, planes: Planes) -> None:
        self.head, self.planes, self._memory = head, planes, planes.tensors()
        self._drafts: dict[tuple[int, bool], Program] = {}
        self._write_kvd: dict[int, Program] = {}
        facts, weights = head.facts, (head, head.main[0])
        reaches = [1] if facts.indexer is None else [1, facts.indexer.topk + 1]
        for rows in range(1, ROWS + 1):
            zeros = torch.zeros(rows, dtype=torch.int64)
            state_RW = torch.zeros(rows, head.width, dtype=head.dtype)
            for max_kv_len in reaches:
                table_RP = torch.zeros(rows, -(-max_kv_len // PAGE), dtype=torch.int64)
                group = Group(0, rows, 0, 1, max_kv_len)
                batch = Batch(zeros, zeros, zeros, table_RP, zeros == 0, zeros, (group,))
                inputs = (state_RW, *_inputs(batch, group), *self._memory)
                longest = (_longest(facts, rows, max_kv_len > 1),)
                self._drafts[rows, max_kv_len > 1] = _recorded(_draft(head.forward, longest, planes), weights, inputs)
                if max_kv_len == 1 and not head.attends:
                    self._write_kvd[rows] = _recorded(_draft(head.write_kv, longest, planes), weights, inputs)

    def forward(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor:
        group, indexer = batch.groups[0], self.head.facts.indexer
        if (
            batch.tree is not None
            or len(batch.groups) > 1
            or group.query > 1
            or group.rows > ROWS
            or planes is not self.planes
        ):
            return self.head.forward(ids_T, state_TW, batch, planes)
        key = group.rows, indexer is not None and group.max_kv_len > indexer.topk
        return self._drafts[key](state_TW, *_inputs(replace(batch, ids_T=ids_T), group), *self._memory)

    def write_kv(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None:
        if self.head.attends or len(ids_T) > ROWS or planes is not self.planes:
            self.head.write_kv(ids_T, state_TW, batch, planes)
            return
        # of the context it looks at nothing: any table does
        table_RP = batch.table_RP.new_zeros(len(ids_T), 1)
        inputs = ids_T, batch.positions_T, batch.write_T, table_RP, batch.real_T, PREFETCH_SINK
        self._write_kvd[len(ids_T)](state_TW, *inputs, *self._memory)


def _longest(facts: ModelFacts, rows: int, chosen: bool) -> Group:
    """The longest context of its kind: what is sized by it in a program is then only an upper bound."""
    indexer = facts.indexer
    return Group(0, rows, 0, 1, facts.context if chosen or indexer is None else min(indexer.topk, facts.context))


def _recorded(work: Program, modules: Sequence[Model | DraftHead], inputs: tuple[Tensor, ...]) -> Program:
    """`work` as a program of its own, of which nothing is left when it is dropped. modules: of these it refers to
    parameters and buffers, so that it follows them where they change in place; other tensors become constants of it,
    merged where they are equal.

    `torch.jit.trace` does the same in a compilation unit that all of Python shares and that is never cleared: some 15
    MB a program, for good.
    """
    program = torch._C.ScriptModule("Recorded", torch._C.CompilationUnit(), False)  # type: ignore[call-arg]
    for number, tensor in enumerate(tensor for module in modules for tensor in _tensors(module)):
        program._register_attribute(f"tensor{number}", torch._C.TensorType.get(), tensor)  # type: ignore[attr-defined]
    strict, outplace, names, stored = True, False, list[str](), False
    with warnings.catch_warnings():
        # Python values that are constants of this kind of step; and torch prefers torch.compile, which needs a C++
        # compiler here
        warnings.simplefilter("ignore")
        program._create_method_from_trace("forward", work, inputs, lambda _: "", strict, outplace, names, stored)  # type: ignore[attr-defined]
    forward: Program = program._get_method("forward")
    for _ in range(2):  # TorchScript optimises in its first runs; they write what the step itself writes
        forward(*inputs)
    return forward


def _tensors(module: Model | DraftHead) -> Iterator[Tensor]:
    assert isinstance(module, nn.Module), "models and heads are modules"
    return chain(module.parameters(), module.buffers())


def singles(batch: Batch, group: Group) -> Batch:
    """A batch of one group with each token as a row of its own: a layer stores what it keeps of all tokens before any
    of them attends.
    """
    rows = group.rows * group.query
    return replace(
        batch,
        table_RP=batch.table_RP.repeat_interleave(group.query, 0),
        groups=(Group(0, rows, 0, 1, group.max_kv_len),),
        extents=tuple(RowExtent(1, max_kv_len) for query, max_kv_len in batch.extents for _ in range(query)),
    )


def _step(model: Model, groups: tuple[Group, ...], planes: Planes) -> Program:
    """A step of tensors alone. written: the sink and the planes' tensors; that they are inputs keeps TorchScript from
    dropping what only writes.
    """

    def step(ids_T: Tensor, positions_T: Tensor, write_T: Tensor, table_RP: Tensor, real_T: Tensor, *written: Tensor) -> Tensor:  # fmt: skip
        return model.forward(Batch(ids_T, positions_T, write_T, table_RP, real_T, ids_T, groups), planes)

    return step


def _draft(work: Callable[..., Tensor | None], groups: tuple[Group, ...], planes: Planes) -> Program:
    """The same of a head. work: its `forward` or `write_kv`."""

    def draft(
        state_TW: Tensor, ids_T: Tensor, positions_T: Tensor, write_T: Tensor, table_RP: Tensor, real_T: Tensor, *written: Tensor
    ) -> Tensor:  # fmt: skip
        made = work(ids_T, state_TW, Batch(ids_T, positions_T, write_T, table_RP, real_T, ids_T, groups), planes)
        return state_TW if made is None else made

    return draft


def _inputs(batch: Batch, group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    table_RP = batch.table_RP[:, : -(-group.max_kv_len // PAGE)]
    return batch.ids_T, batch.positions_T, batch.write_T, table_RP, batch.real_T, PREFETCH_SINK
