"""KV cache storage: what a model keeps of each token, one contiguous plane for each kind and layer, all behind one page
table.

A page is `PAGE` tokens. Page 0 is the null page, where padding writes. Who owns a page is unknown here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thalweg.core.plan import PAGE

# A number of 4 bits of exponent and 3 of fraction, times the plane's scale. The error is relative, 6 % at most and 2.6
# % in the mean square, so the scale matters only for values far below or above it.
FP8 = torch.float8_e4m3fn
CODECS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": FP8}
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One kind of vector that one layer keeps of each token."""

    name: str  # "latent", "index", "key" or "value"
    layer: int
    page_bytes: int
    shard: str  # "replicated" on every rank of a tensor-parallel group, or split by "heads"
    codec: str  # a key of `CODECS`: the type of the vectors in a page


def vector_plane(name: str, layer: int, dim: int, dtype: torch.dtype, shard: str = "replicated") -> PlaneSpec:
    """A plane of one `dim`-vector of `dtype` for each token."""
    codec = next(codec for codec, codec_dtype in CODECS.items() if codec_dtype == dtype)
    return PlaneSpec(name, layer, PAGE * dim * dtype.itemsize, shard, codec)


def kv_cache_dtype(codec: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a KV cache. codec: a key of `CODECS`, or "" for the model's own type, `dtype`."""
    return CODECS[codec] if codec else dtype


def encode(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """x as a plane of this type stores it: rounded to nearest; for FP8 x / scale, saturated."""
    if x.dtype == dtype:
        return x
    if scale is not None:
        x = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def decode(stored: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """The inverse of `encode`, in `dtype`."""
    if stored.dtype == dtype:
        return stored
    return stored.to(dtype) if scale is None else (stored.float() * scale).to(dtype)


class Planes:
    """Storage of `pages` pages for each spec, zeroed so that the null page is finite.

    The scale of an FP8 plane is 1 unless the checkpoint has one (`weights.loader`): normed latents, and keys and
    values of normed states, are of a size that FP8 holds.
    """

    def __init__(self, specs: tuple[PlaneSpec, ...], pages: int, device: torch.device | str = "cpu") -> None:
        self.specs, self.pages, self.device = specs, pages, torch.device(device)
        self.bytes: dict[tuple[str, int], Tensor] = {}
        self._tokens: dict[tuple[str, int], Tensor] = {}
        self._paged: dict[tuple[str, int], Tensor] = {}
        self._scales: dict[tuple[str, int], Tensor] = {}
        for spec in specs:
            key, dtype = (spec.name, spec.layer), CODECS[spec.codec]
            self.bytes[key] = torch.zeros(pages, spec.page_bytes, dtype=torch.uint8, device=device)
            self._paged[key] = self.bytes[key].view(dtype).view(pages, PAGE, -1)
            self._tokens[key] = self._paged[key].view(pages * PAGE, -1)
            if dtype == FP8:
                self._scales[key] = torch.ones(1, dtype=torch.float32, device=device)

    def tokens(self, name: str, layer: int) -> Tensor:
        """[pages * PAGE, dim]: row page * PAGE + offset holds one token's vector as stored."""
        return self._tokens[name, layer]

    def paged(self, name: str, layer: int) -> Tensor:
        """[pages, PAGE, dim], the same memory."""
        return self._paged[name, layer]

    def scale(self, name: str, layer: int) -> Tensor | None:
        """float32 [1]: the factor of an FP8 plane's numbers; None for other planes."""
        return self._scales.get((name, layer))

    @property
    def has_fp8(self) -> bool:
        return bool(self._scales)

    def write(self, name: str, layer: int, rows_T: Tensor, x_TD: Tensor) -> None:
        """Stores vectors of any floating type in these rows of `tokens`. They are made finite: attention multiplies
        masked values by 0, and a NaN of one request would reach the next owner of its page.
        """
        plane = self._tokens[name, layer]
        if plane.dtype == FP8:  # torch has no index_copy_ of it on a CPU
            stored = encode(torch.nan_to_num(x_TD), FP8, self.scale(name, layer)).view(torch.uint8)
            plane = plane.view(torch.uint8)
        else:  # in the plane's type: float32's largest number is infinite in bfloat16
            stored = torch.nan_to_num(x_TD.to(plane.dtype))
        plane.index_copy_(0, rows_T, stored)

    def read(self, name: str, layer: int, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers taken from this plane, decoded to `dtype`."""
        return decode(stored, dtype, self.scale(name, layer))

    def layers_from(self, first: int) -> Planes:
        """The planes of layers `first` and up, renumbered from 0: the same memory."""
        part = Planes((), self.pages, self.device)
        part.specs = tuple(replace(spec, layer=spec.layer - first) for spec in self.specs if spec.layer >= first)
        for field in ("bytes", "_tokens", "_paged", "_scales"):
            tensors = {(name, layer - first): x for (name, layer), x in vars(self)[field].items() if layer >= first}
            setattr(part, field, tensors)
        return part

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that `tokens` and `paged` return."""
        return (*self._tokens.values(), *self._paged.values())

    @staticmethod
    def page_cost(specs: tuple[PlaneSpec, ...]) -> int:
        """Bytes of one page in all planes together."""
        return sum(spec.page_bytes for spec in specs)
