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
from thalweg.models.catalog import read_facts
from thalweg.models.token_by_token import TokenByToken
from thalweg.runner.runner import Runner
from thalweg.weights.loader import count_loadable, load
from thalweg.weights.stream import Safetensors
from thalweg.weights.update import quantization_of

log = logging.getLogger("thalweg.engine")


class AdminOperations:
    """The `loop.AdminOperations` of a rank. Weights are replaced in place, which recorded steps follow, a CPU's and CUDA
    graphs.
    """

    def __init__(self, runner: Runner, hands: Hands) -> None:
        self.profiler = Profiler(hands, runner.planes.device.type == "cuda")
        self.facts = runner.model.facts
        self.model = runner.model.model if isinstance(runner.model, TokenByToken) else runner.model
        self.drafting = runner.drafting

    def weights(self, wish: UpdateWeights, alive: Callable[[], None]) -> Callable[[], tuple[int, int]]:
        """Reads all headers; what it returns writes, and says how many tensors of how many. alive: called for every
        tensor. Raises InvalidRequest.
        """
        modules, folder = (self.model, *self.drafting.drafter.modules()), Path(wish.path)

        def told(done: int, total: int) -> None:
            alive()

        with ExitStack() as opening:
            try:
                quantization = quantization_of(folder, self.facts, read_facts)
                stream = opening.enter_context(Safetensors(folder))
                found = [
                    count_loadable(_module(one), one.table(), stream, quantization, one is self.model)
                    for one in modules
                ]
            except (CheckpointError, OSError) as wrong:
                raise InvalidRequest("model_path", f"{wrong}; nothing was changed") from wrong
            opened = opening.pop_all()
        held, of = (sum(counts) for counts in zip(*found, strict=True))

        def write() -> tuple[int, int]:
            with opened:
                for one in modules:
                    load(_module(one), one.table(), stream, quantization, told, is_partial=True)
            log.info("%d of %d tensors replaced, from %s", held, of, folder)
            return held, of

        return write


def _module(model: object) -> nn.Module:
    assert isinstance(model, nn.Module), "a model is a module: its parameters are what is filled"
    return model
