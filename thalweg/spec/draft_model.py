"""A smaller model of the same vocabulary that drafts, from a folder of its own: a `DraftHead` that needs nothing of the
target but its tokens.

Its keys and values lie in planes of the same pages, as those of layers behind the target's, so that a prefix that is
found in the cache is there for both. To observe a step it computes the step's tokens as the target did: of what it
stores in a layer all layers before are part.

Models of one family often differ in how far their vocabularies are padded. It drafts of the ids that both have; where
the target writes one beyond its own, it reads its last.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.config.eagle import algorithm_of
from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models.catalog import assemble, read_facts
from thalweg.models.draft_head import DraftHead
from thalweg.models.interface import Target
from thalweg.quant.catalog import Schemes
from thalweg.sampling.draft_sampling import DraftSampling
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.drafter import Drafter
from thalweg.weights.stream import schemes_in


class DraftModel(DraftHead):
    """A state is what the model's head reads of a position; that of the position before takes no part in the next."""

    def __init__(self, facts: ModelFacts, main: Target, schemes: Schemes) -> None:
        factory = main.factory.for_drafter(facts, schemes)
        super().__init__(facts, factory, main)
        self.both = min(facts.vocab, main.facts.vocab)
        if facts.vocab < main.facts.vocab:
            self.ids_D = torch.arange(self.both, device=factory.device)
        self.attends = True
        self.model = assemble(facts, factory)
        self._planes: Planes | None = None
        self._own: Planes | None = None

    def planes(self) -> tuple[PlaneSpec, ...]:
        return tuple(replace(spec, layer=spec.layer + self.index) for spec in self.model.planes())

    def draft_state(self, hidden_TX: Tensor) -> Tensor:
        """A small model needs no state: zeros [T, W]."""
        return hidden_TX.new_zeros(1, 1).expand(len(hidden_TX), self.width)

    def own_states(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor:
        known_T = ids_T if self.ids_D is None else ids_T.clamp(max=self.both - 1)
        return self.model.forward(replace(batch, ids_T=known_T), self._behind(planes))

    def write_own_kv(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None:
        self.own_states(ids_T, state_TW, batch, planes)

    def logits(self, state_NW: Tensor) -> Tensor:
        return self.model.logits(state_NW)[:, : self.both].contiguous()

    def _behind(self, planes: Planes) -> Planes:
        if self._own is None or planes is not self._planes:
            self._planes, self._own = planes, planes.layers_from(self.index)
        return self._own


def draft_model_facts(folder: Path, target: ModelFacts) -> ModelFacts:
    """Of a model in this folder that drafts, with the target's context: beyond its own it drafts worse. Raises
    CheckpointError for a folder without one.
    """
    held = algorithm_of(folder)
    if held != "STANDALONE":
        raise CheckpointError(
            f"{folder} holds an {held} head, which reads what the model to draft for computes and is no model of its"
            f" own; use --speculative-algorithm {held}, or leave that flag out"
        )
    return structs.replace(read_facts(folder), context=target.context)


def build(target: Target, folder: Path, draft_sampling: DraftSampling) -> Drafter:
    """Raises CheckpointError as `draft_model_facts`."""
    facts = draft_model_facts(folder, target.facts)
    model = DraftModel(facts, target, schemes_in(folder, facts.quantization_config))
    return AutoregressiveDrafter(model, draft_sampling, has_own_weights=True)
