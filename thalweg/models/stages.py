"""Pipeline stages: which layers of a model one has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from thalweg.config.model import ModelFacts
from thalweg.core.errors import UnsupportedConfig


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


def stage_borders(
    facts: ModelFacts, stages: int, partition: Sequence[int] = (), costs: Sequence[float] = ()
) -> tuple[PipelineStage, ...]:
    """Cuts the layers into stages: as `partition` says, or so that the largest sum of a stage's `costs` is as small as
    it can be. Without costs all layers are equal.

    Without a partition a stage begins with a layer that has an indexer of its own, if there are enough of them: then no
    selection of context crosses a border. Raises UnsupportedConfig.
    """
    if stages > facts.layers:
        raise UnsupportedConfig(f"pp_size: the model has {facts.layers} layers; use at most --pp-size {facts.layers}")
    if partition and (len(partition) != stages or sum(partition) != facts.layers or min(partition) < 1):
        raise UnsupportedConfig(
            f"pp_layer_partition: {list(partition)} does not divide {facts.layers} layers over {stages} stages"
        )
    every = range(facts.layers)
    own = [layer for layer in every if not shared_topk(facts, layer)]
    starts = own if len(own) >= stages else every
    borders = [0, *accumulate(partition)] if partition else _even_borders(costs or [1.0] * len(every), starts, stages)
    return tuple(PipelineStage(first, stop, facts.layers) for first, stop in pairwise(borders))


def shared_topk(facts: ModelFacts, layer: int) -> int:
    """Positions of the selection of context that a layer shares with the one before it; 0: with none."""
    index = facts.indexer
    return 0 if index is None or layer >= facts.layers or index.full[layer] else index.topk


def largest_share(facts: ModelFacts, stages: Sequence[PipelineStage]) -> float:
    """The most parameters in layers that a stage has, as a share of all."""
    of_layers = [_parameters(facts, layer) for layer in range(facts.layers)]
    return max(sum(of_layers[stage.first : stage.stop]) for stage in stages) / sum(of_layers)


def _even_borders(costs: Sequence[float], starts: Sequence[int], stages: int) -> list[int]:
    """First layers of the stages and the number of layers, with the smallest largest sum of a stage."""
    before = [0, *accumulate(costs)]
    ends = [*starts[1:], len(costs)]
    best = {end: (before[end], [0, end]) for end in ends}  # by last layer: the largest stage so far, and the borders
    for _ in range(stages - 1):
        best = {
            end: min(
                (max(largest, before[end] - before[start]), [*borders, end])
                for start, (largest, borders) in best.items()
                if start < end
            )
            for end in ends
            if any(start < end for start in best)
        }
    return best[len(costs)][1]


def _parameters(facts: ModelFacts, layer: int) -> int:
    """Of the large matrices of a layer."""
    if facts.mla is None:
        attention = 2 * facts.hidden * facts.head_dim * (facts.heads + facts.kv_heads)
    else:
        mla, query = facts.mla, facts.heads * (facts.mla.nope + facts.mla.rope)
        attention = mla.q_lora * (facts.hidden + query) if mla.q_lora else facts.hidden * query
        attention += facts.hidden * (mla.kv_lora + mla.rope) + mla.kv_lora * facts.heads * (mla.nope + mla.v)
        attention += facts.heads * mla.v * facts.hidden
    if facts.moe is not None and facts.moe.in_layer(layer):
        return attention + 3 * facts.hidden * facts.moe.intermediate * (facts.moe.experts + facts.moe.shared)
    return attention + 3 * facts.hidden * facts.intermediate
