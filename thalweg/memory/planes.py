"""KV cache storage: what a model keeps of each token, one contiguous plane for each kind and layer, all behind one page
table.

A page is `PAGE` tokens. Page 0 is the null page, where padding writes. Who owns a page is unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thalweg.core.kernels import RECORD, RECORD_TILE
from thalweg.core.plan import PAGE
from thalweg.kernels.swap_in.ref import HotSet
from thalweg.memory.hot import LOOKUP, STATE, host_zeros, hot_sets
from thalweg.memory.records import decode_record, encode_record, quantize

# A number of 4 bits of exponent and 3 of fraction, times the plane's scale. The error is relative, 6 % at most and 2.6
# % in the mean square, so the scale matters only for values far below or above it.
FP8 = torch.float8_e4m3fn
INDEX = "fp8_index"  # bytes, as RECORD: see `index_plane`, `encode_record`
CODECS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": FP8,
    RECORD: torch.uint8,
    INDEX: torch.uint8,
}
FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One kind of vector that one layer keeps of each token."""

    name: str  # "latent", "index", "key" or "value"
    layer: int
    page_bytes: int
    shard: str  # "replicated" on every rank of a tensor-parallel group, or split by "heads"
    codec: str  # a key of `CODECS`: the type of the vectors in a page
    rank: int = 0  # of a latent in records: its numbers before the rotated key
    # entries of each slot's hot set on the device, for a plane whose pages are in host memory; 0: the device has them
    hot: int = 0
    # pages of PAGE tokens in each page: a drafter may keep the tokens of all ranks that share a context
    parts: int = 1


def vector_plane(name: str, layer: int, dim: int, dtype: torch.dtype, shard: str = "replicated") -> PlaneSpec:
    """A plane of one `dim`-vector of `dtype` for each token."""
    codec = next(codec for codec, codec_dtype in CODECS.items() if codec_dtype == dtype)
    return PlaneSpec(name, layer, PAGE * dim * dtype.itemsize, shard, codec)


def record_plane(layer: int, rank: int, rope: int) -> PlaneSpec:
    """A plane of latents in records, see `encode_record`. rank: up to 128, or a multiple."""
    assert rank % min(rank, RECORD_TILE) == 0, f"{rank} dims are no whole number of tiles"
    return PlaneSpec(
        "latent", layer, PAGE * (rank + 4 * -(-rank // RECORD_TILE) + 2 * rope), "replicated", RECORD, rank
    )


def index_plane(layer: int, dim: int) -> PlaneSpec:
    """A plane of index keys in e4m3. A page is PAGE keys, then their PAGE float32 scales, as DeepGEMM reads it."""
    return PlaneSpec("index", layer, PAGE * (dim + 4), "replicated", INDEX)


def kv_cache_dtype(codec: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a KV cache, where it is no records. codec: a key of `CODECS`, or "" for the model's own type,
    `dtype`.
    """
    return FP8 if codec == RECORD else CODECS[codec] if codec else dtype


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

    def __init__(
        self,
        specs: tuple[PlaneSpec, ...],
        pages: int,
        device: torch.device | str = "cpu",
        slots: int = 0,
        context: int = 0,
    ) -> None:
        """slots, context: of the requests that have hot sets, where a spec has any."""
        self.specs, self.pages, self.device = specs, pages, torch.device(device)
        self._hot: dict[int, HotSet] = {}
        self._of_slots: tuple[Tensor, ...] = ()
        self.bytes: dict[tuple[str, int], Tensor] = {}
        self._tokens: dict[tuple[str, int], Tensor] = {}
        self._paged: dict[tuple[str, int], Tensor] = {}
        self._scales: dict[tuple[str, int], Tensor] = {}
        self._entries: dict[tuple[str, int], tuple[Tensor, ...]] = {}
        self._ranks = {(spec.name, spec.layer): spec.rank for spec in specs}
        for spec in specs:
            key, dtype = (spec.name, spec.layer), CODECS[spec.codec]
            if spec.hot:
                self.bytes[key] = host_zeros(pages, spec.page_bytes, self.device)
            else:
                self.bytes[key] = torch.zeros(pages, spec.page_bytes, dtype=torch.uint8, device=device)
            count = pages * spec.parts
            bytes_PB = self.bytes[key].view(count, -1)
            self._paged[key] = bytes_PB.view(dtype).view(count, PAGE, -1)
            if spec.codec == INDEX:
                codes, scales = torch.split(bytes_PB, [bytes_PB.shape[1] - 4 * PAGE, 4 * PAGE], 1)
                self._entries[key] = codes.view(count, PAGE, -1), scales.view(count, PAGE, 4)
            else:
                self._tokens[key] = self._paged[key].view(count * PAGE, -1)
                self._entries[key] = (bytes_PB.view(count, PAGE, -1),)
            if dtype == FP8:
                self._scales[key] = torch.ones(1, dtype=torch.float32, device=device)
        if hot := [spec for spec in specs if spec.hot]:
            (like,) = {replace(spec, layer=0) for spec in hot}
            dtype, layers = CODECS[like.codec], [spec.layer for spec in hot]
            width = like.page_bytes // PAGE // dtype.itemsize
            self._hot, self._of_slots = hot_sets(layers, like.hot, slots, context, width, dtype, self.device)

    def hot(self, layer: int) -> HotSet:
        """The hot sets of this layer's latents, whose plane is in host memory."""
        return self._hot[layer]

    def forget(self, slots: Sequence[int]) -> None:
        """Empties the hot sets of these slots, which get other requests."""
        for state in self._of_slots:
            for slot in slots:
                state[:, slot] = 0

    def tokens(self, name: str, layer: int) -> Tensor:
        """[pages * PAGE, dim]: row page * PAGE + offset holds one token's vector as stored. Not of index keys in
        e4m3.
        """
        return self._tokens[name, layer]

    def paged(self, name: str, layer: int) -> Tensor:
        """[pages, PAGE, dim], the same memory. Of index keys in e4m3 the bytes of a page, cut into PAGE parts."""
        return self._paged[name, layer]

    def entries(self, name: str, layer: int) -> tuple[Tensor, ...]:
        """What a token has in this plane, of any type: uint8 [pages, PAGE, bytes], pages of any stride."""
        return self._entries[name, layer]

    def scale(self, name: str, layer: int) -> Tensor | None:
        """float32 [1]: the factor of an FP8 plane's numbers; None for other planes."""
        return self._scales.get((name, layer))

    @property
    def has_fp8(self) -> bool:
        """Whether what is attended to is rounded when it is stored."""
        return any(spec.codec in ("fp8_e4m3", RECORD) for spec in self.specs)

    def write(self, name: str, layer: int, rows_T: Tensor, x_TD: Tensor) -> None:
        """Stores vectors of any floating type in these rows of `tokens`. They are made finite: attention multiplies
        masked values by 0, and a NaN of one request would reach the next owner of its page.
        """
        entries, rank = self._entries[name, layer], self._ranks[name, layer]
        if (name, layer) not in self._tokens:
            parts = tuple(part.view(torch.uint8) for part in quantize(x_TD, x_TD.shape[1]))
        elif rank:
            parts = (encode_record(x_TD, rank),)
        elif self._tokens[name, layer].dtype == FP8:
            parts = (encode(torch.nan_to_num(x_TD), FP8, self.scale(name, layer)).view(torch.uint8),)
        else:  # in the plane's type: float32's largest number is infinite in bfloat16
            plane = self._tokens[name, layer]
            plane.index_copy_(0, rows_T, torch.nan_to_num(x_TD.to(plane.dtype)))
            return
        put(entries, rows_T, parts)  # torch has no index_copy_ of e4m3 on a CPU

    def read(self, name: str, layer: int, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Numbers taken from this plane, decoded to `dtype`. stored: of index keys in e4m3 whole pages [..., S,
        dim + 4], else any vectors.
        """
        if (name, layer) not in self._tokens:
            dim = stored.shape[-1] - 4
            pages = stored.reshape(*stored.shape[:-2], -1, PAGE * (dim + 4))
            codes, scales = torch.split(pages, [PAGE * dim, 4 * PAGE], -1)
            keys = codes.view(FP8).float().reshape(*codes.shape[:-1], PAGE, dim) * scales.view(torch.float32).unsqueeze(
                -1
            )
            return keys.flatten(-3, -2).to(dtype)
        if rank := self._ranks[name, layer]:
            return decode_record(stored, rank, dtype)
        return decode(stored, dtype, self.scale(name, layer))

    def layers_from(self, first: int) -> Planes:
        """The planes of layers `first` and up, renumbered from 0: the same memory."""
        part = Planes((), self.pages, self.device)
        part.specs = tuple(replace(spec, layer=spec.layer - first) for spec in self.specs if spec.layer >= first)
        for field in ("bytes", "_tokens", "_paged", "_scales", "_entries", "_ranks"):
            tensors = {(name, layer - first): x for (name, layer), x in vars(self)[field].items() if layer >= first}
            setattr(part, field, tensors)
        return part

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that `tokens` and `paged` return."""
        return (*self._tokens.values(), *self._paged.values())

    @property
    def slots_nbytes(self) -> int:
        """Bytes of all hot sets."""
        return sum(x.nbytes for hot in self._hot.values() for x in hot)

    @staticmethod
    def page_cost(specs: Sequence[PlaneSpec], in_host: bool = False) -> int:
        """Bytes of one page in all planes together, on the device or in host memory."""
        return sum(spec.page_bytes for spec in specs if in_host == (spec.hot > 0))

    @staticmethod
    def slot_cost(specs: Sequence[PlaneSpec], context: int) -> int:
        """Bytes of a slot's hot sets for such a context."""
        hot = [spec for spec in specs if spec.hot]
        return sum(spec.hot * (spec.page_bytes // PAGE + STATE) + 4 + LOOKUP * context for spec in hot)


def put(entries: Sequence[Tensor], rows_T: Tensor, parts: Sequence[Tensor]) -> None:
    """Writes bytes [T, n] into these rows, page * PAGE + offset, of each of `Planes.entries`."""
    for plane, part in zip(entries, parts, strict=True):
        plane[rows_T // PAGE, rows_T % PAGE] = part


def take(entries: Sequence[Tensor], rows_T: Tensor) -> list[Tensor]:
    """Copies of the bytes [T, n] of these rows of each of `Planes.entries`."""
    return [plane[rows_T // PAGE, rows_T % PAGE].clone() for plane in entries]
