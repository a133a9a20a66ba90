"""Latent attention without its latents: what is kept of a token are the keys and values of all heads, many times as
large.
"""

from __future__ import annotations

from typing import Iterator

from torch import Tensor

from thalweg.attention.context import Span, Step
from thalweg.attention.selection import Choice
from thalweg.kernels.mla import ref
from thalweg.layers.mla import Mla


class Mha(Mla):
    """See `Mla`, whose parameters these are. Each token is decompressed once, when it is stored; a chosen context is a
    mask. What latents save is measured against this.
    """

    def store(self, latent_TD: Tensor, step: Step) -> None:
        key_HTd, value_HTv = ref.decompress(latent_TD, self.uk, self.uv)
        step.planes.write("key", self.layer, step.batch.write_T, key_HTd.transpose(0, 1).flatten(1))
        step.planes.write("value", self.layer, step.batch.write_T, value_HTv.transpose(0, 1).flatten(1))

    def attend(self, span: Span, query_NHd: Tensor, choice: Choice | None, step: Step) -> Tensor:
        return self.latents.plain(span, query_NHd, choice, self._contexts(span, query_NHd, step))

    def _contexts(self, span: Span, query_NHd: Tensor, step: Step) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [H, S, dim] of each row."""
        gathered = []
        for name in ("key", "value"):
            stored = span.gather(step.planes.paged(name, self.layer), span.pages)
            numbers = step.planes.read(name, self.layer, stored, query_NHd.dtype)
            gathered.append(numbers.view(span.rows, -1, self.heads, numbers.shape[-1] // self.heads).transpose(1, 2))
        yield from zip(*gathered, strict=True)
