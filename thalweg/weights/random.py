"""Random checkpoints: the tensors that `--load-format dummy` loads and `make-checkpoint` writes.

A number is a function of the seed, the tensor's name and the position in the published tensor. So any slice can be made
alone, and every layout over ranks holds equal weights. Activations stay near 1, and tokens choose their experts about
uniformly.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from thalweg.quant.catalog import Declared
from thalweg.quant.scheme import Read, Take, TensorSpec
from thalweg.weights.loader import Progress, load, no_progress
from thalweg.weights.table import WeightTable

AT_ONCE = 1 << 26  # numbers made at a time: what is made of them takes up to 32 bytes each
ROUTER_BIAS_SPREAD = 0.02  # small beside the scores, so that routing stays about uniform
BYTE_SUM_MEAN, BYTE_SUM_SPREAD = 510.0, math.sqrt(4 * (256**2 - 1) / 12)  # of the sum of four uniform bytes


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor of a random checkpoint. Its numbers are about normally distributed, or uniform bits."""

    spec: TensorSpec
    like: str  # the tensor whose numbers it has; itself, but for NextN's copies of embedding and head
    spread: float | None  # standard deviation; None: the bits of integers are uniform
    centre: float = 0.0  # mean

    def slice(self, take: Take, seed: int, device: torch.device) -> Tensor:
        """The numbers of a slice, on the device, in the tensor's dtype."""
        return random_slices([self], take, seed, device)[0]

    @property
    def kind(self) -> tuple[str, tuple[int, ...], float | None, float]:
        """Equal for tensors that differ in name only."""
        return str(self.spec.dtype), self.spec.shape, self.spread, self.centre


def random_slices(tensors: Sequence[RandomTensor], take: Take, seed: int, device: torch.device) -> Tensor:
    """The same slice [tensors, ...] of tensors that differ in name only, on the device, in their dtype."""
    first, count = tensors[0], len(tensors)
    shape = first.spec.shape if len(first.spec.shape) > 1 else (1, *first.spec.shape)
    parts = take if len(first.spec.shape) > 1 else (slice(None), *take)
    rows, columns = (
        range(*part.indices(size)) for part, size in zip((*parts, slice(None), slice(None)), shape, strict=False)
    )
    made = torch.empty(count, len(rows), len(columns), dtype=first.spec.dtype, device=device)
    keys = [zlib.crc32(f"{seed} {tensor.like}".encode()) for tensor in tensors]
    key_N11 = torch.tensor(keys).to(torch.int32).view(-1, 1, 1).to(device)
    column_C = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=device)
    at_once = max(AT_ONCE // max(count * len(columns), 1), 1)
    for begin in range(0, len(rows), at_once):
        some = rows[begin : begin + at_once]
        row_R = torch.arange(some.start * shape[1], some.stop * shape[1], shape[1], device=device)
        place_RC = row_R.to(torch.int32).unsqueeze(1) + column_C  # wraps beyond 2^32 numbers
        bits_NRC = _mixed(place_RC ^ key_N11)
        if first.spread is None:
            made[:, begin : begin + len(some)] = (
                bits_NRC.view(torch.int8)[..., ::4] if first.spec.dtype.itemsize == 1 else bits_NRC
            )
            continue
        noise_NRC = _byte_sum(bits_NRC)
        made[:, begin : begin + len(some)] = (
            noise_NRC.sub_(BYTE_SUM_MEAN).mul_(first.spread / BYTE_SUM_SPREAD).add_(first.centre)
        )
    return made.view(count, -1) if len(first.spec.shape) == 1 else made


def _mixed(x: Tensor) -> Tensor:
    """A 32-bit integer hash with two rounds of multiply and shift (Wellons 2018, "lowbias32"), of int32, in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 0)):
        x ^= (x >> shift) & ((1 << 32 - shift) - 1)
        if factor:
            x *= factor
    return x


def _byte_sum(x: Tensor) -> Tensor:
    """The sum of each integer's four bytes, float32."""
    a, b, c, d = x.view(torch.uint8).view(*x.shape, 4).to(torch.int16).unbind(-1)
    return (a + b).add_(c).add_(d).to(torch.float32)


def random_tensors(table: WeightTable, quantization_config: Mapping[str, object], is_tied: bool) -> list[RandomTensor]:
    """The tensors of a random checkpoint for this table, as they are published. Integer tensors are left out. is_tied:
    the embedding is the head.
    """
    schemes, made = Declared(quantization_config), list[RandomTensor]()
    for name, rules in table.by_source().items():
        source = rules[0].source
        if not source.dtype.is_floating_point:
            continue
        if len(source.shape) == 1:
            spread = ROUTER_BIAS_SPREAD if "e_score_correction" in name else 0.1
            made.append(RandomTensor(source, name, spread, 0.0 if name.endswith("bias") else 1.0))
        elif re.search(r"embed_tokens\.weight$", name) and not is_tied:
            made.append(RandomTensor(source, name, 1.0))
        else:
            spread = source.shape[-1] ** -0.5  # of inputs of variance 1, outputs of variance 1
            scheme = schemes.of(source)
            for spec, draw in zip(scheme.stored(source), scheme.draws(source, spread), strict=True):
                made.append(RandomTensor(spec, spec.name, draw.spread, draw.centre))
    return made


class RandomStream:
    """A stream of such tensors. Those of one kind follow each other: thousands of experts are made in a few steps."""

    def __init__(self, tensors: Iterable[RandomTensor], seed: int) -> None:
        tensors = sorted(tensors, key=lambda tensor: tensor.kind)
        self._tensors, self._seed = {tensor.spec.name: tensor for tensor in tensors}, seed
        self.specs: Mapping[str, TensorSpec] = {name: tensor.spec for name, tensor in self._tensors.items()}

    def deliver(self, reads: Sequence[Read], device: torch.device) -> Iterator[Tensor]:
        for (kind, take), group in groupby(reads, key=lambda read: (self._tensors[read.name].kind, read.take)):
            tensors, at_once = [self._tensors[read.name] for read in group], max(AT_ONCE // math.prod(kind[1]), 1)
            for first in range(0, len(tensors), at_once):
                yield from random_slices(tensors[first : first + at_once], take, self._seed, device)


def load_random(
    module: nn.Module,
    table: WeightTable,
    quantization_config: Mapping[str, object],
    seed: int,
    is_tied: bool,
    progress: Progress = no_progress,
) -> None:
    """Fills a module as a random checkpoint would. Integer parameters, which say what stands for what, stay as they
    were built.
    """
    stream = RandomStream(random_tensors(table, quantization_config, is_tied), seed)
    load(module, table, stream, quantization_config, progress, is_partial=True)
