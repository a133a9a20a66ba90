"""Planes of bytes behind one page table (DESIGN §3): what a model keeps of each token, one contiguous storage per plane and layer.

A page is `PAGE` tokens; page 0 is the null page, where padding writes. Nothing here knows which request owns a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thalweg.core.plan import PAGE

CODECS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """name: what it holds ("latent", "index", "key", "value"). layer: which layer's. page_bytes: size of a page.
    shard: "replicated" on every rank of a tensor-parallel group, or split by "heads". codec: how a page's bytes are read;
    "float32" and "bfloat16" are token-major vectors of that type."""

    name: str
    layer: int
    page_bytes: int
    shard: str
    codec: str


def vectors(name: str, layer: int, dim: int, dtype: torch.dtype, shard: str = "replicated") -> PlaneSpec:
    """A plane of one `dim`-vector of `dtype` for each token."""
    codec = next(codec for codec, plain in CODECS.items() if plain == dtype)
    return PlaneSpec(name, layer, PAGE * dim * dtype.itemsize, shard, codec)


class Planes:
    """Storage of `pages` pages for each spec, zeroed, so that what lies in the null page is finite."""

    def __init__(self, specs: tuple[PlaneSpec, ...], pages: int, device: torch.device | str = "cpu") -> None:
        self.specs, self.pages, self.device = specs, pages, torch.device(device)
        self.bytes: dict[tuple[str, int], Tensor] = {}
        self._tokens: dict[tuple[str, int], Tensor] = {}
        self._paged: dict[tuple[str, int], Tensor] = {}
        for spec in specs:
            storage = torch.zeros(pages, spec.page_bytes, dtype=torch.uint8, device=device)
            self.bytes[spec.name, spec.layer] = storage
            self._paged[spec.name, spec.layer] = storage.view(CODECS[spec.codec]).view(pages, PAGE, -1)
            self._tokens[spec.name, spec.layer] = self._paged[spec.name, spec.layer].view(pages * PAGE, -1)

    def tokens(self, name: str, layer: int) -> Tensor:
        """[pages * PAGE, dim]: row page * PAGE + offset is one token's vector."""
        return self._tokens[name, layer]

    def paged(self, name: str, layer: int) -> Tensor:
        """[pages, PAGE, dim], the same memory."""
        return self._paged[name, layer]

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that `tokens` and `paged` return."""
        return (*self._tokens.values(), *self._paged.values())

    @staticmethod
    def page_cost(specs: tuple[PlaneSpec, ...]) -> int:
        """Bytes that one page takes in all planes together."""
        return sum(spec.page_bytes for spec in specs)
