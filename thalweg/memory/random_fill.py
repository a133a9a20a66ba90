"""Random contents of a KV cache, so that decoding at long contexts can be timed without minutes of prefill."""

from __future__ import annotations

import zlib

import torch

from thalweg.core.plan import PAGE
from thalweg.memory.planes import Planes

DRAWN_PAGES = 251  # whose vectors all others repeat; a prime, so no layout of a kernel repeats with them


def fill_planes(planes: Planes, seed: int, tp_rank: int = 0, dcp_rank: int = 0) -> None:
    """Writes standard normal vectors into every page but the null page. Ranks with the same tokens and heads get the
    same vectors, whatever else a layout divides.

    tp_rank, dcp_rank: this rank among those that share the heads of a layer, and those that share the KV of a sequence.
    """
    for spec in planes.specs:
        tokens = dcp_rank if spec.parts == 1 else 0  # a drafter with whole contexts has the same on all ranks
        heads = tp_rank if spec.shard == "heads" else 0
        key = f"{seed} {spec.name} {spec.layer} {tokens} {heads}"
        generator, pages = torch.Generator().manual_seed(zlib.crc32(key.encode())), min(DRAWN_PAGES, planes.pages - 1)
        page, stored = PAGE * spec.parts, planes.bytes[spec.name, spec.layer]
        rows_T = torch.arange(page, (pages + 1) * page)
        like = planes.read(spec.name, spec.layer, planes.paged(spec.name, spec.layer)[:1], torch.float32)
        vectors_TD = torch.randn(len(rows_T), like.shape[-1], generator=generator)
        planes.write(spec.name, spec.layer, rows_T.to(stored.device), vectors_TD.to(stored.device))
        first = 1 + pages
        while first < planes.pages:  # each copy doubles what is filled
            others = stored[first : 2 * first - 1]
            others.copy_(stored[1 : 1 + len(others)])
            first += len(others)
