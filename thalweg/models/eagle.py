"""EAGLE heads: a layer of Llama's kind that drafts for a target of any kind, in the two formats in which they are published.

EAGLE-3 (arXiv 2503.01840): the state of a position is fc of three residual streams of the target, later the layer's own output. The layer's queries,
keys and values are made of [norm of the token's embedding, norm of the state], its residual is the state; a norm and a head over a vocabulary of its
own stand behind it. EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858): the state is the target's final hidden state, later the output of the layers;
their input is fc of [embedding, state], the first layer has no norm before its attention, and only the target's head stands behind the last."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from thalweg.attention.context import Step, Work
from thalweg.batch.batch import Batch
from thalweg.config.drafters import EagleFacts
from thalweg.config.model import ModelFacts
from thalweg.core.errors import CheckpointError
from thalweg.layers.part import Part
from thalweg.layers.parts import Parts
from thalweg.memory.planes import Planes, PlaneSpec
from thalweg.models import tables
from thalweg.models.base import Target
from thalweg.weights.table import Table

EMBEDDING = "embed_tokens.weight"


class Eagle3(Part):
    """held: the tensors that the head's folder has, which tell how its layer is called and whether the embedding is its own; of none it is the
    target's. folder: for errors."""

    def __init__(self, given: EagleFacts, main: Target, held: Collection[str], folder: Path = Path()) -> None:
        super().__init__()
        self.folder = folder
        facts, parts = given.facts, main.parts.beside(given.facts)
        self.given, self.facts, self.index, self.width, self.dtype = (
            given,
            facts,
            main.facts.layers,
            facts.hidden,
            parts.dtype,
        )
        self.main, self.parts = (main,), parts  # a tuple: the target is no child of this module
        self.prefix = "layers.0" if any(name.startswith("layers.0.") for name in held) else "midlayer"
        self.owns = EMBEDDING in held or facts.hidden != main.facts.hidden
        self.fuse = parts.linear(len(given.watched.layers) * given.target_hidden, facts.hidden)
        self.embedding = parts.embedding(facts.vocab, facts.hidden) if self.owns else None
        self.embed = main.embedding.forward if self.embedding is None else self.embedding.forward
        self.embedding_norm = parts.norm(facts.hidden, facts.norm_eps)
        self.state_norm = parts.norm(facts.hidden, facts.norm_eps)
        self.attention = parts.gqa(
            facts, self.index, qk_norm=False, out_bias=facts.attention_bias, inputs=2 * facts.hidden
        )
        self.mlp_norm = parts.norm(facts.hidden, facts.norm_eps)
        self.mlp = parts.mlp(facts.hidden, facts.intermediate, facts.mlp_bias)
        self.norm = parts.norm(facts.hidden, facts.norm_eps)
        self.head = parts.embedding(given.draft_vocab, facts.hidden)
        self.steps = parts.steps(facts, Work(pair=facts.heads))
        # which tokens the head's are; of one without weights every so many-th
        few = given.draft_vocab < facts.vocab
        spread = torch.arange(given.draft_vocab, device=parts.device) * (facts.vocab // given.draft_vocab)
        self.ids_D: Tensor | None = nn.Parameter(spread, requires_grad=False) if few else None
        self.attends = False

    def planes(self) -> tuple[PlaneSpec, ...]:
        return dense_planes(self.facts, self.index, self.parts)

    def learned(self, hidden_TX: Tensor) -> Tensor:
        """The streams that the target was told to let be watched, joined."""
        return self.fuse.forward(hidden_TX[:, self.main[0].facts.hidden :])

    def forward(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor:
        """→ the layer's output, before the norm."""
        step = self.steps.step(batch, planes)
        normed_TW = self.state_norm.forward(state_TW)
        h_TW = normed_TW.clone() if self.given.normed_residual else state_TW.clone()
        self.attention.add_(h_TW, self._joined(ids_T, normed_TW), step)
        return self.mlp.add_(h_TW, self.mlp_norm.before(h_TW))

    def observe(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None:
        joined_TX = self._joined(ids_T, self.state_norm.forward(state_TW))
        self.attention.observe(joined_TX, self.steps.step(batch, planes))

    def logits(self, state_NW: Tensor) -> Tensor:
        return self.head.logits(self.norm.forward(state_NW))

    def _joined(self, ids_T: Tensor, normed_TW: Tensor) -> Tensor:
        return torch.cat([self.embedding_norm.forward(self.embed(ids_T)), normed_TW], -1)

    def table(self) -> Table:
        """t2d, which tokens there are, follows from d2t, by how much each id of the head falls short of the target's."""
        table, facts = Table(skips=["t2d", r".*rotary_emb\.inv_freq"]), self.facts
        table.add("fc.weight", "fuse.weight")
        if self.owns:
            table.add(EMBEDDING, "embedding.weight")
        else:
            table.skips.append(EMBEDDING)
        table.add(f"{self.prefix}.input_layernorm.weight", "embedding_norm.weight")
        table.add(f"{self.prefix}.hidden_norm.weight", "state_norm.weight")
        table.add(f"{self.prefix}.post_attention_layernorm.weight", "mlp_norm.weight")
        tables.gqa_of(table, facts, f"{self.prefix}.self_attn", "attention", out_bias=facts.attention_bias)
        tables.mlp(table, f"{self.prefix}.mlp", "mlp", facts.intermediate, facts.mlp_bias)
        table.add("norm.weight", "norm.weight")
        table.add("lm_head.weight", "head.weight")
        if self.ids_D is None:
            table.skips.append("d2t")
        else:
            table.add("d2t", "ids_D", transform=partial(_ids, self.folder, facts.vocab))
        return table


class EagleLayer(Part):
    """first: has no norm before its attention."""

    def __init__(self, facts: ModelFacts, layer: int, first: bool, parts: Parts) -> None:
        super().__init__()
        self.attention_norm = None if first else parts.norm(facts.hidden, facts.norm_eps)
        self.attention = parts.gqa(facts, layer, qk_norm=False, out_bias=facts.attention_bias)
        self.mlp_norm = parts.norm(facts.hidden, facts.norm_eps)
        self.mlp = parts.mlp(facts.hidden, facts.intermediate, facts.mlp_bias)

    def forward(self, h_TH: Tensor, step: Step) -> Tensor:
        x_TH = h_TH if self.attention_norm is None else self.attention_norm.before(h_TH)
        h_TH = self.attention.add_(h_TH, x_TH, step)
        return self.mlp.add_(h_TH, self.mlp_norm.before(h_TH))


class Eagle(Part):
    """The head of EAGLE and EAGLE-2: one layer, or several. held: as of `Eagle3`."""

    def __init__(self, given: EagleFacts, main: Target, held: Collection[str]) -> None:
        super().__init__()
        facts, parts = given.facts, main.parts.beside(given.facts)
        self.facts, self.index, self.width, self.dtype = facts, main.facts.layers, facts.hidden, parts.dtype
        self.main, self.parts = (main,), parts  # a tuple: the target is no child of this module
        self.ids_D: Tensor | None = None
        self.attends = facts.layers > 1
        self.prefix = "model." if any(name.startswith("model.") for name in held) else ""
        self.bias = f"{self.prefix}fc.bias" in held if held else given.bias
        self.owns = f"{self.prefix}{EMBEDDING}" in held
        self.embedding = parts.embedding(facts.vocab, facts.hidden) if self.owns else None
        self.embed = main.embedding.forward if self.embedding is None else self.embedding.forward
        self.join = parts.linear(2 * facts.hidden, facts.hidden, self.bias)
        self.layers = nn.ModuleList(EagleLayer(facts, self.index + i, i == 0, parts) for i in range(facts.layers))
        self.steps = parts.steps(facts, Work(pair=facts.heads))

    def planes(self) -> tuple[PlaneSpec, ...]:
        return tuple(
            spec for i in range(self.facts.layers) for spec in dense_planes(self.facts, self.index + i, self.parts)
        )

    def learned(self, hidden_TX: Tensor) -> Tensor:
        """The target's hidden states after its final norm."""
        return hidden_TX[:, : self.width]

    def forward(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> Tensor:
        step, h_TW = self.steps.step(batch, planes), self._joined(ids_T, state_TW)
        for layer in self.layers:
            h_TW = layer(h_TW, step)
        return h_TW

    def observe(self, ids_T: Tensor, state_TW: Tensor, batch: Batch, planes: Planes) -> None:
        """What the layers behind the first store depends on all that those before them compute."""
        step, h_TW = self.steps.step(batch, planes), self._joined(ids_T, state_TW)
        for layer in self.layers[:-1]:
            h_TW = layer(h_TW, step)
        last = self.layers[-1]
        assert isinstance(last, EagleLayer)
        last.attention.observe(h_TW if last.attention_norm is None else last.attention_norm.before(h_TW), step)

    def logits(self, state_NW: Tensor) -> Tensor:
        """By the target's head, without a norm: the layers were trained to return what stands behind it."""
        return self.main[0].logits(state_NW)

    def _joined(self, ids_T: Tensor, state_TW: Tensor) -> Tensor:
        return self.join.forward(torch.cat([self.embed(ids_T), state_TW], -1))

    def table(self) -> Table:
        here, facts = self.prefix, self.facts
        table = Table(skips=[r".*rotary_emb\.inv_freq", r"lm_head\.weight"])
        if self.owns:
            table.add(f"{here}{EMBEDDING}", "embedding.weight")
        for kind in ("weight", "bias") if self.bias else ("weight",):
            table.add(f"{here}fc.{kind}", f"join.{kind}")
        for i in range(facts.layers):
            source, target = f"{here}layers.{i}", f"layers.{i}"
            if i:
                table.add(f"{source}.input_layernorm.weight", f"{target}.attention_norm.weight")
            table.add(f"{source}.post_attention_layernorm.weight", f"{target}.mlp_norm.weight")
            tables.gqa_of(table, facts, f"{source}.self_attn", f"{target}.attention", out_bias=facts.attention_bias)
            tables.mlp(table, f"{source}.mlp", f"{target}.mlp", facts.intermediate, facts.mlp_bias)
        return table


def dense_planes(facts: ModelFacts, layer: int, parts: Parts) -> tuple[PlaneSpec, ...]:
    """Keys and values of one layer of grouped-query attention."""
    width = facts.kv_heads * facts.head_dim
    return tuple(parts.plane(name, layer, width, shard="heads") for name in ("key", "value"))


def _ids(folder: Path, vocab: int, d2t_D: Tensor) -> Tensor:
    """The target's ids. Raises CheckpointError where they are none, or one is there twice: what is drafted is verified by its embedding, and the
    children of a tree's node are different tokens."""
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
        f"{folder}: d2t holds by how much each of the head's ids falls short of the model's; the value {int(d2t_D[place])} at {place} makes that "
        f"{id}, {what} ({len(wrong)} of {len(d2t_D)} values are such): {cause}"
    )
