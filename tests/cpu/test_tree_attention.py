"""Attention to draft trees: each kind against a softmax over visible tokens, and models against each node's own path."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.cpu import zoo
from tests.cpu.batches import Bench
from thalweg.attention.context import AttentionMetadata
from thalweg.batch.batch import Batch, Group, RowExtent, TreeMask
from thalweg.config.model import ModelFacts
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE
from thalweg.layers.gqa import Gqa
from thalweg.layers.mha import Mha
from thalweg.layers.mla import Mla
from thalweg.layers.paged import paths_of_tree
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.models.interface import Model
from thalweg.spec.tree import tree_masks_of

SEED = 11
PLAIN = KernelConfig()
CPU = torch.device("cpu")


class Row(NamedTuple):
    """known: tokens before the root; parents: of each node behind it."""

    known: int
    parents: tuple[int, ...]


def grown(rng: random.Random, nodes: int) -> tuple[int, ...]:
    return tuple(rng.randrange(max(node - 9, 0), node) for node in range(1, nodes + 1))


def depths(parents: tuple[int, ...]) -> list[int]:
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


def path(parents: tuple[int, ...], node: int) -> list[int]:
    """From the root to the node."""
    found = [node]
    while found[-1]:
        found.append(parents[found[-1] - 1])
    return found[::-1]


def batch_of(rows: list[Row], tables: list[list[int]], ids: list[list[int]]) -> Batch:
    """A step of root and nodes of each row. ids: of them."""
    positions, columns, masks, write = [], [], [], []
    groups: list[Group] = []
    for number, ((known, parents), table) in enumerate(zip(rows, tables, strict=True)):
        depth = depths(parents)
        own = (
            tree_masks_of(torch.tensor([parents]), torch.tensor([depth[1:]]), max(depth))
            if parents
            else torch.full((1, 1), -1)
        )
        masks += own[0].tolist()
        positions += [known + d for d in depth]
        at = range(known, known + len(depth))
        columns += at
        write += [table[c // PAGE] * PAGE + c % PAGE for c in at]
        groups.append(Group(number, 1, len(columns) - len(depth), len(depth), known + len(depth)))
    if len({group.query for group in groups}) == 1:
        groups = [Group(0, len(rows), 0, groups[0].query, max(group.max_kv_len for group in groups))]
    flat = torch.tensor([token for row in ids for token in row])
    return Batch(
        flat, torch.tensor(positions), torch.tensor(write), torch.tensor(tables), flat >= 0, torch.arange(len(flat)), tuple(groups),
        tuple(RowExtent(1 + len(parents), known + 1 + len(parents)) for known, parents in rows),
        tree=TreeMask(torch.tensor(columns), torch.tensor(masks), len(rows)),
    )  # fmt: skip


def facts(family: str, tmp_path: Path, **wished: Any) -> ModelFacts:
    (tmp_path / "config.json").write_text(json.dumps(zoo.draw_config(family, SEED) | wished))
    return read_facts(tmp_path)


def model(family: str, tmp_path: Path, choice: KernelConfig = PLAIN, **wished: Any) -> Model:
    made = catalog.assemble(facts(family, tmp_path, **wished), ReferenceLayers(torch.float32, CPU, kernels=choice))
    zoo.fill(made, SEED)
    return made


# ---- one layer


class Scene:
    """Two rows with trees over pages of random numbers, and a step of theirs. Seen: columns of each token."""

    def __init__(self, of: Model, nodes: tuple[int, int], known: tuple[int, int]) -> None:
        rng = random.Random(SEED)
        rows = [Row(k, grown(rng, n)) for k, n in zip(known, nodes, strict=True)]
        pages = -(-max(row.known + 1 + len(row.parents) for row in rows) // PAGE)
        order = rng.sample(range(1, 1 + 2 * pages), 2 * pages)
        self.tables = [order[:pages], order[pages:]]
        self.generator = torch.Generator().manual_seed(SEED)
        self.planes = Planes(of.planes(), 1 + 2 * pages)
        for spec in of.planes():
            plane = self.planes.paged(spec.name, spec.layer)
            plane.copy_(torch.randn(plane.shape, generator=self.generator))
        batch = batch_of(rows, self.tables, [[0] * (1 + len(row.parents)) for row in rows])
        self.step: AttentionMetadata = of.metadata.build(batch, self.planes)
        self.seen = [
            (number, [*range(row.known), *(row.known + ancestor for ancestor in path(row.parents, node))])
            for number, row in enumerate(rows)
            for node in range(1 + len(row.parents))
        ]

    def kept(self, name: str, token: int) -> Tensor:
        """[S, dim]: what stands in a plane at the columns that this token sees."""
        row, columns = self.seen[token]
        return self.planes.paged(name, 0)[self.tables[row]].flatten(0, 1)[columns]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def attention_of(made: Model) -> Any:
    return made.layers[0].attention  # type: ignore[attr-defined]


SHAPES = pytest.mark.parametrize(
    ("nodes", "known"), [((12, 12), (70, 1)), ((5, 63), (127, 200))], ids=["a rectangle", "unlike each other"]
)


@SHAPES
def test_columns_of_a_tokens_last_positions(nodes: tuple[int, int], known: tuple[int, int], tmp_path: Path) -> None:
    scene = Scene(model("llama", tmp_path), nodes, known)
    tree, positions = scene.step.batch.tree, scene.step.batch.positions_T.tolist()
    assert tree is not None
    paths = paths_of_tree(tree, len(positions)).tolist()
    for own, (_, columns), path in zip(positions, scene.seen, paths, strict=True):
        assert [path[own - at] if own - at < 64 else at for at in range(own + 1)] == columns


@SHAPES
@pytest.mark.parametrize("kv_heads", [1, 2])
@torch.inference_mode()
def test_grouped_queries(nodes: tuple[int, int], known: tuple[int, int], kv_heads: int, tmp_path: Path) -> None:
    made = model("llama", tmp_path, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=8, hidden_size=32)
    gqa, scene = attention_of(made), Scene(made, nodes, known)
    assert isinstance(gqa, Gqa)
    query = scene.normal(len(scene.seen), 4, 8)
    got = torch.cat([gqa._attend(group, group.take(query), scene.step) for group in scene.step.groups])
    for token in range(len(query)):
        key, value = (
            scene.kept(name, token).view(-1, kv_heads, 8).repeat_interleave(4 // kv_heads, 1)
            for name in ("key", "value")
        )
        weights = (torch.einsum("hd,shd->hs", query[token], key) * 8**-0.5).softmax(-1)
        torch.testing.assert_close(
            got[token].view(4, 8), torch.einsum("hs,shd->hd", weights, value), atol=2e-5, rtol=1e-4
        )


def latent_softmax(mla: Mla, query_Hd: Tensor, latent_SD: Tensor) -> Tensor:
    """Keys and values made of latents, in full: → [H, v]."""
    key = torch.cat(
        [
            torch.einsum("sr,hnr->hsn", latent_SD[:, : mla.rank], mla.uk),
            latent_SD[:, mla.rank :].expand(mla.heads, -1, -1),
        ],
        -1,
    )
    value = torch.einsum("sr,hrv->hsv", latent_SD[:, : mla.rank], mla.uv)
    weights = (torch.einsum("hd,hsd->hs", query_Hd, key) * mla.scale).softmax(-1)
    return torch.einsum("hs,hsv->hv", weights, value)


@SHAPES
@pytest.mark.parametrize("decompressed", [False, True], ids=["absorbed", "decompressed"])
@torch.inference_mode()
def test_latents(nodes: tuple[int, int], known: tuple[int, int], decompressed: bool, tmp_path: Path) -> None:
    made = model("v2-lite", tmp_path)
    mla, scene = attention_of(made), Scene(made, nodes, known)
    assert isinstance(mla, Mla)
    mla.long = 0 if decompressed else 1 << 30
    query = scene.normal(len(scene.seen), mla.heads, mla.nope + mla.rope)
    got = torch.cat([mla.attend(group, group.take(query), None, scene.step) for group in scene.step.groups])
    for token in range(len(query)):
        want = latent_softmax(mla, query[token], scene.kept("latent", token))
        torch.testing.assert_close(got[token].view_as(want), want, atol=2e-4, rtol=1e-3)


@SHAPES
@torch.inference_mode()
def test_keys_and_values_of_all_heads(nodes: tuple[int, int], known: tuple[int, int], tmp_path: Path) -> None:
    made = model("v3", tmp_path, KernelConfig(latent=False))
    mha, scene = attention_of(made), Scene(made, nodes, known)
    assert isinstance(mha, Mha)
    query = scene.normal(len(scene.seen), mha.heads, mha.nope + mha.rope)
    got = torch.cat([mha.attend(group, group.take(query), None, scene.step) for group in scene.step.groups])
    for token in range(len(query)):
        key, value = (scene.kept(name, token).unflatten(1, (mha.heads, -1)) for name in ("key", "value"))
        weights = (torch.einsum("hd,shd->hs", query[token], key) * mha.scale).softmax(-1)
        want = torch.einsum("hs,shv->hv", weights, value)
        torch.testing.assert_close(got[token].view_as(want), want, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("nodes", "known", "masked"),
    [((12, 12), (70, 1), False), ((5, 63), (127, 200), False), ((63, 63), (50, 1), True)],
    ids=["gathered", "unlike each other", "masked"],
)
@torch.inference_mode()
def test_the_indexers_choice(nodes: tuple[int, int], known: tuple[int, int], masked: bool, tmp_path: Path) -> None:
    """Each node chooses among what it sees, which is less than the choice for some, and attends to that."""
    made = model("v32", tmp_path, index_topk=24)
    mla, scene = attention_of(made), Scene(made, nodes, known)
    assert isinstance(mla, Mla) and mla.indexer is not None
    indexer = mla.indexer
    mla.long, mla.masked = (0, 1 << 30) if masked else (1 << 30, 0)
    query = scene.normal(len(scene.seen), mla.heads, mla.nope + mla.rope)
    index_query = scene.normal(len(scene.seen), indexer.heads, indexer.dim)
    weights = scene.normal(len(scene.seen), indexer.heads)
    token, fewer = 0, 0
    for group in scene.step.groups:
        choice = indexer._select(group, index_query, weights, scene.step)
        got = mla.attend(group, group.take(query), choice, scene.step)
        for out in got:
            key = scene.kept("index", token)
            scores = torch.einsum("h,hs->s", weights[token], torch.relu(index_query[token] @ key.T)) * indexer.scale
            chosen = scores.topk(min(24, len(scores))).indices
            fewer += len(scores) < 24
            want = latent_softmax(mla, query[token], scene.kept("latent", token)[chosen])
            torch.testing.assert_close(out.view_as(want), want, atol=2e-4, rtol=1e-3)
            token += 1
    assert token == len(scene.seen) and (fewer > 0) == (min(known) < 20)


# ---- whole models


@pytest.mark.parametrize(
    ("family", "choice"),
    [
        ("qwen3", KernelConfig()),
        ("v2-lite", KernelConfig()),
        ("v3", KernelConfig(latent=False)),
        ("glm-5", KernelConfig()),
    ],
    ids=["grouped queries", "latents", "keys and values", "a sparse choice"],
)
@torch.inference_mode()
def test_every_node_is_computed_as_behind_its_own_path(family: str, choice: KernelConfig, tmp_path: Path) -> None:
    """A step of two trees and a prompt's chunk; the context is longer than what an indexer chooses."""
    made, rng = model(family, tmp_path, choice), random.Random(SEED)
    vocab = made.facts.vocab
    rows = [Row(90, grown(rng, 10)), Row(130, grown(rng, 10)), Row(20, ())]
    bench = Bench(made, 3)
    ids = [[rng.randrange(vocab) for _ in range(row.known + 1 + len(row.parents))] for row in rows]
    bench.hidden([(number, own[: row.known]) for number, (row, own) in enumerate(zip(rows, ids, strict=True))])
    batch = batch_of(rows, bench.tables, [own[row.known :] for row, own in zip(rows, ids, strict=True)])
    hidden, token = made.forward(batch, bench.planes), 0
    for row, own in zip(rows, ids, strict=True):
        for node in range(1 + len(row.parents)):
            tokens = own[: row.known] + [own[row.known + one] for one in path(row.parents, node)]
            alone = Bench(made, 1).hidden([(0, tokens)])[0][-1]
            torch.testing.assert_close(hidden[token], alone, atol=2e-3, rtol=2e-3)
            token += 1
    blind = made.forward(
        replace(batch, tree=TreeMask(batch.columns_T, torch.zeros_like(batch.columns_T), 3)), bench.planes
    )
    assert not torch.allclose(blind, hidden, atol=2e-2), "without its masks a tree would be seen through"
