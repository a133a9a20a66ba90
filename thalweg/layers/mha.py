"""Latent attention without its latents: what is kept of a token are the keys and values of all heads, many times as
large.
"""

from __future__ import annotations

from typing import Iterator

from torch import Tensor

from thalweg.attention.context import AttentionGroup, AttentionMetadata
from thalweg.attention.selection import SelectedContext
from thalweg.kernels.attend import ref
from thalweg.layers.mla import Mla


class Mha(Mla):
    """See `Mla`, whose parameters these are. Each token is decompressed once, when it is stored; a chosen context is a
    mask. What latents save is measured against this.
    """

    cached = ("key", "value")

    def store(self, latent_TD: Tensor, metadata: AttentionMetadata) -> None:
        key_HTd, value_HTv = ref.expand_latents(latent_TD, self.uk, self.uv)
        metadata.planes.write("key", self.layer, metadata.batch.write_T, key_HTd.transpose(0, 1).flatten(1))
        metadata.planes.write("value", self.layer, metadata.batch.write_T, value_HTv.transpose(0, 1).flatten(1))

    def attend(
        self, group: AttentionGroup, query_NHd: Tensor, selected: SelectedContext | None, metadata: AttentionMetadata
    ) -> Tensor:
        return self.attend_expanded(group, query_NHd, selected, self._contexts(group, query_NHd, metadata))

    def _contexts(
        self, group: AttentionGroup, query_NHd: Tensor, metadata: AttentionMetadata
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [H, S, dim] of each row."""
        gathered = []
        for name in ("key", "value"):
            stored = group.gather(metadata.planes.paged(name, self.layer), group.pages)
            numbers = metadata.planes.read(name, self.layer, stored, query_NHd.dtype)
            gathered.append(numbers.view(group.rows, -1, self.heads, numbers.shape[-1] // self.heads).transpose(1, 2))
        yield from zip(*gathered, strict=True)
