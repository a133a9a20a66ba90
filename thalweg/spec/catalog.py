"""Makes the drafter of a name in `config.drafters`."""

from __future__ import annotations

from pathlib import Path

from thalweg.config.drafters import DRAFTERS, NO_DRAFTER
from thalweg.config.entry_point import load_entry
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.models.interface import Target
from thalweg.sampling.draft_sampling import COUPLED, DraftSampling
from thalweg.spec import drafter
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.drafter import Drafter
from thalweg.spec.tree import TreeDrafter


def build_drafter(
    name: str,
    target: Target,
    folder: str = "",
    draft_sampling: DraftSampling = COUPLED,
    tree: TreeShape = CHAIN,
    shares_topk: bool = False,
) -> Drafter:
    """The empty drafter behind this model; a loader fills it. folder: of its own weights. shares_topk: whether the
    steps of a draft share one selection of context, of a model with an indexer. Raises CheckpointError where the
    checkpoint or the folder lacks what it needs.
    """
    if name == NO_DRAFTER:
        return drafter.NO_DRAFTER
    built: Drafter = load_entry(DRAFTERS[name].build)(target, Path(folder), draft_sampling)
    if shares_topk and isinstance(built, AutoregressiveDrafter) and target.facts.indexer is not None:
        built.head.shared_topk = target.facts.indexer.topk
    if tree.is_tree and isinstance(built, AutoregressiveDrafter):
        return TreeDrafter(built.head, draft_sampling, tree, built.has_own_weights)
    return built
