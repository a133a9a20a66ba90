"""Weights of 4-bit or 8-bit codes with a scale for each row and group of columns, in plain torch.

kind: `int4` is code - 8, `uint4` is code - zero, `e2m1` is a float of 4 bits (OCP MX v1.0 §5.3.3), `int8` is two's
complement, `e4m3` is a float of 8 bits. Where a weight has `activations`, x is rounded to 8-bit codes before a product,
and so is what experts compute between theirs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.kernels.gemm.epilogue import PLAIN, Epilogue
from thalweg.kernels.gemm.ref import linear as plain_linear
from thalweg.kernels.quantize.ref import Activations, rounded_rows

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; codes 8 to 15 are their negatives
FOUR_BITS = ("int4", "uint4", "e2m1")


class Codes(NamedTuple):
    """A weight [..., N, K]: code · scale of its group · scale of its row. All contiguous.

    codes: uint8 [..., N, K / 2], the even column in the low half; of 8 bits int8 or float8_e4m3fn [..., N, K].
    """

    kind: str
    codes: Tensor
    scale: Tensor | None = None  # [..., N, K / group]: float32, bfloat16, float16, float8_e4m3fn or float8_e8m0fnu
    zero: Tensor | None = None  # uint8 [..., N, K / group], of uint4
    row: Tensor | None = None  # float32 [..., N]
    activations: Activations | None = None
    inputs: Tensor | None = None  # float32, whose largest is the static scale of x; shared by a stack

    @property
    def columns(self) -> int:
        """K."""
        return columns_of(self.kind, self.codes)

    @property
    def group(self) -> int:
        """Columns that share a scale; 0 where a row's scale is all."""
        return 0 if self.scale is None else self.columns // self.scale.shape[-1]

    def expert(self, number: int) -> Codes:
        """One weight of a stack."""
        scale, zero, row = (None if each is None else each[number] for each in (self.scale, self.zero, self.row))
        return self._replace(codes=self.codes[number], scale=scale, zero=zero, row=row)

    def rounded(self, x_MK: Tensor) -> Tensor:
        """x as products with this weight read it."""
        rule = self.activations
        return x_MK if rule is None else rounded_rows(x_MK, rule.kind, rule.group, self.inputs)


class KernelCodes(NamedTuple):
    """A weight [..., N, K] as memory holds it for the kernels; see `arranged`."""

    kind: str
    codes: Tensor  # [..., N, K]; of 4 bits uint8 [..., N, K / 2], words of 4 bytes
    scale: Tensor | None = None  # [..., K / group, N]
    zero: Tensor | None = None  # uint8 [..., K / group, N]
    row: Tensor | None = None  # float32 [..., N]
    activations: Activations | None = None
    inputs: Tensor | None = None  # see `Codes`

    @property
    def columns(self) -> int:
        """K."""
        return columns_of(self.kind, self.codes)

    @property
    def group(self) -> int:
        """Columns that share a scale; 0 where a row's scale is all."""
        return 0 if self.scale is None else self.columns // self.scale.shape[-2]


def columns_of(kind: str, codes: Tensor) -> int:
    """K of [..., N, K], or of two codes a byte."""
    return codes.shape[-1] * (2 if kind in FOUR_BITS else 1)


def arranged(weight: Codes) -> KernelCodes:
    """For the kernels. Of 4 bits: nibbles i and i + 4 of word w of a row's block of 128 columns are columns 32 i + 2 w
    and the next, so that one mask leaves both where bf16 numbers have them. If 128 does not divide K, a block has 64
    columns, 16 i + 2 w.

    Of INT4 with e4m3 activations: byte b of a block of 128 columns has columns b and 64 + b, the first in its low half;
    the high bit of a code is the sign, and the others are v, or -1 - v of a negative v.
    """
    kind, codes, scale, zero, row, activations, inputs = weight
    if kind == "int4" and activations is not None:
        nibbles = unpack_nibbles(codes)
        nibbles = torch.where(nibbles < 8, 15 - nibbles, nibbles - 8)
        halves = nibbles.reshape(*nibbles.shape[:-1], -1, 2, 64)
        codes = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)
    elif kind in FOUR_BITS:
        nibbles, words = unpack_nibbles(codes), 8 if weight.columns % 128 else 16
        pairs = nibbles.reshape(*nibbles.shape[:-1], -1, 4, words, 2)  # [..., N, block, i, word, column]
        codes = pack_nibbles(pairs.movedim((-1, -3), (-2, -1)).flatten(-4))  # [..., N, block, word, column, i]
    scale, zero = (None if each is None else each.transpose(-1, -2).contiguous() for each in (scale, zero))
    return KernelCodes(kind, codes, scale, zero, row, activations, inputs)


def pack_nibbles(codes_NK: Tensor) -> Tensor:
    """uint8 [..., N, K / 2] of codes 0 to 15, the even column in the low half."""
    codes = codes_NK.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(bytes_NB: Tensor) -> Tensor:
    """uint8 [..., N, 2 B] of codes 0 to 15."""
    return torch.stack((bytes_NB & 15, bytes_NB >> 4), -1).flatten(-2)


def dequantize(weight: Codes, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., N, K]; groups are whole."""
    kind, codes, scale, zero, row, *_ = weight
    numbers = codes.to(dtype) if kind not in FOUR_BITS else unpack_nibbles(codes).to(dtype)
    if kind == "e2m1":
        table = torch.tensor(E2M1 + tuple(-x for x in E2M1), dtype=dtype, device=codes.device)
        numbers = table[unpack_nibbles(codes).long()]
    elif kind == "int4":
        numbers = numbers - 8
    groups = numbers if scale is None else numbers.reshape(*scale.shape, -1)
    if zero is not None:
        groups = groups - zero.to(dtype).unsqueeze(-1)
    if scale is not None:
        groups = (groups * scale.to(dtype).unsqueeze(-1)).flatten(-2)
    return groups if row is None else groups * row.to(dtype).unsqueeze(-1)


def linear(x_MK: Tensor, weight: Codes, epilogue: Epilogue = PLAIN) -> Tensor:
    """y [M, N] = x Wᵀ, summed in float32."""
    if epilogue.dtype is None:
        epilogue = epilogue._replace(dtype=x_MK.dtype)
    return plain_linear(weight.rounded(x_MK.float()), dequantize(weight), epilogue)


def add_experts_(out_TH: Tensor, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, w13: Codes, w2: Codes) -> Tensor:
    """out[t] += Σ_k weights[t, k] · expert ids[t, k] of x[t]; in place, returns out. w13 [N, 2 I, H]: gate rows, then
    up rows; w2 [N, H, I]. ids of N or more are none. Sums in out's dtype.
    """
    seen_TH = w13.rounded(x_TH.float()).to(out_TH.dtype)
    for expert in range(len(w13.codes)):
        token, k = (ids_TK == expert).nonzero(as_tuple=True)
        gate_up, down = (dequantize(stack.expert(expert), out_TH.dtype) for stack in (w13, w2))
        gate, up = (seen_TH[token] @ gate_up.t()).chunk(2, 1)
        inner = w2.rounded((F.silu(gate) * up).to(x_TH.dtype).float()).to(out_TH.dtype)
        out_TH.index_add_(0, token, inner @ down.t() * weights_TK[token, k].to(out_TH.dtype)[:, None])
    return out_TH
