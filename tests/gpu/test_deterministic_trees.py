"""Draft trees in deterministic mode: bit for bit as plain decoding, wherever a token was in a tree."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from tests.compose import deterministic, matrix
from tests.compose.workload import Answer
from tests.gpu.shapes import KERNELS, Part, batches, branched, folder
from tests.gpu.test_compose import on_kernels
from thalweg.batch.batch import Batch
from thalweg.core.kernels import KernelConfig
from thalweg.core.messages import TokenDelta
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import TreeShape
from thalweg.engine.local import LocalEngine
from thalweg.kernels.attend.args import DecodeRows, KvPlanes, LatentPlane, PagedRows
from thalweg.kernels.attend.case import PAGE, quantized
from thalweg.kernels.attend.triton import DETERMINISTIC_SPLITS, merge
from thalweg.kernels.gqa import triton as gqa
from thalweg.kernels.mla import triton as mla
from thalweg.layers.paged import paths_of_tree, ragged, rows_of
from thalweg.runner.runner import CapturedSteps
from thalweg.spec.draft_model import DraftModel

EXACT = msgspec.structs.replace(KERNELS, deterministic=True)
# trees whose nodes fill a tile's end, and go on in the next; and contexts of one token and of many tiles
TREES: list[Part] = [(1, 60, 12), (4, 700, 12), (20, 0, 12), (22, 127, 12)]
BIG: list[Part] = [(1, 100, 64), (4, 63, 5)]
SCENES = pytest.mark.parametrize("rows", [TREES, BIG], ids=["alike", "of all nodes there may be"])
CACHES = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "e4m3"])


class Scene:
    """A step of trees over pages of random numbers, and pages in which each token's path stands alone, one entry behind
    the other.
    """

    def __init__(self, rows: list[Part], device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(len(rows))
        batch, seen = branched(batches(rows, device, self.generator, 1024)[1], rows, len(rows))
        assert batch.tree is not None
        self.batch: Batch = batch
        self.seen, self.device, self.tokens = seen, device, len(seen)
        self.row_T, self.paths_TD = rows_of(batch), paths_of_tree(batch.tree, len(seen))
        most = -(-max(map(len, seen)) // PAGE)
        self.alone_TL = 1 + torch.arange(self.tokens * most, dtype=torch.int32, device=device).view(self.tokens, most)

    def plane(self, fp8: bool, *shape: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Pages as the tree has them, as each path alone would, and their scale."""
        kept, scale = torch.randn(32, PAGE, *shape, generator=self.generator).bfloat16(), None
        if fp8:
            kept, scale = quantized(kept.float())
            scale = scale.to(self.device)
        kept = kept.to(self.device)
        lone = kept.new_zeros(1 + self.alone_TL.numel(), PAGE, *shape)
        for token, columns in enumerate(self.seen):
            own = kept[self.batch.table_RP[self.row_T[token]].long()].flatten(0, 1)[columns]
            first = int(self.alone_TL[token, 0])
            lone[first : first + self.alone_TL.shape[1]].flatten(0, 1)[: len(columns)] = own
        return kept, lone, scale

    def query(self, *shape: int) -> Tensor:
        return torch.randn(self.tokens, *shape, generator=self.generator).to(self.device, torch.bfloat16)


@SCENES
@CACHES
@pytest.mark.parametrize("heads", [16, 128])
def test_latents(rows: list[Part], fp8: bool, heads: int, cuda: torch.device) -> None:
    scene = Scene(rows, cuda)
    kept, lone, scale = scene.plane(fp8, 576)
    query, positions, every = scene.query(heads, 576), scene.batch.positions_T, torch.arange(scene.tokens)

    def attended(plane: Tensor, rows: DecodeRows) -> Tensor:
        fixed: dict[str, Any] = {"scale": 0.05, "rank": 512, "splits": DETERMINISTIC_SPLITS, "fixed": True}
        return merge(*mla.decode(query, LatentPlane(plane, scale), rows, **fixed))

    want = attended(lone, DecodeRows(scene.alone_TL, positions, rows_T=every.to(cuda, torch.int32)))
    rows = DecodeRows(scene.batch.table_RP, positions, rows_T=scene.row_T)
    got = attended(kept, rows._replace(paths_TD=scene.paths_TD))
    assert torch.equal(got, want) and bool(got.isfinite().all())
    chain = attended(kept, rows)
    assert not torch.equal(chain, want), "columns are not positions"


@SCENES
@CACHES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(28, 4, 128), (16, 16, 256)])
def test_keys_and_values(rows: list[Part], fp8: bool, heads: int, kv_heads: int, dim: int, cuda: torch.device) -> None:
    scene = Scene(rows, cuda)
    (key, lone_key, key_scale), (value, lone_value, value_scale) = (scene.plane(fp8, kv_heads, dim) for _ in range(2))
    query, positions = scene.query(heads, dim), scene.batch.positions_T
    starts, scales = torch.arange(scene.tokens + 1, dtype=torch.int32, device=cuda), (key_scale, value_scale)
    alone = PagedRows(scene.alone_TL, positions, starts, 1)
    want = gqa.prefill(query, KvPlanes(lone_key, lone_value, *scales), alone, scale=dim**-0.5)
    kv, nodes = KvPlanes(key, value, *scales), ragged(scene.batch, scene.tokens, DecodeRows(starts, positions))
    got = gqa.prefill(query, kv, nodes, scale=dim**-0.5)
    assert torch.equal(got, want) and bool(got.isfinite().all())
    chain = gqa.prefill(query, kv, nodes._replace(paths_TD=None), scale=dim**-0.5)
    assert not torch.equal(chain, want), "columns are not positions"


# ---- engines


def growing(path: Path, choice: KernelConfig, **fields: Any) -> LocalEngine:
    """Drafts by the model itself, so that many are right."""
    made = on_kernels(
        path, kernels=choice, speculative_algorithm="STANDALONE", speculative_draft_model_path=str(path), **fields
    )
    head = made.runner.drafting.drafter.head  # type: ignore[attr-defined]
    assert isinstance(head, DraftModel)
    weights = dict(made.runner.model.named_parameters())  # type: ignore[attr-defined]
    with torch.inference_mode():
        for name, parameter in head.model.named_parameters():  # type: ignore[attr-defined]
            parameter.data.copy_(weights[name].data)
    return made


def all_kinds(made: LocalEngine, alone: bool) -> list[list[Answer]]:
    return [deterministic.answers(made, kind, alone) for kind in deterministic.KINDS]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped queries": ("qwen2", {}),
    "normed grouped queries, fp8": ("qwen3", {"kv": "fp8_e4m3"}),
    "latents": ("v2-lite", {}),
    "many heads, fp8": ("v3-dense", {"kv": "fp8_e4m3"}),
    "keys and values": ("v2-lite", {"latent": False}),
    "fp8 weights": ("v3", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_plain_decoding(name: str, cuda: torch.device, tmp_path: Path) -> None:
    """Recorded, with all prompts found in the cache in a second round; where the width comes and goes, recorded and
    eagerly; and of one form, without a cache.
    """
    shape, choice = MODELS[name][0], msgspec.structs.replace(EXACT, **MODELS[name][1])
    path = folder(shape, tmp_path)
    plain = all_kinds(on_kernels(path, kernels=choice, **deterministic.PLAIN), alone=True)
    recorded = growing(path, choice, **deterministic.TREES, cuda_graph_bs=(1, 2, 4, 8))
    replayed = counted(recorded)
    check(plain, recorded)
    check(plain, recorded)
    assert {query for _, query in replayed} == {8}, "steps of whole trees"
    rng = random.Random(5)
    for varied in (recorded, growing(path, choice, **deterministic.TREES)):
        varied.loop.scheduler.draft_length.choose = lambda sampling, most: rng.choice((0, 1, 2, 4, 7, 7))  # type: ignore[method-assign]
        check(plain, varied)
    assert {3, 5, 8} <= {query for _, query in replayed}, "smaller trees are recorded, too"
    fixed = {"tree": TreeShape(3, 4, 15, dynamic=False), "num_drafts": 15, "radix_cache": False}
    check(plain, growing(path, choice, **deterministic.TREES | fixed))


def check(plain: list[list[Answer]], made: LocalEngine) -> None:
    for want, got in zip(plain, all_kinds(made, alone=False), strict=True):
        deterministic.assert_equal_bits(want, got)
    stats = made.loop.stats()
    assert stats.accepted_tokens > 100 and not stats.drafter_failures, stats


def counted(made: LocalEngine) -> list[tuple[int, int]]:
    """Will have the number of rows, and of tokens of each, of every step that a recording of trees does."""
    graphs, replayed = made.runner.graphs, list[tuple[int, int]]()
    assert isinstance(graphs, CapturedSteps)
    for grove in graphs.graphs:
        if grove.kind != "tree":
            continue

        def replay(plan: Any, forward: Any = grove.forward, form: tuple[int, int] = (grove.rows, grove.query)) -> Any:
            replayed.append(form)
            return forward(plan)

        grove.forward = replay  # type: ignore[method-assign]
    return replayed


def test_bits_of_sparse_attention(cuda: torch.device) -> None:
    """The bundled model with its own layer, where each token is computed by itself; contexts longer than what an
    indexer chooses.
    """
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(20, 500) for _ in range(n)) for n in (70, 9)]
    asked = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)

    def bits(**fields: Any) -> tuple[LocalEngine, dict[int, TokenDelta]]:
        made, found = (
            LocalEngine(matrix.settings("cuda", kernels=KernelConfig(deterministic=True), **fields)),
            dict[int, TokenDelta](),
        )
        for prompt in prompts:
            made.submit(prompt, asked)
        while not made.idle:
            for delta in made.step():
                found[delta.uid] = found[delta.uid].merge(delta) if delta.uid in found else delta
        return made, {uid: msgspec.structs.replace(delta, acceptance=None) for uid, delta in found.items()}

    made, got = bits(speculative_algorithm="NEXTN", num_drafts=9, tree=TreeShape(3, 3, 9))
    assert got == bits()[1] and made.loop.stats().accepted_tokens > 2
