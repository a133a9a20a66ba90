"""Rows to 8-bit codes: e4m3 with one scale for each row and 128 channels (DeepSeek-V3 report §3.3.2), or e4m3 and INT8
with one scale for each row. `rounded_rows` is written so that TorchScript reads it too, which has no e4m3.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from thalweg.kernels.fp8_block.ref import quantize_rows


def quantize(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """→ e4m3 [M, K], float32 scales [M, K / 128]. K a multiple of 128."""
    return quantize_rows(x_MK, 128, False)


class Activations(NamedTuple):
    """How a product rounds its inputs."""

    kind: str  # "e4m3" or "int8"
    group: int = 0  # columns that share a scale; 0: a row has one
    is_static: bool = False  # all rows have one, which the checkpoint tells


def rounded_rows(x_MK: Tensor, kind: str, group: int, inputs: Optional[Tensor]) -> Tensor:
    """[M, K] in x's dtype: what a product of quantized activations reads, code times scale.

    kind: "e4m3" or "int8". group: columns that share a scale; 0 is all. inputs: of static scales float32 [...], whose
    largest is the scale of every row; codes beyond the range saturate. Codes are rounded to nearest, ties to even.
    """
    is_int8 = kind == "int8"
    # a row of zeros gets a scale, too: as in SGLang's and vLLM's INT8 kernels, and as in fp8_block/ref.py
    limit, floor = (127.0, 1e-10) if is_int8 else (448.0, 1e-4)
    width = group if group > 0 else x_MK.size(1)
    x = x_MK.float().reshape(x_MK.size(0), x_MK.size(1) // width, width)
    if inputs is None:
        scale = x.abs().amax(2, True).clamp_min(floor) / limit
    else:
        scale = inputs.amax()
    x = (x / scale).clamp(-limit, limit)
    if is_int8:
        codes = x.round()
    else:  # three bits behind the first one, and none below 2^-9
        _, exponent = torch.frexp(x)
        step = torch.ldexp(torch.ones_like(x), exponent.clamp_min(-5) - 4)
        codes = (x / step).round() * step
    return (codes * scale).reshape(x_MK.shape).to(x_MK.dtype)
