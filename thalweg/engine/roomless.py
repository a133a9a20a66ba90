"""A drafter that finds no room, cannot be recorded or holds no numbers is left out: it only accelerates, so the engine starts without it."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec
import torch

from thalweg.core.errors import InsufficientMemory, is_out_of_memory
from thalweg.core.tree import CHAIN
from thalweg.engine.settings import EngineSettings
from thalweg.runner.drafting import DrafterFails

log = logging.getLogger("thalweg.engine")

LEFT_OUT = "there is no room for the drafter, and decoding goes on without it: %s"
USELESS = "the drafter is left out, and decoding goes on without it: %s"

T = TypeVar("T")


def with_or_without(build: Callable[[EngineSettings], T], settings: EngineSettings) -> T:
    """What `build` makes of these settings, or of the same without the drafter where memory is too small for it, or where it fails. Raises what
    `build` does."""
    try:
        return build(settings)
    except DrafterFails as error:
        log.error(USELESS, error, exc_info=error.__cause__)
        why = _first_line(error)
    except (InsufficientMemory, MemoryError, RuntimeError) as error:
        if not settings.drafter or not is_out_of_memory(error):
            raise
        log.error(LEFT_OUT, _first_line(error))
        why = f"no room for it: {_first_line(error)}"
    # out here the error is gone, and what its frames held with it; the second build needs the memory of the first
    gc.collect()
    torch.cuda.empty_cache()
    return build(undrafted(settings, why))


def undrafted(settings: EngineSettings, why: str) -> EngineSettings:
    """The settings of plain decoding, with a report that says so."""
    report = {key: one for key, one in json.loads(settings.report).items() if not key.startswith("speculative_")}
    name = "speculative_algorithm"
    report[name] = {"name": name, "value": "NONE", "source": "auto", "reason": why}
    off = {
        "drafter": "",
        "drafter_path": "",
        "left_out": True,
        "width": 0,
        "times": (),
        "tree": CHAIN,
        "acceptance": "race",
        "imposed": 0.0,
    }
    return msgspec.structs.replace(settings, report=json.dumps(report), **off)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
