"""Which drafter a name stands for. To add one: a file and a row here."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

from thalweg.core.tree import CHAIN, TreeShape
from thalweg.models import catalog
from thalweg.models.decoder import Target
from thalweg.sampling.drafts import COUPLED, Drawing
from thalweg.spec.drafter import NO_DRAFTER, Drafter
from thalweg.spec.eagle import eagle_head
from thalweg.spec.ngram import NgramDrafter
from thalweg.spec.small import Small, small_facts
from thalweg.spec.tree import Branching
from thalweg.spec.unroll import Unrolled
from thalweg.weights.stream import schemes_in

DRAFTERS: dict[str, Callable[[Target, Path, Drawing], Drafter]] = {
    "NONE": lambda target, folder, drawing: NO_DRAFTER,
    "NGRAM": lambda target, folder, drawing: NgramDrafter(),
    "NEXTN": lambda target, folder, drawing: Unrolled(catalog.build_nextn(target), drawing),
    "EAGLE": lambda target, folder, drawing: Unrolled(eagle_head(target, folder), drawing, apart=True),
    "EAGLE3": lambda target, folder, drawing: Unrolled(eagle_head(target, folder), drawing, apart=True),
    "STANDALONE": lambda target, folder, drawing: Unrolled(_small(target, folder), drawing, apart=True),
}


def _small(target: Target, folder: Path) -> Small:
    facts = small_facts(folder, target.facts)
    return Small(facts, target, schemes_in(folder, facts.quantization_config))


def build_drafter(
    name: str, target: Target, folder: str = "", drawing: Drawing = COUPLED, tree: TreeShape = CHAIN
) -> Drafter:
    """The empty drafter behind this model; a loader fills it. folder: its own, of one that has such. drawing: how
    drafts are made of what it knows of the next token. tree: how drafts part ways, of a head. Raises CheckpointError
    where the checkpoint or the folder has not what it needs.
    """
    made = DRAFTERS[name](target, Path(folder), drawing)
    return Branching(made.head, drawing, tree, made.apart) if tree.is_tree and isinstance(made, Unrolled) else made
