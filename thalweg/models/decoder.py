"""A decoder: embedding, layers, final norm, head. Families differ in their layers (`models.catalog`).

Pipeline stages hold some of the layers. A stage takes and gives a `StageValue`; the first embeds, the last returns
hidden states.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from thalweg.attention.context import WorkspaceNeed
from thalweg.attention.selection import SelectedContexts
from thalweg.batch.batch import Batch
from thalweg.batch.share import divided
from thalweg.config.model import ModelFacts
from thalweg.layers.factory import LayerFactory
from thalweg.layers.interface import ResidualStream, Vocabulary
from thalweg.layers.module import Module
from thalweg.layers.residual import rows_of, stream
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models.interface import DecoderLayer
from thalweg.models.stages import PipelineStage, shared_topk
from thalweg.parallel.vocabulary import VocabularyShards
from thalweg.weights.table import WeightTable, table_of

ROTARY_BUFFERS = (
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"  # old exports carry them; they follow from the config
)


MakeLayer = Callable[[ModelFacts, int, LayerFactory], DecoderLayer]  # the layer of this number


class StageValue(NamedTuple):
    """What the layers of one stage give to the next."""

    x_TH: Tensor  # the settled residual stream
    watched: tuple[Tensor, ...] = ()  # streams that a drafter reads, of the stages so far
    # what `ForwardMetadata.packed` makes of the selection of context that the next layer shares; None: it has its own
    selected_TK: Tensor | None = None


class Decoder(Module):
    """See `Model` and `Target`."""

    def __init__(
        self,
        facts: ModelFacts,
        factory: LayerFactory,
        make_layer: MakeLayer,
        workspace: WorkspaceNeed,
        stage: PipelineStage | None = None,
    ) -> None:
        """workspace: of the attention of a step, see `attention.context`. stage: None is the whole model."""
        super().__init__()
        self.facts, self.factory, self.watched = facts, factory, tuple[int, ...]()
        self.shards = VocabularyShards(factory.layout.tp, facts.vocab)
        self.stage = stage or PipelineStage(0, facts.layers, facts.layers)
        self.is_last = self.stage.is_last
        self.border_topk = max(shared_topk(facts, border) for border in (self.stage.first, self.stage.stop))
        self.embedding: Vocabulary | None = None
        self.head: Vocabulary | None = None
        if self.stage.is_first or self.stage.is_last:  # drafters on the last stage embed, too
            self.embedding = factory.vocabulary("model.embed_tokens", facts.vocab, facts.hidden)
        layers = [make_layer(facts, i, factory) for i in range(self.stage.first, self.stage.stop)]
        self.layers = nn.ModuleList(layer for layer in layers if isinstance(layer, nn.Module))
        if self.stage.is_last:
            self.norm = factory.norm("model.norm", facts.hidden, facts.norm_eps)
            self.head = self.embedding if facts.tied else factory.vocabulary("lm_head", facts.vocab, facts.hidden)
        self.metadata = factory.metadata(facts, workspace)
        self.weights.skips += [ROTARY_BUFFERS, *([r"lm_head\.weight"] if facts.tied else [])]
        self.weights.skips += [rf"model\.layers\.{facts.layers + depth}\..*" for depth in range(facts.nextn)]
        if not self.stage.is_first or not self.stage.is_last:
            elsewhere = [i for i in range(facts.layers) if not self.stage.first <= i < self.stage.stop]
            self.weights.skips += [rf"model\.layers\.{i}\..*" for i in elsewhere]
            self.weights.skips += [
                re.escape(name) for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
            ]

    def watch(self, layers: Sequence[int]) -> None:
        self.watched = tuple(layers)

    def _decoder_layers(self) -> Iterable[DecoderLayer]:
        return cast(Iterable[DecoderLayer], self.layers)

    def planes(self) -> tuple[PlaneSpec, ...]:
        return tuple(spec for layer in self._decoder_layers() for spec in layer.planes())

    def embed(self, ids_T: Tensor) -> Tensor:
        return self._embedded(ids_T).value()

    def _embedded(self, ids_T: Tensor) -> ResidualStream:
        assert self.embedding is not None, "the first stage embeds"
        return stream(self.factory.layout, self.embedding.forward(ids_T), self.embedding.is_partial)

    def forward(self, batch: Batch, planes: Planes) -> Tensor:
        """Of a pipeline stage: takes a `StageValue` from the one before, and sends one to the next. Of several context-
        parallel ranks each sends its own tokens.
        """
        layout = self.factory.layout
        own = divided(batch, layout.cp, layout.cp_strategy)
        made = self.run(own.batch, planes, None if self.stage.is_first else self._receive(own.batch))
        if isinstance(made, Tensor):
            return own.whole(made)
        layout.pipe.send(torch.cat([made.x_TH, *made.watched], 1))
        if made.selected_TK is not None:
            layout.pipe.send(made.selected_TK)
        return made.x_TH

    def _receive(self, batch: Batch) -> StageValue:
        hidden, streams = self.facts.hidden, 1 + sum(layer < self.stage.first for layer in set(self.watched))
        shape = len(batch.ids_T), streams * hidden
        like_TX = torch.empty(shape, dtype=self.factory.dtype, device=batch.ids_T.device)
        pipe, selected_TK = self.factory.layout.pipe, None
        x_TH, *watched = torch.split(pipe.receive(like_TX), hidden, 1)
        if topk := shared_topk(self.facts, self.stage.first):
            selected_TK = pipe.receive(like_TX.new_empty(len(like_TX), topk, dtype=torch.int32))
        return StageValue(x_TH.contiguous(), tuple(watched), selected_TK)

    def run(self, batch: Batch, planes: Planes, received: StageValue | None = None) -> Tensor | StageValue:
        """The layers of this stage. received: from the stage before; None is the first. Returns hidden states from the
        last stage.
        """
        metadata = self.metadata.build(batch, planes)
        selections: SelectedContexts = (None,) * len(metadata.groups)
        watched: list[Tensor] = []
        if received is None:
            h = self._embedded(batch.ids_T)
        else:
            h, watched = stream(self.factory.layout, received.x_TH), list(received.watched)
            if received.selected_TK is not None:
                selections = metadata.unpacked(received.selected_TK)
        for number, layer in enumerate(self._decoder_layers(), self.stage.first):
            if number in self.watched:
                watched.append(settled_copy(h))
            selections = layer(h, metadata, selections)
        if not self.is_last:
            topk = shared_topk(self.facts, self.stage.stop)
            return StageValue(h.value(), tuple(watched), metadata.packed(selections, topk) if topk else None)
        if self.stage.layers in self.watched:
            watched.append(settled_copy(h))
        hidden_TH = rows_of(h.normed(self.norm))
        return torch.cat([hidden_TH, *self._in_order(watched)], 1) if watched else hidden_TH

    def _in_order(self, watched: list[Tensor]) -> list[Tensor]:
        """Streams as they were asked for; they were collected in the order of layers."""
        by_layer = dict(zip(sorted(set(self.watched)), watched, strict=True))
        return [by_layer[layer] for layer in self.watched]

    def logits(self, hidden_NX: Tensor) -> Tensor:
        own_NV = self._own_logits(hidden_NX)
        return own_NV if self.factory.layout.is_single else self.shards.gather(own_NV)

    def shard_logits(self, hidden_NX: Tensor) -> Tensor:
        if not self.is_last:
            return hidden_NX[:, :0]
        return self.logits(hidden_NX) if self.factory.layout.is_single else self._own_logits(hidden_NX)

    def _own_logits(self, hidden_NX: Tensor) -> Tensor:
        assert self.head is not None, "the last stage has the head"
        return self.head.logits(hidden_NX[:, : self.facts.hidden])

    def table(self) -> WeightTable:
        return table_of(self)


def settled_copy(h: ResidualStream) -> Tensor:
    """The stream as it enters a layer, which will edit it in place. Before it is settled a stream is one rank's
    part.
    """
    return h.value().clone()
