"""The interface between the runner and a drafter.

Tokens are those of plain decoding, whatever is drafted: `accept` samples each from the target with the noise of its
position, and drafts decide only how many are sampled in one step (`sampling.drafts`). A wrong or failing drafter costs
time, never a token.

Letters: T tokens of the step, R rows, E sampled rows, K drafts of each, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Sequence

from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.batch.slots import Field, Slots
from thalweg.config.model import ModelFacts
from thalweg.core.plan import Bind, SamplingNeeds, StepPlan
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.weights.table import WeightTable


@dataclass(frozen=True, slots=True)
class DraftExtendInput:
    """A step after verification, whose tokens a drafter writes into its KV. Some may be rejected drafts."""

    plan: StepPlan
    batch: Batch  # the plan's tokens in order; padding may follow
    hidden_TH: Tensor  # of the target, after its final norm
    compacted: DraftExtendInput | None = None  # only the accepted paths, if verification has compacted their KV


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """The slots to draft for."""

    slot_E: Tensor  # int64
    max_kv_len: int  # upper bound of their lengths in tokens
    needs: SamplingNeeds


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """Drafts of each row."""

    drafts_EK: Tensor  # int64
    num_drafts_E: Tensor  # int64: the number of drafts of each row
    is_valid: Tensor  # bool, of each row or of all: False if the drafter computed NaN or no token
    parents_EK: Tensor | None = None  # int64: the node before each draft (`core.tree`); None for chains

    def first(self, rows: int) -> DraftOutput:
        """The drafts of the first rows."""
        parents_EK = None if self.parents_EK is None else self.parents_EK[:rows]
        is_valid = self.is_valid[:rows] if self.is_valid.dim() else self.is_valid
        return DraftOutput(self.drafts_EK[:rows], self.num_drafts_E[:rows], is_valid, parents_EK)


class HasWeights(Protocol):
    """A module with weights."""

    facts: ModelFacts

    def table(self) -> WeightTable:
        """How the published tensors map onto its parameters."""


class Drafter(Protocol):
    """Its state lies in planes of the same pages as the target's, and in fields of the slots. Everything is called on
    the compute stream.
    """

    def modules(self) -> tuple[HasWeights, ...]:
        """Modules with weights in the target's checkpoint."""

    def own_weight_modules(self) -> tuple[HasWeights, ...]:
        """Modules with weights in the drafter's own folder."""

    def planes(self) -> tuple[PlaneSpec, ...]:
        """Planes of the drafter."""

    def fields(self) -> tuple[Field, ...]:
        """Slot fields of the drafter."""

    def capture(self, planes: Planes) -> None:
        """Captures or traces frequent work, before the first request. It touches the null page only."""

    def bind(self, binds: Sequence[Bind], slots: Slots, planes: Planes) -> None:
        """These slots were bound, and have their pages."""

    def extend(self, draft_input: DraftExtendInput, slots: Slots, planes: Planes) -> None:
        """Writes the draft KV of a step whose accepted tokens are in the slots."""

    def propose(self, request: DraftRequest, num_drafts: int, slots: Slots, planes: Planes) -> DraftOutput | None:
        """Writes up to `num_drafts` drafts, which may be 0, after the known tokens of each slot, and their number into
        `slots.num_drafts`. None: there are no drafts. The tokens are always valid ids of the target, because the next
        step reads their embeddings.
        """


class StatelessDrafter:
    """Base of drafters without weights, planes and fields."""

    def modules(self) -> tuple[HasWeights, ...]:
        return ()

    def own_weight_modules(self) -> tuple[HasWeights, ...]:
        return ()

    def planes(self) -> tuple[PlaneSpec, ...]:
        return ()

    def fields(self) -> tuple[Field, ...]:
        return ()

    def capture(self, planes: Planes) -> None:
        return

    def bind(self, binds: Sequence[Bind], slots: Slots, planes: Planes) -> None:
        return

    def extend(self, draft_input: DraftExtendInput, slots: Slots, planes: Planes) -> None:
        return


class NoDrafter(StatelessDrafter):
    """No speculation: proposes nothing."""

    def propose(self, request: DraftRequest, num_drafts: int, slots: Slots, planes: Planes) -> None:
        return


NO_DRAFTER = NoDrafter()
