"""Starting without the drafter: it only accelerates, so an engine starts without one that does not fit into memory,
cannot be captured, or has weights that are not numbers.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from thalweg.config.engine import EngineConfig
from thalweg.core.errors import InsufficientMemory, is_out_of_memory
from thalweg.core.report import START_UP, Decision
from thalweg.runner.drafting import DrafterError

log = logging.getLogger("thalweg.engine")

NONE = "NONE"  # `speculative_algorithm` without a drafter
LEFT_OUT = "there is no room for the drafter, and decoding goes on without it: %s"
USELESS = "the drafter is left out, and decoding goes on without it: %s"

T = TypeVar("T")


def build_or_drop_drafter(build: Callable[[EngineConfig], T], config: EngineConfig) -> T:
    """Calls `build` with this configuration, and if the drafter fails or does not fit, with one without a drafter."""
    try:
        return build(config)
    except DrafterError as error:
        log.error(USELESS, error, exc_info=error.__cause__)
        why = _first_line(error)
    except (InsufficientMemory, MemoryError, RuntimeError) as error:
        if config.speculative_algorithm == NONE or not is_out_of_memory(error):
            raise
        log.error(LEFT_OUT, _first_line(error))
        why = f"no room for it: {_first_line(error)}"
    # after the except block the error's frames, and the memory that they hold, are gone
    gc.collect()
    torch.cuda.empty_cache()
    return build(without_drafter(config, why))


def without_drafter(config: EngineConfig, why: str) -> EngineConfig:
    """The configuration of plain decoding. The decisions about speculation no longer apply."""
    name = "speculative_algorithm"
    others = [key for key in config.report.current() if key.startswith("speculative_") and key != name]
    return config.started(
        [Decision(name, NONE, START_UP, why), *(Decision(key, None, START_UP, "no drafter") for key in others)],
        drafter_left_out=True,
        speculative_algorithm=NONE,
        speculative_draft_model_path="",
        speculative_num_steps=0,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=0,
        speculative_adaptive=False,
        speculative_step_times=(),
        speculative_acceptance="race",
        speculative_simulate_accept_length=0.0,
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
