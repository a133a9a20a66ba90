"""Places in an engine's queue, kept for a request that submits its sequences one after the other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Room:
    """left: sequences that have not been submitted yet."""

    left: int
