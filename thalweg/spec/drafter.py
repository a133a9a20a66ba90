"""What the runner asks of a drafter.

Whatever it drafts, tokens are those of plain decoding: accept draws each of them from the target with the coins of its
position, and drafts say only how many can be drawn in one step (`sampling.drafts`). So a drafter may be wrong, late, or
gone; it can cost time, never a token.

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
    """A step behind its accept, as a drafter learns from it. batch: the plan's tokens, and maybe padding behind them,
    in the plan's order. hidden_TH: of the target, after its final norm. Some of the tokens may have been drafts that
    were not accepted. straight: of trees whose accept moves their paths by itself, the step with these alone.
    """

    plan: StepPlan
    batch: Batch
    hidden_TH: Tensor
    compacted: DraftExtendInput | None = None


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Whom to draft for: slot_E int64, and an upper bound of their lengths in tokens. needs: what they ask of
    sampling.
    """

    slot_E: Tensor
    max_kv_len: int
    needs: SamplingNeeds


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """drafts_EK int64; the first `made_E` int64 of each row are drafts. sound: bool, of each row or of all, False where
    the drafter computed rubbish. parents_EK int64: of each draft the node before it (`core.tree`); None for chains.
    """

    drafts_EK: Tensor
    made_E: Tensor
    sound: Tensor
    parents_EK: Tensor | None = None

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

    def propose(self, asked: DraftRequest, width: int, slots: Slots, planes: Planes) -> DraftOutput | None:
        """Puts up to `width` drafts, which may be 0, behind the known tokens of each slot, and their number into
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

    def propose(self, asked: DraftRequest, width: int, slots: Slots, planes: Planes) -> None:
        return


NO_DRAFTER = NoDrafter()
