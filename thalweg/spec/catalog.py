"""Which drafter a name stands for. To add one: a file and a row here."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

from thalweg.core.tree import CHAIN, TreeShape
from thalweg.models import catalog
from thalweg.models.decoder import Target
from thalweg.sampling.draft_sampling import COUPLED, DraftSampling
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.draft_model import DraftModel, draft_model_facts
from thalweg.spec.drafter import NO_DRAFTER, Drafter
from thalweg.spec.eagle import eagle_head
from thalweg.spec.ngram import NgramDrafter
from thalweg.spec.tree import TreeDrafter
from thalweg.weights.stream import schemes_in

DRAFTERS: dict[str, Callable[[Target, Path, DraftSampling], Drafter]] = {
    "NONE": lambda target, folder, draft_sampling: NO_DRAFTER,
    "NGRAM": lambda target, folder, draft_sampling: NgramDrafter(),
    "NEXTN": lambda target, folder, draft_sampling: AutoregressiveDrafter(catalog.build_nextn(target), draft_sampling),
    "EAGLE": lambda target, folder, draft_sampling: AutoregressiveDrafter(
        eagle_head(target, folder), draft_sampling, has_own_weights=True
    ),
    "EAGLE3": lambda target, folder, draft_sampling: AutoregressiveDrafter(
        eagle_head(target, folder), draft_sampling, has_own_weights=True
    ),
    "STANDALONE": lambda target, folder, draft_sampling: AutoregressiveDrafter(
        _small(target, folder), draft_sampling, has_own_weights=True
    ),
}


def _small(target: Target, folder: Path) -> DraftModel:
    facts = draft_model_facts(folder, target.facts)
    return DraftModel(facts, target, schemes_in(folder, facts.quantization_config))


def build_drafter(
    name: str, target: Target, folder: str = "", draft_sampling: DraftSampling = COUPLED, tree: TreeShape = CHAIN
) -> Drafter:
    """The empty drafter behind this model; a loader fills it. folder: its own, of one that has such. drawing: how
    drafts are made of what it knows of the next token. tree: how drafts part ways, of a head. Raises CheckpointError
    where the checkpoint or the folder has not what it needs.
    """
    made = DRAFTERS[name](target, Path(folder), draft_sampling)
    return (
        TreeDrafter(made.head, draft_sampling, tree, made.has_own_weights)
        if tree.is_tree and isinstance(made, AutoregressiveDrafter)
        else made
    )
