"""Pipeline stages: which layers of a model one has."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.config.model import ModelFacts


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Layers `first` to `stop` - 1 of `layers`."""

    first: int
    stop: int
    layers: int

    @property
    def is_first(self) -> bool:
        return self.first == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.layers


def stage_borders(facts: ModelFacts, stages: int) -> tuple[PipelineStage, ...]:
    """Cuts the layers into stages of about equal size. A border is moved back to a layer with an indexer of its own
    where one is near.
    """
    full = facts.indexer.full if facts.indexer is not None else (True,) * facts.layers
    borders = [0]
    for number in range(1, stages):
        even = round(number * facts.layers / stages)
        own = [i for i in range(borders[-1] + 1, even + 1) if full[i]]
        borders.append(own[-1] if own else even)
    return tuple(
        PipelineStage(first, stop, facts.layers)
        for first, stop in zip(borders, [*borders[1:], facts.layers], strict=True)
    )
