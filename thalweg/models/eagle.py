"""EAGLE heads: a layer of Llama's kind that drafts for a target of any kind, in the two formats in which they are
published.

EAGLE-3 (arXiv 2503.01840): the state of a position is fc of three residual streams of the target, later the layer's own
output. The layer's queries, keys and values are made of [norm of the token's embedding, norm of the state]; its
residual is the state. A norm and a head over a vocabulary of its own follow. EAGLE and EAGLE-2 (arXiv 2401.15077,
2406.16858): the state is the target's final hidden state, later the output of the layers. Their input is fc of
[embedding, state], the first layer has no norm before its attention, and only the target's head follows the last.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from thalweg.attention.context import WorkspaceNeed
from thalweg.batch.batch import Batch
from thalweg.config.eagle import EagleFacts
from thalweg.core.errors import CheckpointError
from thalweg.layers.interface import ResidualStream
from thalweg.layers.residual import stream
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models.dense import DenseLayer, dense_planes
from thalweg.models.draft_head import DraftEmbedding, DraftHead, EntryProjection
from thalweg.models.interface import Target
from thalweg.parallel.vocabulary import VocabularyShards
from thalweg.quant.catalog import Schemes

EMBEDDING = "embed_tokens.weight"


class Eagle3(DraftHead):
    """A head of EAGLE-3."""

    def __init__(
        self, given: EagleFacts, main: Target, names: Collection[str], schemes: Schemes, folder: Path = Path()
    ) -> None:
        """names: the folder's tensors, which say how its layer is called and whether the embedding is its own; of none
        it is the target's. schemes: of the folder's weights. folder: for errors.
        """
        facts, factory = given.facts, main.factory.for_drafter(given.facts, schemes)
        super().__init__(facts, factory, main)
        self.given = given
        prefix = "layers.0" if any(name.startswith("layers.0.") for name in names) else "midlayer"
        fused = len(given.watched.layers) * given.target_hidden
        self.fuse = EntryProjection(factory, "fc", (facts.hidden, fused))
        owns = EMBEDDING in names or facts.hidden != main.facts.hidden
        self.embedding = DraftEmbedding(factory, "embed_tokens", facts, main, owns)
        self.embedding_norm = factory.norm(f"{prefix}.input_layernorm", facts.hidden, facts.norm_eps)
        self.state_norm = factory.norm(f"{prefix}.hidden_norm", facts.hidden, facts.norm_eps)
        self.attention = factory.gqa(facts, self.index, f"{prefix}.self_attn", inputs=2 * facts.hidden)
        self.mlp_norm = factory.norm(f"{prefix}.post_attention_layernorm", facts.hidden, facts.norm_eps)
        self.mlp = factory.mlp(f"{prefix}.mlp", facts.hidden, facts.intermediate, facts.mlp_bias)
        self.norm = factory.norm("norm", facts.hidden, facts.norm_eps)
        self.head = factory.vocabulary("lm_head", given.draft_vocab, facts.hidden)
        self.shards = VocabularyShards(factory.layout.tp, given.draft_vocab)
        self.metadata = factory.metadata(facts, WorkspaceNeed(per_pair=facts.heads))
        self.weights.skips += ["t2d", r".*rotary_emb\.inv_freq"]  # t2d follows from d2t
        if given.draft_vocab < facts.vocab:
            # which tokens the head drafts; without weights every so many-th
            spread = torch.arange(given.draft_vocab, device=factory.device) * (facts.vocab // given.draft_vocab)
            self.ids_D = nn.Parameter(spread, requires_grad=False)
            to_ids = partial(_ids, folder, facts.vocab)
            self.loads("ids_D", "d2t", (given.draft_vocab,), torch.int64, to_ids)
        else:
            self.weights.skips.append("d2t")

    def planes(self) -> tuple[PlaneSpec, ...]:
        return dense_planes(self.facts, self.index, self.factory)

    def draft_state(self, hidden_TX: Tensor) -> Tensor:
        """fc of the watched streams."""
        return self.fuse.start(hidden_TX[:, self.main[0].facts.hidden :]).value()

    def own_states(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor:
        """The layer's output, before the norm."""
        metadata = self.metadata.build(batch, planes)
        normed_TW = self.state_norm.forward(state_TW)
        h = stream(self.factory.layout, normed_TW.clone() if self.given.normed_residual else state_TW.clone())
        self.attention.add_to(h, self._joined(ids_T, normed_TW), metadata)
        self.mlp.add_to(h, h.normed(self.mlp_norm))
        return h.value()

    def write_own_kv(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None:
        joined_TX = self._joined(ids_T, self.state_norm.forward(state_TW))
        self.attention.write_kv(joined_TX, self.metadata.build(batch, planes))

    def logits(self, state_NW: Tensor) -> Tensor:
        return self.shards.gather(self.head.logits(self.norm.forward(state_NW)))

    def _joined(self, ids_T: Tensor, normed_TW: Tensor) -> Tensor:
        return torch.cat([self.embedding_norm.forward(self.embedding.forward(ids_T)), normed_TW], -1)


class NoNorm:
    """Leaves the stream as it is: the first layer of an EAGLE head has no norm before its attention."""

    weight = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return x

    forward_ = lazy = forward


class Eagle(DraftHead):
    """The head of EAGLE and EAGLE-2: one layer, or several. The target's head reads its states without a norm: the
    layers were trained to return normed ones.
    """

    def __init__(self, given: EagleFacts, main: Target, names: Collection[str], schemes: Schemes) -> None:
        """names, schemes: as of `Eagle3`."""
        facts, factory = given.facts, main.factory.for_drafter(given.facts, schemes)
        super().__init__(facts, factory, main)
        self.attends = facts.layers > 1
        prefix = "model." if any(name.startswith("model.") for name in names) else ""
        has_bias = f"{prefix}fc.bias" in names if names else given.bias
        self.embedding = DraftEmbedding(factory, f"{prefix}embed_tokens", facts, main, f"{prefix}{EMBEDDING}" in names)
        self.join = EntryProjection(factory, f"{prefix}fc", (facts.hidden, 2 * facts.hidden), has_bias)
        self.layers = nn.ModuleList(
            DenseLayer(
                facts,
                self.index + i,
                factory,
                name=f"{prefix}layers.{i}",
                attention_norm=None if i else NoNorm(),
            )
            for i in range(facts.layers)
        )
        self.metadata = factory.metadata(facts, WorkspaceNeed(per_pair=facts.heads))
        self.weights.skips += [r".*rotary_emb\.inv_freq", r"lm_head\.weight"]

    def planes(self) -> tuple[PlaneSpec, ...]:
        return tuple(spec for layer in self._dense_layers() for spec in layer.planes())

    def _dense_layers(self) -> list[DenseLayer]:
        return cast(list[DenseLayer], list(self.layers))

    def own_states(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor:
        metadata, h = self.metadata.build(batch, planes), self._joined(ids_T, state_TW)
        for layer in self.layers:
            layer(h, metadata, ())
        return h.value()

    def write_own_kv(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None:
        """Runs all layers but the last, since a layer's KV depends on the layers before it, and writes all KV."""
        metadata, h = self.metadata.build(batch, planes), self._joined(ids_T, state_TW)
        *layers, last = self._dense_layers()
        for layer in layers:
            layer(h, metadata, ())
        last.attention.write_kv(h.normed(last.attention_norm), metadata)

    def _joined(self, ids_T: Tensor, state_TW: Tensor) -> ResidualStream:
        return self.join.start(torch.cat([self.embedding.forward(ids_T), state_TW], -1))


def _ids(folder: Path, vocab: int, d2t_D: Tensor) -> Tensor:
    """The target's ids. Raises CheckpointError where they are none, or one is there twice: what is drafted is verified
    by its embedding, and the children of a tree's node are different tokens.
    """
    if d2t_D.dim() != 1:
        return d2t_D  # whose shape is refused
    ids_D = d2t_D + torch.arange(len(d2t_D), device=d2t_D.device)
    sorted_D, order_D = ids_D.sort(stable=True)
    twice_D = torch.zeros_like(ids_D, dtype=torch.bool).index_fill_(0, order_D[1:][sorted_D[1:] == sorted_D[:-1]], True)
    wrong = ((ids_D < 0) | (ids_D >= vocab) | twice_D).nonzero().flatten().tolist()
    if not wrong:
        return ids_D
    place, id = wrong[0], int(ids_D[wrong[0]])
    what = "which another entry says, too" if 0 <= id < vocab else f"and the model has 0 to {vocab - 1}"
    rising = bool((d2t_D[1:] > d2t_D[:-1]).all()) and 0 <= int(d2t_D[0]) and int(d2t_D[-1]) < vocab
    cause = (
        "its values are the model's ids themselves, in order: subtract from each its place, as published heads have it"
        if rising
        else "take the file as it was published"
    )
    raise CheckpointError(
        f"{folder}: d2t holds by how much each of the head's ids falls short of the model's; the value"
        f" {int(d2t_D[place])} at {place} makes that {id}, {what} ({len(wrong)} of {len(d2t_D)} values are such):"
        f" {cause}"
    )
