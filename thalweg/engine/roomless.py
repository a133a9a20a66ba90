"""A drafter that finds no room is left out: it only accelerates, so the engine starts without it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch

from thalweg.core.errors import NoRoom
from thalweg.core.tree import CHAIN
from thalweg.engine.settings import EngineSettings

log = logging.getLogger("thalweg.engine")

LEFT_OUT = "there is no room for the drafter, and decoding goes on without it: %s"
NO_MEMORY = "can't allocate memory"  # of torch's allocator on a CPU

T = TypeVar("T")


def with_or_without(build: Callable[[EngineSettings], T], settings: EngineSettings) -> T:
    """What `build` makes of these settings, or of the same without the drafter where memory is too small for it. Raises what `build` does."""
    try:
        return build(settings)
    except (NoRoom, MemoryError, RuntimeError) as error:
        if not settings.drafter or not _is_room(error):
            raise
        why = str(error).partition("\n")[0]
    # out here the error is gone, and what its frames held with it
    log.error(LEFT_OUT, why)
    return build(undrafted(settings, why))


def undrafted(settings: EngineSettings, why: str) -> EngineSettings:
    """The settings of plain decoding, with a report that says so."""
    report = json.loads(settings.report)
    name = "speculative_algorithm"
    report[name] = {"name": name, "value": "NONE", "source": "auto", "reason": f"no room for it: {why}"}
    off = {
        "drafter": "",
        "drafter_path": "",
        "width": 0,
        "times": (),
        "tree": CHAIN,
        "acceptance": "race",
        "imposed": 0.0,
    }
    return msgspec.structs.replace(settings, report=json.dumps(report), **off)


def _is_room(error: Exception) -> bool:
    """Whether memory was too small; a RuntimeError of torch may be anything."""
    return isinstance(error, NoRoom | MemoryError | torch.OutOfMemoryError) or NO_MEMORY in str(error)
