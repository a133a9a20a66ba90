"""torch.compile of a reference model's norms and MLPs: the parts whose work depends on nothing but their input.

A knob for comparisons: a decode step of the bundled model took 4.2 ms of CPU with it, 3.3 without, and 1.9 recorded by
`models.traced` (torch 2.13), since what is compiled checks its input at every call. Kernels of our own are compiled
already, and attention and experts choose what they read by values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thalweg.kernels.norm.ref import rms_norm
from thalweg.layers.linear import Mlp
from thalweg.layers.reference_linear import Linear, RMSNorm
from thalweg.layers.residual import ResidualStream, SingleStream
from thalweg.models.decoder import Model

TOKENS = (1, 2, 16)  # one token is compiled apart from many


@torch.inference_mode()
def compile_parts(model: Model) -> None:
    """Compiles, one program for all parts of a kind and any number of tokens, and runs each part once, so that no
    request waits for that.
    """
    assert isinstance(model, nn.Module)
    norm, add_mlp = torch.compile(rms_norm, dynamic=True), torch.compile(_add_mlp, dynamic=True)

    def compiled_norm(part: RMSNorm) -> None:
        given = part._operands
        part.forward = lambda x: norm(x, *given)  # type: ignore[method-assign]
        for tokens in TOKENS:
            part.forward(zeros(tokens, len(part.weight)))

    def compiled_mlp(part: Mlp) -> None:
        up, down = part.gate_up, part.down
        assert isinstance(up, Linear) and isinstance(down, Linear)
        given = up.weight.data, up.bias, down.weight.data, down.bias

        def add_to(h: ResidualStream, x: Tensor, real_T: Tensor | None = None) -> None:
            add_mlp(h.value(), x, *given)

        part.add_to = add_to  # type: ignore[method-assign]
        for tokens in TOKENS:
            hidden = zeros(tokens, up.weight.shape[1])
            part.add_to(SingleStream(hidden.clone()), hidden)

    def zeros(tokens: int, width: int) -> Tensor:
        return torch.zeros(tokens, width, dtype=model.factory.dtype, device=model.factory.device)

    for part in model.modules():
        if isinstance(part, RMSNorm):
            compiled_norm(part)
        elif isinstance(part, Mlp):
            compiled_mlp(part)


def _add_mlp(
    h_TH: Tensor, x_TH: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None
) -> Tensor:
    """What `layers.linear.Mlp.add_` computes."""
    gate, up = F.linear(x_TH, gate_up, gate_up_bias).chunk(2, -1)
    return h_TH.add_(F.linear(F.silu(gate) * up, down, down_bias))
