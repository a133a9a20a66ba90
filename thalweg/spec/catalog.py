"""Which drafter a name stands for. To add one: a file and a row here."""

from __future__ import annotations

from typing import Callable

from thalweg.models import catalog
from thalweg.models.base import Model
from thalweg.spec.drafter import NO_DRAFTER, Drafter
from thalweg.spec.nextn import NextNDrafter
from thalweg.spec.ngram import NgramDrafter

DRAFTERS: dict[str, Callable[[Model], Drafter]] = {
    "": lambda target: NO_DRAFTER,
    "ngram": lambda target: NgramDrafter(),
    "nextn": lambda target: NextNDrafter(catalog.build_nextn(target)),
}


def build_drafter(name: str, target: Model) -> Drafter:
    """The empty drafter behind this model; a loader fills it. Raises CheckpointError where the checkpoint has not what it needs."""
    return DRAFTERS[name](target)
