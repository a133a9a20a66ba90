"""The captured steps of a runner: which graph replays an agreed step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from thalweg.core.agreement import AgreedStep, agree, record_of
from thalweg.core.plan import StepPlan
from thalweg.runner.drafting import NO_CAPTURED_DRAFTS, CapturedDrafts
from thalweg.runner.runner import StepGraph


class FittingGraph(StepGraph, Protocol):
    """A captured step that knows which steps it can replay."""

    rows: int

    def fits(self, step: AgreedStep) -> bool: ...


class CapturedSteps:
    """Graphs in the order in which they are tried: of one kind the smallest first."""

    def __init__(self, graphs: Sequence[FittingGraph], drafts: CapturedDrafts = NO_CAPTURED_DRAFTS) -> None:
        self.graphs, self.drafts = graphs, drafts

    def get(self, plan: StepPlan, agreed: AgreedStep | None = None) -> FittingGraph | None:
        """The first graph that holds the step; None for what was not captured."""
        step = agreed or agree([record_of(plan)])
        return next((graph for graph in self.graphs if graph.fits(step)), None)


def ordered(graphs: Sequence[FittingGraph]) -> list[FittingGraph]:
    return sorted(graphs, key=lambda graph: graph.rows)
