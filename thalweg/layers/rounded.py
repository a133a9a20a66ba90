"""Layers in plain torch whose products round activations to 8 bits, and static scales of experts' inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.config.model import MoeFacts
from thalweg.kernels.gemm.prefetch import prefetch_for
from thalweg.kernels.quantize.ref import Activations, rounded_rows
from thalweg.layers.factory import LayerFactory
from thalweg.layers.linear import LinearLayer
from thalweg.layers.module import Module, parameter
from thalweg.quant.scheme import TensorSpec
from thalweg.quant.w4afp8 import INPUT_SCALE, W4aFp8


class RoundedLinear(LinearLayer):
    """weight [out, in], whose products round their inputs to 8-bit codes as the scheme of each part says."""

    def __init__(
        self,
        layers: LayerFactory,
        widths: Sequence[int],
        inputs: int,
        rules: Sequence[Activations | None],
        is_partial: bool = False,
    ) -> None:
        """rules: of each part."""
        super().__init__(widths, is_partial)
        self.weight = parameter(sum(widths), inputs, dtype=layers.dtype, device=layers.device)
        self._transposed, self._prefetch = self.weight.data.t(), prefetch_for(self.weight)
        is_one = len(set(rules)) == 1  # then one product computes all parts
        self._rules, self._widths = (rules[:1], [sum(widths)]) if is_one else (rules, list(widths))

    def forward(self, x: Tensor) -> Tensor:
        self._prefetch(self._transposed)
        parts = zip(self._rules, torch.split(self._transposed, self._widths, 1), strict=True)
        products = [
            torch.mm(x if rule is None else rounded_rows(x, rule.kind, rule.group, None), w) for rule, w in parts
        ]
        return products[0] if len(products) == 1 else torch.cat(products, 1)

    def add_(self, h: Tensor, x: Tensor) -> Tensor:
        return h.add_(self.forward(x))

    def swiglu(self, x: Tensor) -> Tensor:
        gate, up = self.forward(x).chunk(2, -1)
        return F.silu(gate).mul_(up)


class InputScales(Module):
    """Static scales of what the experts of a layer read, of all experts on every rank: float32 [3, E], of gate, up and
    down. The largest count.
    """

    def __init__(self, layers: LayerFactory, name: str, moe: MoeFacts, hidden: int) -> None:
        super().__init__()
        self.scales = parameter(3, moe.experts, dtype=torch.float32, device=layers.device)
        inter = moe.intermediate
        for part, (half, *shape) in enumerate(
            (("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter))
        ):
            for expert in range(moe.experts):
                weight = TensorSpec(f"{name}.{expert}.{half}_proj.weight", tuple(shape), layers.published)
                scheme = layers.schemes.of(weight)
                assert isinstance(scheme, W4aFp8), "no other format has static scales that are read"
                published, into = scheme.named(weight, INPUT_SCALE), (part, slice(expert, expert + 1))
                self.loads("scales", published, (1,), torch.float32, into=into)

    def of_products(self) -> tuple[Tensor, Tensor]:
        """Of gate and up; of down."""
        return self.scales[:2], self.scales[2:]
