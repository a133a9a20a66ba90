"""Planes of bytes behind one page table (DESIGN §3): what a model keeps of each token, one contiguous storage per plane
and layer.

A page is `PAGE` tokens; page 0 is the null page, where padding writes. Nothing here knows which request owns a page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thalweg.core.plan import PAGE

# FP8 is a number of 4 bits of exponent and 3 of fraction, times the plane's scale. What lies far below or above 1 in
# units of the scale is lost; in between the scale does not matter, since the error is relative: 6 % at most, 2.6 % in
# the mean square.
FP8 = torch.float8_e4m3fn
CODECS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8_e4m3": FP8}
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """name: what it holds ("latent", "index", "key", "value"). layer: which layer's. page_bytes: size of a page.
    shard: "replicated" on every rank of a tensor-parallel group, or split by "heads". codec: how a page's bytes are
    read, one of `CODECS`: token-major vectors of that type.
    """

    name: str
    layer: int
    page_bytes: int
    shard: str
    codec: str


def vectors(name: str, layer: int, dim: int, dtype: torch.dtype, shard: str = "replicated") -> PlaneSpec:
    """A plane of one `dim`-vector of `dtype` for each token."""
    codec = next(codec for codec, plain in CODECS.items() if plain == dtype)
    return PlaneSpec(name, layer, PAGE * dim * dtype.itemsize, shard, codec)


def kept(kv: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a KV cache. kv: one of `CODECS`, or "" for the model's own, which is `dtype`."""
    return CODECS[kv] if kv else dtype


def encoded(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """What a plane of this type holds of x: the nearest value; of FP8 the nearest of x / scale, saturated."""
    if x.dtype == dtype:
        return x
    if scale is not None:
        x = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def decoded(stored: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """The inverse of `encoded`, in `dtype`."""
    if stored.dtype == dtype:
        return stored
    return stored.to(dtype) if scale is None else (stored.float() * scale).to(dtype)


class Planes:
    """Storage of `pages` pages for each spec, zeroed, so that what lies in the null page is finite. An FP8 plane's
    scale is 1 unless the checkpoint has one (`weights.cache_scales`): what is kept are normed latents, and keys and
    values of projections of normed states, all of a size that FP8 holds.
    """

    def __init__(self, specs: tuple[PlaneSpec, ...], pages: int, device: torch.device | str = "cpu") -> None:
        self.specs, self.pages, self.device = specs, pages, torch.device(device)
        self.bytes: dict[tuple[str, int], Tensor] = {}
        self._tokens: dict[tuple[str, int], Tensor] = {}
        self._paged: dict[tuple[str, int], Tensor] = {}
        self._scales: dict[tuple[str, int], Tensor] = {}
        for spec in specs:
            storage = torch.zeros(pages, spec.page_bytes, dtype=torch.uint8, device=device)
            self.bytes[spec.name, spec.layer] = storage
            self._paged[spec.name, spec.layer] = storage.view(CODECS[spec.codec]).view(pages, PAGE, -1)
            self._tokens[spec.name, spec.layer] = self._paged[spec.name, spec.layer].view(pages * PAGE, -1)
            if CODECS[spec.codec] == FP8:
                self._scales[spec.name, spec.layer] = torch.ones(1, dtype=torch.float32, device=device)

    def tokens(self, name: str, layer: int) -> Tensor:
        """[pages * PAGE, dim]: row page * PAGE + offset is one token's vector, as it is stored."""
        return self._tokens[name, layer]

    def paged(self, name: str, layer: int) -> Tensor:
        """[pages, PAGE, dim], the same memory."""
        return self._paged[name, layer]

    def scale(self, name: str, layer: int) -> Tensor | None:
        """float32 [1]: what the numbers of an FP8 plane are multiplied by; None for other planes."""
        return self._scales.get((name, layer))

    @property
    def scaled(self) -> bool:
        """Whether any plane holds FP8."""
        return bool(self._scales)

    def write(self, name: str, layer: int, rows_T: Tensor, x_TD: Tensor) -> None:
        """Stores vectors of any floating type in these rows of `tokens`, made finite: what a masked place holds is
        multiplied by 0, and a NaN of one request would reach the next that gets its page.
        """
        plane = self._tokens[name, layer]
        if plane.dtype == FP8:  # which torch does not copy by index on a CPU
            stored = encoded(torch.nan_to_num(x_TD), FP8, self.scale(name, layer)).view(torch.uint8)
            plane = plane.view(torch.uint8)
        else:  # in the plane's type: float32's largest number is no longer finite in bfloat16
            stored = torch.nan_to_num(x_TD.to(plane.dtype))
        plane.index_copy_(0, rows_T, stored)

    def read(self, name: str, layer: int, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """What was stored, in `dtype`, of numbers that were taken from this plane."""
        return decoded(stored, dtype, self.scale(name, layer))

    def behind(self, first: int) -> Planes:
        """The planes of the layers from `first` on, numbered from 0: the same memory."""
        part = Planes((), self.pages, self.device)
        part.specs = tuple(replace(spec, layer=spec.layer - first) for spec in self.specs if spec.layer >= first)
        for name in ("bytes", "_tokens", "_paged", "_scales"):
            held = {(kind, layer - first): one for (kind, layer), one in vars(self)[name].items() if layer >= first}
            setattr(part, name, held)
        return part

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that `tokens` and `paged` return."""
        return (*self._tokens.values(), *self._paged.values())

    @staticmethod
    def page_cost(specs: tuple[PlaneSpec, ...]) -> int:
        """Bytes that one page takes in all planes together."""
        return sum(spec.page_bytes for spec in specs)
