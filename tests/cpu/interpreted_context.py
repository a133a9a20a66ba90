"""Context parallelism on our kernels, in Triton's interpreter: two ranks give one rank's hidden states and the same
cache, with latents, records, keys and values of heads, chosen contexts and trees, and by what stands for FlashMLA and
DeepGEMM. In deterministic mode they give its bits. A process of its own, since Triton looks once whether it interprets.

    TRITON_INTERPRET=1 python -m tests.cpu.interpreted_context
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.cpu import zoo
from tests.cpu.deep_gemm_double import DeepGemm
from tests.cpu.interpreted_attention import exact_casts
from tests.cpu.interpreted_sparse import CONFIG, FP8, FlashMla, exact_products
from tests.cpu.interpreter import prepare
from tests.cpu.ranks import ThreadAxis, layouts, on_ranks
from tests.cpu.recorder import GraphPool, Recording, recorded_launches
from tests.gpu import shapes
from thalweg.batch.batch import Batch
from thalweg.config.context_parallel import INTERLEAVE, ZIGZAG
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.dsa import deep_gemm
from thalweg.layers.kernel_layers import KernelLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.catalog import read_config_facts
from thalweg.models.decoder import StageValue
from thalweg.models.one_of_each import one_layer_of_each_kind
from thalweg.models.stages import PipelineStage
from thalweg.parallel.layout import SINGLE_RANK, Layout
from thalweg.parallel.pipeline import Pipe
from thalweg.runner.piecewise import Piecewise, PiecewiseGraph
from thalweg.runner.step_buffers import StepBuffers

CPU = torch.device("cpu")
SHORT = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
V32 = CONFIG | SHORT | {"index_topk": 16, "index_topk_pattern": "FS"}
INDEXED = ("index_topk", "index_head_dim", "index_n_heads", "index_topk_pattern")
V3 = {key: value for key, value in (CONFIG | SHORT).items() if key not in INDEXED}
V3["architectures"] = ["DeepseekV3ForCausalLM"]
EXPERTS = V3 | {"first_k_dense_replace": 1}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
SPARSE, PLAIN, FLASHMLA, RECORDS = (
    {"decode": by, "prefill": by} for by in ("triton_sparse", "triton", "flashmla_sparse", "flashmla_kv")
)
# of each kind its configuration, its kernels, and how far a hidden state may be from one rank's
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "sparse": (V32, SPARSE, 1e-4),
    "sparse, records": (V32, SPARSE | FP8, 0.1),  # a step's own tokens are not rounded before they are attended to
    "sparse, deterministic": (V32, SPARSE | {"deterministic": True}, 0.0),
    "sparse, by a library": (V32, FLASHMLA, 1e-4),
    "sparse, records by libraries": (V32 | {"index_n_heads": 32}, RECORDS | FP8 | {"index_scores": "deep_gemm"}, 0.1),
    "latents": (V3, PLAIN, 1e-4),
    "latents, deterministic": (V3, PLAIN | {"deterministic": True}, 0.0),
    "latents expanded": (V3, PLAIN | {"latent": False}, 1e-4),
    "experts": (EXPERTS, PLAIN, 1e-4),
    "experts, deterministic": (EXPERTS, PLAIN | {"deterministic": True}, 0.0),
    "an MLP of shared experts": (EXPERTS, PLAIN | {"deterministic": True, "fusion": False}, 0.0),
    "grouped": (LLAMA, PLAIN, 1e-4),
    "grouped, deterministic": (LLAMA, PLAIN | {"deterministic": True}, 0.0),
}

# of each step its rows: first page, tokens before, tokens of the step; and whether they are trees
STEPS: dict[str, tuple[list[shapes.Part], bool]] = {
    "a prompt longer than the choice": ([(3, 0, 22)], False),
    "a chunk beside a decode row": ([(3, 22, 1), (1, 0, 11)], False),
    "two trees, which stay whole": ([(3, 23, 4), (1, 11, 4)], True),
    "a tree that is divided": ([(3, 23, 5)], True),
    "two decode rows, one for each rank": ([(3, 24, 1), (1, 12, 1)], False),
}
turn = threading.Lock()  # one rank at a time: the interpreter has one state


class OneAtATime(ThreadAxis):
    """An axis whose other ranks compute while one waits."""

    def all_gather(self, x: Tensor) -> Tensor:
        turn.release()
        try:
            return super().all_gather(x)
        finally:
            turn.acquire()

    def reduce_scatter(self, partial: Tensor) -> Tensor:
        turn.release()
        try:
            return super().reduce_scatter(partial)
        finally:
            turn.acquire()


def ranks_of(strategy: str) -> list[Layout]:
    made = layouts(cp=2, ep=2, strategy=strategy)
    axes = [
        [OneAtATime(axis.rendezvous, axis.rank) for axis in (layout.cp, layout.dp)]  # type: ignore[attr-defined]
        for layout in made
    ]
    return [replace(layout, cp=cp, dp=dp) for layout, (cp, dp) in zip(made, axes, strict=True)]


def steps() -> list[Batch]:
    generator, made = torch.Generator().manual_seed(1), list[Batch]()
    for rows, has_trees in STEPS.values():
        batch = shapes.batches(rows, CPU, generator, 64)[1]
        made.append(shapes.branched(batch, rows, len(rows))[0] if has_trees else batch)
    return made


def hidden(config: dict[str, Any], kinds: dict[str, Any], layout: Layout) -> tuple[list[Tensor], Planes]:
    """Of all steps, and the cache after them."""
    factory = KernelLayers(torch.float32, CPU, KernelConfig(**kinds), layout)
    model = catalog.assemble(read_config_facts(config, "context"), factory)
    zoo.fill(model)
    planes = Planes(model.planes(), 16)
    with turn:
        return [model.forward(batch, planes) for batch in steps()], planes


def check(name: str, strategy: str) -> None:
    config, kinds, tolerance = KINDS[name]
    want, cache = hidden(config, kinds, SINGLE_RANK)
    ranks = ranks_of(strategy)
    (got, ours), (others, theirs) = on_ranks(2, lambda rank: hidden(config, kinds, ranks[rank]))
    for step, x, own_x, other_x in zip(STEPS, want, got, others, strict=True):
        error = float(((own_x - x).norm(dim=1) / x.norm(dim=1)).max())
        assert torch.equal(own_x, other_x), f"{name}, {strategy}, {step}: ranks differ"
        assert error <= tolerance, f"{name}, {strategy}, {step}: {error}"
    for key, plane in ours.bytes.items():
        assert torch.equal(plane[1:], theirs.bytes[key][1:]), f"{name}, {strategy}: {key} differs between ranks"
        assert plane[1:].any() and (tolerance or torch.equal(plane[1:], cache.bytes[key][1:]))


def in_two_stages(config: dict[str, Any], layout: Layout) -> tuple[Any, list[Any]]:
    """A model, and two stages of half its layers that share its weights."""
    factory, facts = KernelLayers(torch.float32, CPU, KernelConfig(**SPARSE), layout), read_config_facts(config, "")
    layers, half = facts.layers, facts.layers // 2
    cuts = (0, layers), (0, half), (half, layers)
    whole, *stages = (catalog.assemble(facts, factory, PipelineStage(*cut, layers)) for cut in cuts)
    zoo.fill(whole)
    for stage in stages:
        stage.layers, stage.embedding = whole.layers[stage.stage.first : stage.stage.stop], whole.embedding
    stages[1].norm = whole.norm
    return whole, stages


def check_stages() -> None:
    """The second of two pipeline stages begins with a layer that shares the selection of the first."""
    whole, stages = in_two_stages(V32, SINGLE_RANK)
    planes, of_stages = (Planes(whole.planes(), 16) for _ in range(2))
    for step, batch in zip(STEPS, steps(), strict=True):
        want, sent = whole.forward(batch, planes), stages[0].run(batch, of_stages)
        assert isinstance(sent, StageValue) and sent.selected_TK is not None
        assert torch.equal(stages[1].run(batch, of_stages, sent), want), f"stages, {step}"


class Mailbox(Pipe):
    """Two stages of one process, of which the first runs before the second. What is sent lies in the same memory at
    every time, as recordings need it.
    """

    held: ClassVar[dict[tuple[torch.Size, torch.dtype], Tensor]] = {}

    def send(self, x_TX: Tensor) -> None:
        self.held.setdefault((x_TX.shape, x_TX.dtype), torch.empty_like(x_TX)).copy_(x_TX)

    def receive(self, like_TX: Tensor) -> Tensor:
        return like_TX.copy_(self.held[like_TX.shape, like_TX.dtype])


class Pool(GraphPool):
    """A step's lengths lie on the host, and are uploaded in the recording too; nothing that is recorded reads them."""

    def begin(self) -> None:
        self.recordings.append(Recording())
        self.recordings[-1].__enter__()


def in_pieces(model: Any, planes: Planes) -> Piecewise:
    """A stage's steps of up to 16 and 32 tokens, and attention of up to 4 decode rows. 16 are all chosen."""
    pool, shared = Pool(), StepBuffers(32, CPU, topk=model.border_topk)
    graphs, thin = [PiecewiseGraph(tokens, model, shared) for tokens in (32, 16)], one_layer_of_each_kind(model)
    for graph in graphs:
        graph.capture(planes, 64, pool, thin)  # type: ignore[arg-type]
    made = Piecewise(model, graphs)
    made.capture(4, 64, planes, pool)  # type: ignore[arg-type]
    return made


def check_pieces_of_stages() -> None:
    """The first stage's choice of context reaches the second stage's first layers, for prompts and for decode rows
    beside them, which choose in graphs of their own.
    """
    config = V32 | {"num_hidden_layers": 4, "index_topk_pattern": "FSSF"}
    whole, stages = in_two_stages(config, Layout(pipe=Mailbox()))
    planes, of_stages = (Planes(whole.planes(), 16) for _ in range(2))
    with recorded_launches():
        pieces = [in_pieces(stage, of_stages) for stage in stages]
    for plane in of_stages.bytes.values():
        plane.zero_()
    generator = torch.Generator().manual_seed(2)
    for rows in (
        [(3, 0, 22)],
        [(3, 22, 1), (1, 0, 11)],  # the prompt does not choose
        [(3, 23, 1), (1, 11, 9)],
        [(3, 24, 1), (1, 20, 1), (5, 0, 20)],
        [(3, 25, 1), (1, 21, 1), (5, 20, 3), (7, 0, 7)],
    ):
        batch = shapes.batches(rows, CPU, generator, 64)[1]
        want = whole.forward(batch, planes)
        for stage in pieces:
            got = stage.forward(batch, of_stages)
        error = float(((got - want).norm(dim=1) / want.norm(dim=1)).max())
        assert error < 1e-4, f"stages in pieces, {rows}: {error}"


def main() -> int:
    prepare()
    exact_casts()
    exact_products()
    flash_mla, gemm = FlashMla(), DeepGemm()
    sys.modules["flash_mla"] = flash_mla
    gemm.install()
    vars(deep_gemm)["MIN_PROMPT_TOKENS"] = 5
    for name in KINDS:
        check(name, INTERLEAVE)
    assert {name for name, _ in flash_mla.calls} == {"flash_mla_sparse_fwd", "flash_mla_with_kvcache"}
    scored = [name for name, _ in gemm.calls]
    assert scored.count("fp8_mqa_logits") >= 6 and scored.count("fp8_paged_mqa_logits") >= 2, scored
    check("grouped", ZIGZAG)
    check_stages()
    check_pieces_of_stages()
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
