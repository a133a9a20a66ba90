"""Latent attention without its latents on a GPU: each token is decompressed once and attended to as any other model's.
An ablation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thalweg.attention.exchange import exchange_stored
from thalweg.config.model import ModelFacts
from thalweg.kernels.attend.args import PagedRows
from thalweg.kernels.attend.triton import merge
from thalweg.kernels.gemm.epilogue import PLAIN
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.rope import triton as rope
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import Activation
from thalweg.layers.kernel_linear import matmul
from thalweg.layers.paged import PagedStep
from thalweg.layers.paged_mla import PagedMla

WIDTH = 256  # of a head in the planes: keys of 192 and values of 128 dims, zeros behind them


class PagedMha(PagedMla):
    """See `PagedMla`, whose parameters these are. Keeps a key and a value of `WIDTH` dims for each head."""

    def __init__(self, layers: LayerFactory, facts: ModelFacts, layer: int, name: str) -> None:
        super().__init__(layers, facts, layer, name)
        self.deterministic = layers.kernels.deterministic
        self.matmul = matmul(self.deterministic)

    def attention(self, step: PagedStep, query_TX: Tensor, latent_TD: Tensor) -> Tensor:
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        query_THw = self._store(query_THd, latent_TD, step)
        parts = [self._decode(query_THw[: step.decode], step)] if step.decode else []
        if step.rest is not None:
            parts.append(self._causal(query_THw[step.rest.token :], step.rest.rows, step))
        out_THw = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_THw[..., : self.v].flatten(1)

    def write_kv(self, x: Activation, step: PagedStep) -> None:
        _, latent_TD = self.down.split(x)
        self._store(latent_TD.new_empty(len(latent_TD), 0, self.nope + self.rope), latent_TD, step)

    def _store(self, query_THd: Tensor, latent_TD: Tensor, step: PagedStep) -> Tensor:
        """Stores the tokens' keys and values; → their queries, rotated, [T, H, WIDTH]."""
        latent_Tr = self.latent_norm.forward(latent_TD[:, : self.rank])
        uk, uv = self.uk.view(-1, self.rank), self.uv.transpose(1, 2).reshape(-1, self.rank)
        query_THw = rope.mha_write(
            query_THd,
            self.matmul(latent_Tr, uk, PLAIN).view(-1, self.heads, self.nope),
            self.matmul(latent_Tr, uv, PLAIN).view(-1, self.heads, self.v),
            latent_TD[:, self.rank :],
            step.kv_write(slice(None)),
            step.kv(self.layer, self.heads),
        )
        exchange_stored(step.batch, step.planes, ("key", "value"), self.layer)
        return query_THw

    def _decode(self, query_THw: Tensor, step: PagedStep) -> Tensor:
        """Rows of one length: → [T, H, WIDTH]."""
        if self.deterministic:
            return self._causal(query_THw, step.prepared, step)
        splits = gqa.splits_for(step.decode, self.heads, self.heads, step.rows.max_kv_len, step.rows.query)
        states = gqa.decode(query_THw, step.kv(self.layer, self.heads), step.rows, scale=self.scale, splits=splits)
        return merge(*states, query_THw.dtype)

    def _causal(self, query_THw: Tensor, rows: PagedRows, step: PagedStep) -> Tensor:
        """Rows of any length: → [T, H, WIDTH]."""
        return gqa.prefill(query_THw, step.kv(self.layer, self.heads), rows, scale=self.scale)
