"""Attention on pages: a step's decode rows by split-KV kernels, its other rows as one ragged batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Callable

import torch
from torch import Tensor, nn

from thalweg.attention.context import Span
from thalweg.attention.selection import Choices
from thalweg.batch.batch import Batch
from thalweg.batch.upload import upload
from thalweg.config.model import ModelFacts
from thalweg.core.plan import PAGE
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.mla import triton as mla
from thalweg.kernels.rope import triton as rope
from thalweg.layers import rotary
from thalweg.layers.fused import FusedFp8Linear, FusedLinear, FusedNorm
from thalweg.layers.linear import parameter
from thalweg.layers.mla import LATENT_NORM_EPS
from thalweg.layers.part import Part
from thalweg.memory.planes import Planes

MakeLinear = Callable[..., FusedLinear | FusedFp8Linear]  # (inputs, outputs[, bias])

DECODE_QUERY = 4  # rows of up to so many query tokens are decoded on latents; longer ones decompress their context
ABSORBED = 64  # decode tokens up to which one kernel stores the latents and absorbs the queries
CHUNK = 1 << 14  # tokens of cached context that are decompressed at a time


@dataclass(frozen=True, slots=True)
class Rest:
    """The rows behind the decode rows, ragged. token: where they begin in the step. row: their first. starts_R1 int32: offsets of their
    query tokens. longest: most query tokens of a row. cached: tokens of each row's context before its query tokens."""

    token: int
    row: int
    starts_R1: Tensor
    longest: int
    cached: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """A chunk of cached context of the ragged rows. first_R, starts_R1 int32: where it begins in each row, and where in the chunk the row's
    tokens lie. tokens: of all rows. longest: of a row."""

    first_R: Tensor
    starts_R1: Tensor
    tokens: int
    longest: int


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What the layers of a forward are given. decode: tokens of the decode rows; query: of each of them; reach: upper bound of their context.
    spans is empty: the reference's idea."""

    batch: Batch
    planes: Planes
    cos_SC: Tensor
    sin_SC: Tensor
    decode: int
    query: int
    reach: int
    rest: Rest | None
    prefixes: tuple[Prefix, ...]
    spans: tuple[Span, ...] = ()


class PagedSteps(nn.Module):
    """Owns the rotary table: float32 [context, dim / 2] cosines and sines."""

    cos: Tensor
    sin: Tensor

    def __init__(self, facts: ModelFacts, device: torch.device) -> None:
        super().__init__()
        table = rotary.table(facts.rope, facts.context, device)
        self.register_buffer("cos", table.real.contiguous(), persistent=False)
        self.register_buffer("sin", table.imag.contiguous(), persistent=False)

    def step(self, batch: Batch, planes: Planes) -> PagedStep:
        first = batch.groups[0]
        rows = first.rows if first.query <= DECODE_QUERY else 0
        tokens, query = rows * first.query, first.query if rows else 1
        rest = None if rows == len(batch.extents) else _rest(batch, rows, tokens)
        prefixes = () if rest is None else _prefixes(rest.cached, batch.ids_T.device)
        return PagedStep(batch, planes, self.cos, self.sin, tokens, query, first.reach, rest, prefixes)


def _rest(batch: Batch, row: int, token: int) -> Rest:
    extents = batch.extents[row:]
    starts = [0, *accumulate(extent.query for extent in extents)]
    return Rest(
        token,
        row,
        upload(starts, torch.int32, batch.ids_T.device),
        max(extent.query for extent in extents),
        tuple(extent.reach - extent.query for extent in extents),
    )


def _prefixes(cached: tuple[int, ...], device: torch.device) -> tuple[Prefix, ...]:
    """Cuts the rows' cached contexts into chunks of about CHUNK tokens in all, each a whole number of pages of every row."""
    having = sum(length > 0 for length in cached)
    if not having:
        return ()
    step, chunks = max(CHUNK // having // PAGE, 1) * PAGE, []
    for first in range(0, max(cached), step):
        lengths = [min(max(length - first, 0), step) for length in cached]
        chunks.append(
            Prefix(
                upload([first] * len(cached), torch.int32, device),
                upload([0, *accumulate(lengths)], torch.int32, device),
                sum(lengths),
                max(lengths),
            )
        )
    return tuple(chunks)


class PagedMla(Part):
    """See `layers.mla.Mla`, whose parameters these are. uv is stored [H, v, r] and seen as [H, r, v]: both its uses are one GEMM."""

    def __init__(
        self, facts: ModelFacts, layer: int, linear: MakeLinear, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        assert facts.mla is not None
        shape, self.heads, self.layer, self.context = facts.mla, facts.heads, layer, facts.context
        self.rank, self.nope, self.rope, self.v = shape.kv_lora, shape.nope, shape.rope, shape.v
        self.scale = rotary.softmax_scale(shape.nope + shape.rope, facts.rope)
        self.query_size = facts.heads * (shape.nope + shape.rope)
        self.down_query = shape.q_lora or self.query_size
        self.down = linear(facts.hidden, self.down_query + self.rank + self.rope)
        self.query_norm = FusedNorm(shape.q_lora, LATENT_NORM_EPS, device) if shape.q_lora else None
        self.up = linear(shape.q_lora, self.query_size) if shape.q_lora else None
        self.latent_norm = FusedNorm(self.rank, LATENT_NORM_EPS, device)
        self.uk = parameter(self.heads, self.nope, self.rank, dtype=dtype, device=device)
        stored = torch.empty(self.heads, self.v, self.rank, dtype=dtype, device=device)
        self.uv = nn.Parameter(stored.transpose(1, 2), requires_grad=False)
        self.out = linear(self.heads * self.v, facts.hidden)

    def add_(self, h_TH: Tensor, x_TH: Tensor, step: PagedStep, earlier: Choices) -> Choices:
        """h += attention(x), in place."""
        down_TX = self.down.forward(x_TH)
        query_TX, latent_TD = down_TX[:, : self.down_query], down_TX[:, self.down_query :]
        if self.query_norm is not None and self.up is not None:
            query_TX = self.up.forward(self.query_norm.forward(query_TX))
        query_THd = query_TX.view(len(query_TX), self.heads, -1)
        if step.rest is None:
            out_TX = self._decode(query_THd, latent_TD, step)
        elif not step.decode:
            out_TX = self._ragged(query_THd, latent_TD, step, step.rest)
        else:
            parts = self._decode(query_THd[: step.decode], latent_TD[: step.decode], step)
            out_TX = torch.cat(
                [parts, self._ragged(query_THd[step.decode :], latent_TD[step.decode :], step, step.rest)]
            )
        self.out.add_(h_TH, out_TX)
        return earlier

    def observe(self, x_TH: Tensor, step: PagedStep) -> None:
        """Stores what attention would store, and computes nothing else."""
        latent_TD = self.down.forward(x_TH)[:, self.down_query :]
        nothing = latent_TD.new_empty(len(latent_TD), 0, self.rope)
        self._write(nothing, nothing, latent_TD, step, slice(None), False)

    def _write(
        self, query_THc: Tensor, rotated_THc: Tensor, latent_TD: Tensor, step: PagedStep, tokens: slice, in_place: bool
    ) -> None:
        rope.mla_write(
            query_THc,
            rotated_THc,
            latent_TD,
            self.latent_norm.weight,
            step.cos_SC,
            step.sin_SC,
            step.batch.positions_T[tokens],
            step.batch.write_T[tokens],
            step.planes.tokens("latent", self.layer),
            eps=LATENT_NORM_EPS,
            in_place=in_place,
        )

    def _decode(self, query_THd: Tensor, latent_TD: Tensor, step: PagedStep) -> Tensor:
        """Absorbed: queries meet latents. → [T, H * v]."""
        tokens, rank = step.decode, self.rank
        partial, lse = mla.decode(
            self._absorb(query_THd, latent_TD, step),
            step.planes.paged("latent", self.layer),
            step.batch.table_RP,
            step.batch.positions_T[:tokens],
            scale=self.scale,
            rank=rank,
            splits=mla.splits_for(tokens, self.heads, step.reach, step.query),
            query=step.query,
        )
        if tokens <= mla.MERGE_UP_TOKENS:
            return mla.merge_up(partial, lse, self.uv)
        out_THv = query_THd.new_empty(tokens, self.heads, self.v)
        torch.bmm(mla.merge(partial, lse).transpose(0, 1), self.uv, out=out_THv.transpose(0, 1))
        return out_THv.flatten(1)

    def _absorb(self, query_THd: Tensor, latent_TD: Tensor, step: PagedStep) -> Tensor:
        """Stores the tokens' latents, and multiplies their queries by W_UK: → [T, H, r + rope]."""
        tokens, rank = step.decode, self.rank
        if tokens <= ABSORBED:
            return rope.mla_absorb(
                query_THd,
                self.uk,
                latent_TD,
                self.latent_norm.weight,
                step.cos_SC,
                step.sin_SC,
                step.batch.positions_T[:tokens],
                step.batch.write_T[:tokens],
                step.planes.tokens("latent", self.layer),
                eps=LATENT_NORM_EPS,
            )
        query_THD = query_THd.new_empty(tokens, self.heads, rank + self.rope)
        self._write(query_THd[..., self.nope :], query_THD[..., rank:], latent_TD, step, slice(0, tokens), False)
        torch.bmm(query_THd[..., : self.nope].transpose(0, 1), self.uk, out=query_THD[..., :rank].transpose(0, 1))
        return query_THD

    def _ragged(self, query_THd: Tensor, latent_TD: Tensor, step: PagedStep, rest: Rest) -> Tensor:
        """Decompressed: plain attention to the step's own tokens, merged with that to each chunk of cached context. → [T, H * v]."""
        turned = query_THd[..., self.nope :]
        self._write(turned, turned, latent_TD, step, slice(rest.token, None), True)
        starts, longest = rest.starts_R1, rest.longest
        out, lse = self._attend(query_THd, latent_TD, starts, starts, longest, causal=True)
        plane, table = step.planes.paged("latent", self.layer), step.batch.table_RP[rest.row :]
        for prefix in step.prefixes:
            latents_SD = mla.gather(
                plane,
                table,
                prefix.starts_R1,
                prefix.tokens,
                first_R=prefix.first_R,
                rank=self.rank,
                max_context=prefix.longest,
            )
            other, other_lse = self._attend(query_THd, latents_SD, starts, prefix.starts_R1, longest, causal=False)
            mla.merge_state_(out, lse, other, other_lse)
        return out.flatten(1)

    def _attend(
        self, query_THd: Tensor, latents_SD: Tensor, starts: Tensor, context: Tensor, longest: int, causal: bool
    ) -> tuple[Tensor, Tensor]:
        latent_Sr = latents_SD[:, : self.rank]
        key = torch.mm(latent_Sr, self.uk.view(-1, self.rank).t()).view(-1, self.heads, self.nope)
        value = torch.mm(latent_Sr, self.uv.transpose(1, 2).view(-1, self.rank).t()).view(-1, self.heads, self.v)
        rope_Sc = latents_SD[:, self.rank :]
        return mla.prefill(
            query_THd, key, rope_Sc, value, starts, context, max_query=longest, scale=self.scale, causal=causal
        )


class PagedGqa(Part):
    """See `layers.gqa.Gqa`, whose parameters these are."""

    def __init__(
        self, facts: ModelFacts, layer: int, linear: MakeLinear, device: torch.device, *, qk_norm: bool, out_bias: bool
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.layer = facts.heads, facts.kv_heads, facts.head_dim, layer
        self.scale, self.context, self.eps = self.dim**-0.5, facts.context, facts.norm_eps
        self.qkv = linear(facts.hidden, (self.heads + 2 * self.kv_heads) * self.dim, facts.qkv_bias)
        self.query_norm = FusedNorm(self.dim, facts.norm_eps, device) if qk_norm else None
        self.key_norm = FusedNorm(self.dim, facts.norm_eps, device) if qk_norm else None
        self.out = linear(self.heads * self.dim, facts.hidden, out_bias)

    def add_(self, h_TH: Tensor, x_TH: Tensor, step: PagedStep) -> Tensor:
        """h += attention(x), in place."""
        qkv_THd = self.qkv.forward(x_TH).view(len(x_TH), -1, self.dim)
        query, key, value = torch.split(qkv_THd, [self.heads, self.kv_heads, self.kv_heads], 1)
        planes, batch = step.planes, step.batch
        rope.gqa_write(
            query,
            key,
            value,
            step.cos_SC,
            step.sin_SC,
            batch.positions_T,
            batch.write_T,
            planes.tokens("key", self.layer).view(-1, self.kv_heads, self.dim),
            planes.tokens("value", self.layer).view(-1, self.kv_heads, self.dim),
            query_norm_d=None if self.query_norm is None else self.query_norm.weight,
            key_norm_d=None if self.key_norm is None else self.key_norm.weight,
            eps=self.eps,
        )
        parts = []
        if step.decode:
            parts.append(self._decode(query[: step.decode], step))
        if step.rest is not None:
            parts.append(self._ragged(query[step.decode :], step, step.rest))
        return self.out.add_(h_TH, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _pages(self, step: PagedStep) -> tuple[Tensor, Tensor]:
        key, value = (step.planes.paged(name, self.layer) for name in ("key", "value"))
        heads = (*key.shape[:2], self.kv_heads, self.dim)
        return key.view(heads), value.view(heads)

    def _decode(self, query_THd: Tensor, step: PagedStep) -> Tensor:
        splits = gqa.splits_for(step.decode, self.heads, self.kv_heads, step.reach, step.query)
        key, value = self._pages(step)
        positions = step.batch.positions_T[: step.decode]
        partial, lse = gqa.decode(
            query_THd, key, value, step.batch.table_RP, positions, scale=self.scale, splits=splits, query=step.query
        )
        return gqa.merge(partial, lse).flatten(1)

    def _ragged(self, query_THd: Tensor, step: PagedStep, rest: Rest) -> Tensor:
        key, value = self._pages(step)
        out_THd = gqa.prefill(
            query_THd,
            key,
            value,
            step.batch.table_RP[rest.row :],
            step.batch.positions_T[rest.token :],
            rest.starts_R1,
            max_query=rest.longest,
            scale=self.scale,
        )
        return out_THd.flatten(1)
