"""How much of a step its two forwards are: the target's over the drafts that it verifies, and the drafter's (where they
are recorded, all that it proposes). What is left is overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from thalweg.engine.local import LocalEngine
from thalweg.engine.settings import EngineSettings
from thalweg.engine.widths import clock
from thalweg.spec.unroll import Unrolled

VERIFY, DRAFT = "verify", "draft"


class Forwards:
    """Seconds by what they went into, while `timed`. The device is waited for before and behind each forward, which lengthens steps, and in them what
    is not a forward: the overhead that is found is an upper bound."""

    def __init__(self, settings: EngineSettings) -> None:
        self.clock, self.cuda = clock(settings), settings.device == "cuda"
        self.seconds = {VERIFY: 0.0, DRAFT: 0.0}

    @contextmanager
    def timed(self, engine: LocalEngine) -> Iterator[Forwards]:
        """The engine's runner and drafter with a watch around what they compute."""
        runner, drafter = engine.runner, engine.runner.drafting.drafter
        recorded = {id(one): one for one in (runner.graphs.drafts, runner.groves.drafts)}  # one may be both
        places: list[tuple[Any, str, str]] = [(runner, "forward", VERIFY)]
        places += [(one, "propose", DRAFT) for one in recorded.values()]
        if isinstance(drafter, Unrolled):
            places += [(drafter.steps, "forward", DRAFT), (drafter.head, "logits", DRAFT)]
        for owner, name, part in places:
            setattr(owner, name, self._watched(getattr(owner, name), part))
        try:
            yield self
        finally:
            for owner, name, _ in places:
                delattr(owner, name)  # what the class has is there again

    def now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if self.cuda:
            torch.cuda.synchronize()
        return self.clock()

    def _watched(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        def watched(*args: Any, **more: Any) -> Any:
            begun = self.now()
            done = work(*args, **more)
            self.seconds[part] += self.now() - begun
            return done

        return watched
