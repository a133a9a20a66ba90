"""How much memory an engine has really taken, written into its report: what `thalweg plan --check` compares its
prediction with.
"""

from __future__ import annotations

from torch import Tensor, nn

from thalweg.config.engine import EngineConfig
from thalweg.core.report import START_UP, Decision
from thalweg.models.token_by_token import TokenByToken
from thalweg.runner.runner import Runner

# why each is what it is; on a CPU nothing is set aside for steps and there are no graphs
REASONS = {
    "weights": "measured: of the model as it is loaded",
    "kv": "measured: of all planes, the null page included",
    "slots": "measured: state of the requests",
    "step": "measured: what the largest step took while it ran",
    "graphs": "measured: what recording all CUDA graphs took",
    "beside": (
        "measured: of the GPU, what neither the above nor anything free accounts for: the driver's context, compiled"
        " kernels, libraries"
    ),
}


def taken(config: EngineConfig, runner: Runner, **others: int) -> EngineConfig:
    """The configuration with a report of the bytes of weights (the drafter's included), KV cache and slots, and of
    `others`, by the names in `REASONS`.
    """
    model, planes, slots = runner.model, runner.planes, runner.slots
    plain = model.model if isinstance(model, TokenByToken) else model
    drafter = runner.drafting.drafter
    modules = [one for one in (plain, *drafter.modules(), *drafter.own()) if isinstance(one, nn.Module)]
    found = {
        "weights": _bytes([tensor for one in modules for tensor in (*one.parameters(), *one.buffers())]),
        "kv": _bytes(list(planes.bytes.values())),
        "slots": _bytes(
            [value for value in (*vars(slots).values(), *slots.extra.values()) if isinstance(value, Tensor)]
        ),
        **others,
    }
    return config.started(Decision(f"memory_{name}", value, START_UP, REASONS[name]) for name, value in found.items())


def _bytes(tensors: list[Tensor]) -> int:
    """Of their memory, that which several share counted once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())
