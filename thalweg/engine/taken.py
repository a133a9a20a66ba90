"""How much memory an engine has really taken, written into its report: what `thalweg plan --check` compares its prediction with."""

from __future__ import annotations

import json

import msgspec
from torch import Tensor, nn

from thalweg.engine.settings import EngineSettings
from thalweg.models.token_by_token import TokenByToken
from thalweg.runner.runner import Runner

# why each is what it is; on a CPU nothing is set aside for steps and there are no graphs
REASONS = {
    "weights": "measured: of the model as it is loaded",
    "kv": "measured: of all planes, the null page included",
    "slots": "measured: state of the requests",
    "step": "measured: what the largest step took while it ran",
    "graphs": "measured: what recording all CUDA graphs took",
    "beside": "measured: of the GPU, what neither the above nor anything free accounts for: the driver's context, compiled kernels, libraries",
}


def taken(settings: EngineSettings, runner: Runner, **others: int) -> EngineSettings:
    """The settings with a report that tells the bytes of weights, the drafter's too, KV cache and slots, and of `others`, by the names in
    `REASONS`."""
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
    report = json.loads(settings.report)
    for name, value in found.items():
        said = {"name": f"memory_{name}", "value": value, "source": "auto", "reason": REASONS[name]}
        report[f"memory_{name}"] = said
    return msgspec.structs.replace(settings, report=json.dumps(report))


def _bytes(tensors: list[Tensor]) -> int:
    """Of their memory, that which several share counted once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())
