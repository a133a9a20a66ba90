"""What the runner asks of a drafter.

Tokens are those of plain decoding, whatever is drafted: `accept` samples each from the target with the noise of its
position, and drafts decide only how many are sampled in one step (`sampling.drafts`). A wrong or failing drafter costs
time, never a token.

Letters: T tokens of the step, R rows, E emitting rows, K drafts of each, V vocabulary.
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
    """A step after its acceptance, by which a drafter extends its KV. Some tokens may be drafts that were refused."""

    plan: StepPlan
    batch: Batch  # the plan's tokens in order; padding may follow
    hidden_TH: Tensor  # of the target, after its final norm
    compacted: DraftExtendInput | None = None  # the accepted paths alone, if the acceptance has moved their KV


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
    made_E: Tensor  # int64: the first so many of a row are drafts
    sound: Tensor  # bool, of each row or of all: False if the drafter computed NaN or no token
    parents_EK: Tensor | None = None  # int64: the node before each draft (`core.tree`); None for chains

    def first(self, rows: int) -> DraftOutput:
        """Of the first rows."""
        parents_EK = None if self.parents_EK is None else self.parents_EK[:rows]
        sound = self.sound[:rows] if self.sound.dim() else self.sound
        return DraftOutput(self.drafts_EK[:rows], self.made_E[:rows], sound, parents_EK)


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
        """What has weights in the target's checkpoint."""

    def own(self) -> tuple[HasWeights, ...]:
        """What has weights in the drafter's own folder."""

    def planes(self) -> tuple[PlaneSpec, ...]:
        """What it keeps of each page."""

    def fields(self) -> tuple[Field, ...]:
        """What it keeps of each slot."""

    def record(self, planes: Planes) -> None:
        """Before the first request: what it does often may be recorded. What is computed meanwhile touches the null
        page only.
        """

    def bind(self, binds: Sequence[Bind], slots: Slots, planes: Planes) -> None:
        """These slots were bound, and have their pages."""

    def extend(self, seen: DraftExtendInput, slots: Slots, planes: Planes) -> None:
        """Learns from a step, whose accepted tokens are in the slots."""

    def propose(self, asked: DraftRequest, num_drafts: int, slots: Slots, planes: Planes) -> DraftOutput | None:
        """Puts up to `num_drafts` drafts, which may be 0, behind the known tokens of each slot, and their number into
        `made`. None: there are none. Whatever was computed, what is put there are ids of the target, whose embeddings
        the next step reads.
        """


class StatelessDrafter:
    """A drafter without weights, planes and fields: what such a one leaves undone."""

    def modules(self) -> tuple[HasWeights, ...]:
        return ()

    def own(self) -> tuple[HasWeights, ...]:
        return ()

    def planes(self) -> tuple[PlaneSpec, ...]:
        return ()

    def fields(self) -> tuple[Field, ...]:
        return ()

    def record(self, planes: Planes) -> None:
        return

    def bind(self, binds: Sequence[Bind], slots: Slots, planes: Planes) -> None:
        return

    def extend(self, seen: DraftExtendInput, slots: Slots, planes: Planes) -> None:
        return


class NoDrafter(StatelessDrafter):
    """Off is a value: to accept without drafts is to sample."""

    def propose(self, asked: DraftRequest, num_drafts: int, slots: Slots, planes: Planes) -> None:
        return


NO_DRAFTER = NoDrafter()
