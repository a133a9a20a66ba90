"""Kernels of latent attention, with and without a choice of context, on ranks that share each context, or the heads of
the indexer, in Triton's interpreter beside plain torch on one rank: prompts, chunks, decode steps and trees of drafts,
within a rank's tokens and over the border to the next rank's. A process of its own, since Triton looks once whether it
interprets.

    TRITON_INTERPRET=1 python -m tests.cpu.interpreted_sharded
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tests.cpu.interpreted_attention import exact_casts
from tests.cpu.interpreted_sparse import CONFIG
from tests.cpu.interpreter import prepare
from tests.cpu.ranks import Rendezvous, ThreadAxis, on_ranks
from tests.gpu import shapes
from thalweg.attention.context_shard import ContextShard
from thalweg.batch.batch import TreeMask
from thalweg.bench.make_checkpoint import main as make_checkpoint
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE
from thalweg.layers.factory import LayerFactory
from thalweg.layers.kernel_layers import KernelLayers
from thalweg.layers.paged_sharded import stored_tree
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.catalog import read_facts
from thalweg.parallel.layout import Layout
from thalweg.weights.loader import load
from thalweg.weights.stream import Safetensors

RANKS, VOCAB = 2, 64
DENSE = {name: value for name, value in CONFIG.items() if not name.startswith("index_")}
DENSE |= {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 1, "first_k_dense_replace": 1}
SPARSE = CONFIG | {"num_hidden_layers": 2, "first_k_dense_replace": 2, "index_topk_pattern": "FS"}
# of each step its rows: first page, tokens before, tokens of the step
STEPS = {
    "a short prompt": [(1, 0, 38)],
    "a decode row that sees all": [(1, 38, 1)],
    "prompts": [(1, 39, 1), (3, 0, 150)],
    "a chunk beside a decode row": [(1, 40, 1), (3, 150, 30)],
    "decode rows": [(1, 41, 1), (3, 180, 1)],
    "rows of two tokens": [(1, 42, 2), (3, 181, 2)],
    "chunks": [(1, 44, 18), (3, 183, 8)],
    "trees": [(1, 62, 6), (3, 191, 6)],
}
BATON = threading.Lock()  # the interpreter runs one kernel at a time


class Turns(Rendezvous):
    """Ranks that run one at a time, from one exchange to the next."""

    def exchange(self, rank: int, name: str, x: Tensor) -> list[Tensor]:
        BATON.release()
        try:
            return super().exchange(rank, name, x)
        finally:
            BATON.acquire()


@dataclass(frozen=True)
class Ranks:
    """tp = moe_tp = shared. shared: the axis of `Layout` that is under test."""

    turns: Turns
    shared: str = "dcp"

    def layout(self, rank: int) -> Layout:
        axis = ThreadAxis(self.turns, rank)
        return replace(Layout(tp=axis, dense=axis, moe_tp=axis), **{self.shared: axis})


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(config))
    assert make_checkpoint([str(folder / "shape"), str(folder / "out"), "--seed", "3"]) == 0
    return folder / "out"


def loaded(folder: Path, factory: LayerFactory) -> Any:
    facts = read_facts(folder)
    model = catalog.assemble(facts, factory)
    with Safetensors(folder) as stream:
        load(model, model.table(), stream, facts.quantization_config)
    return model


def outputs(model: Any, page_size: int, is_paged: bool, steps: Collection[str]) -> list[Tensor]:
    """Hidden states of these steps."""
    planes, generator, found = Planes(model.planes(), 16), torch.Generator().manual_seed(1), list[Tensor]()
    for name in steps:
        rows = STEPS[name]
        batch = shapes.batches(rows, torch.device("cpu"), generator, VOCAB, page_size)[is_paged]
        if name == "trees":
            batch = shapes.branched(batch, rows, len(rows))[0]
        found.append(model.forward(batch, planes))
    return found


def beside_one_rank(
    config: dict[str, Any],
    backend: str,
    tolerance: float,
    shared: str = "dcp",
    steps: Collection[str] = STEPS,
    **kinds: Any,
) -> list[list[Tensor]]:
    """The hidden states of all ranks."""
    with TemporaryDirectory() as path:
        folder, cpu = written(Path(path), config), torch.device("cpu")
        want = outputs(loaded(folder, ReferenceLayers(torch.float32, cpu, KernelConfig(**kinds))), PAGE, False, steps)
        ranks, choice = Ranks(Turns(RANKS), shared), KernelConfig(decode=backend, prefill=backend, **kinds)

        def run(rank: int) -> list[Tensor]:
            with BATON:
                factory = KernelLayers(torch.float32, cpu, choice, ranks.layout(rank))
                return outputs(loaded(folder, factory), PAGE * factory.layout.dcp.size, True, steps)

        found = on_ranks(RANKS, run)
        for got in found:
            for name, own, exact in zip(steps, got, want, strict=True):
                error = (own - exact).norm(dim=1) / exact.norm(dim=1)
                assert float(error.max()) < tolerance, f"{backend}, {name}: {error}"
        return found


def shared_heads(**kinds: Any) -> None:
    """Ranks that score by their share of the index heads choose alike: their bits are the same."""
    steps = ("prompts", "decode rows", "trees")  # what is between them is zeros in all caches
    first, second = beside_one_rank(SPARSE, "triton_sparse", 2e-3, "indexer", steps, **kinds)
    assert all(torch.equal(*states) for states in zip(first, second, strict=True))


def masks_of_parts() -> None:
    """What a token sees of the tokens that each rank stores is what it sees of them in the whole context."""
    generator = torch.Generator().manual_seed(5)
    columns = torch.randint(0, 4 * PAGE * RANKS, (200,), generator=generator)
    masks = torch.randint(-(1 << 62), 1 << 62, (200,), generator=generator) | 1 | -(1 << 63)
    for rank in range(RANKS):
        shard = ContextShard(ThreadAxis(Rendezvous(RANKS), rank))
        tree = stored_tree(shard, TreeMask(columns, masks, len(columns)))
        for column, mask, own, own_mask in zip(*(x.tolist() for x in (columns, masks, *tree[:2])), strict=True):
            stored = [at for at in range(column + 1) if at // PAGE % RANKS == rank]
            assert own == len(stored) - 1 and own_mask >> 63 & 1
            for slot, at in enumerate(stored):
                assert own_mask >> min(own - slot, 63) & 1 == mask >> min(column - at, 63) & 1, (column, at)


def main() -> int:
    prepare()
    exact_casts()
    masks_of_parts()
    beside_one_rank(DENSE, "triton", 2e-3)
    beside_one_rank(SPARSE, "triton_sparse", 2e-3)
    shared_heads()
    shared_heads(deterministic=True)
    beside_one_rank(SPARSE | {"index_topk": 256}, "triton_sparse", 0.1, kv="fp8_ds_mla", fp8_index=True)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
