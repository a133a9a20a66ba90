"""What is done to a rank between two steps, with none in flight: other weights, and profiles."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch import nn

from thalweg.core.errors import CheckpointError, InvalidRequest
from thalweg.core.messages import UpdateWeights
from thalweg.engine.profile import Hands, Profiler
from thalweg.models.one_by_one import OneByOne
from thalweg.runner.runner import Runner
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors
from thalweg.weights.verify import block_of, verify

log = logging.getLogger("thalweg.engine")


class Workshop:
    """The `loop.Workshop` of a rank. Weights are replaced in place, which recorded steps follow, a CPU's and CUDA graphs."""

    def __init__(self, runner: Runner, hands: Hands) -> None:
        self.profiler = Profiler(hands, runner.planes.device.type == "cuda")
        self.facts = runner.model.facts
        self.model = runner.model.model if isinstance(runner.model, OneByOne) else runner.model
        self.drafting = runner.drafting

    def weights(self, wish: UpdateWeights, alive: Callable[[], None]) -> Callable[[], tuple[int, int]]:
        """Reads all headers; what it returns writes, and says how many tensors of how many. alive: called for every tensor. Raises InvalidRequest."""
        modules, folder = (self.model, *self.drafting.drafter.modules()), Path(wish.path)

        def told(done: int, total: int) -> None:
            alive()

        with ExitStack() as opening:
            try:
                block = block_of(folder, self.facts)
                stream = opening.enter_context(Safetensors(folder))
                found = [
                    verify(_module(one), one.table(), stream, block, told, needed=one is self.model) for one in modules
                ]
            except (CheckpointError, OSError) as wrong:
                raise InvalidRequest("model_path", f"{wrong}; nothing was changed") from wrong
            opened = opening.pop_all()
        held, of = (sum(counts) for counts in zip(*found, strict=True))

        def write() -> tuple[int, int]:
            with opened:
                for one in modules:
                    load(_module(one), one.table(), stream, block, told, partial=True)
            log.info("%d of %d tensors replaced, from %s", held, of, folder)
            return held, of

        return write


def _module(model: object) -> nn.Module:
    assert isinstance(model, nn.Module), "a model is a module: its parameters are what is filled"
    return model
