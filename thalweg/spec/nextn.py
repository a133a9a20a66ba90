"""The checkpoint's own next-token layer as a drafter; see `models.nextn`."""

from __future__ import annotations

from pathlib import Path

from thalweg.models import catalog
from thalweg.models.interface import Target
from thalweg.sampling.draft_sampling import DraftSampling
from thalweg.spec.autoregressive import AutoregressiveDrafter
from thalweg.spec.drafter import Drafter


def build(target: Target, folder: Path, draft_sampling: DraftSampling) -> Drafter:
    """Raises CheckpointError where the model has no such layer."""
    return AutoregressiveDrafter(catalog.build_nextn(target), draft_sampling)
