"""A model with sparse attention on our kernels, in Triton's interpreter, beside plain torch: prompts, chunks, decode
steps and trees of drafts, shorter and longer than the choice, with layers that share one; in FP8; by what stands for
FlashMLA and for DeepGEMM; and bit for bit the same in other batches in deterministic mode. A process of its own, since
Triton looks once whether it interprets.

    TRITON_INTERPRET=1 python -m tests.cpu.interpreted_sparse
"""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from tests.cpu import zoo
from tests.cpu.deep_gemm_double import DeepGemm
from tests.cpu.interpreted_attention import exact_casts
from tests.cpu.interpreter import prepare
from tests.gpu import shapes
from thalweg.attention.selection import Selection, select_top_k
from thalweg.batch.batch import no_graph_break
from thalweg.batch.draft_selection import DraftSelection
from thalweg.core.kernels import KernelConfig
from thalweg.kernels.attend.args import ContextChunk
from thalweg.kernels.dsa import deep_gemm, flashmla
from thalweg.kernels.dsa import triton as dsa
from thalweg.layers import paged_sparse
from thalweg.layers.kernel_layers import KernelLayers
from thalweg.layers.mla import Indexer
from thalweg.layers.paged_sparse import gather_records
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes, record_plane
from thalweg.memory.records import decode_record
from thalweg.models import catalog
from thalweg.models.catalog import read_config_facts
from thalweg.runner.ragged_graphs import CapturedRows, RaggedGraph, decode_rows
from thalweg.runner.step_buffers import StepBuffers

TOPK = 64
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "num_hidden_layers": 3, "first_k_dense_replace": 3, "q_lora_rank": 64, "kv_lora_rank": 64,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 1024, "tie_word_embeddings": False, "index_topk": TOPK, "index_head_dim": 32,
    "index_n_heads": 16, "index_topk_pattern": "FFS", "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
# of each step its rows: first page, tokens before, tokens of the step
STEPS = {
    "prompts no longer than the choice": [(1, 0, 40), (2, 0, 9)],
    "prompts, one of them longer": [(3, 0, 84), (2, 9, 20)],
    "a chunk beside decode rows": [(2, 29, 1), (3, 84, 1), (1, 40, 30)],
    "decode rows": [(2, 30, 1), (3, 85, 1), (1, 70, 1)],
    "rows of two tokens": [(2, 31, 2), (3, 86, 2)],
}
TREES = {"a tree": [(3, 88, 6)], "short trees": [(2, 33, 4), (1, 40, 5)]}
FP8 = {"kv": "fp8_ds_mla", "fp8_index": True}


def scattered(scores_NS: torch.Tensor, topk: int) -> torch.Tensor:
    """A choice of any candidates, the same for the same context."""
    order = torch.arange(scores_NS.shape[1]) * 7919 % 4093
    return select_top_k(torch.where(scores_NS == -torch.inf, -torch.inf, order.float()), topk)


def pair(selection: Selection, pattern: str = "FFS", index_heads: int = 5, **kinds: Any) -> tuple[Any, Any]:
    """Kernels and plain torch with the same weights, a layer for each letter of the pattern."""
    config = CONFIG | {"num_hidden_layers": len(pattern), "index_topk_pattern": pattern, "index_n_heads": index_heads}
    facts, device = read_config_facts(config, "sparse"), torch.device("cpu")
    by = {"decode": "triton_sparse", "prefill": "triton_sparse"} | kinds
    kinds = {key: value for key, value in kinds.items() if key not in ("decode", "prefill")}
    kernels = catalog.assemble(facts, KernelLayers(torch.float32, device, KernelConfig(**by)))
    reference = catalog.assemble(facts, ReferenceLayers(torch.float32, device, kernels=KernelConfig(**kinds)))
    for model in (kernels, reference):
        zoo.fill(model)
        for module in model.modules():
            if isinstance(module, Indexer):
                module.selection = selection
    return kernels, reference


def beside_torch(selection: Selection, tolerance: float, **kinds: Any) -> None:
    """Without masks; `masked_prompts` has them."""
    kernels, reference = pair(selection, **kinds)
    kernels.metadata.masked = ()
    ours, theirs = (Planes(model.planes(), 16) for model in (kernels, reference))
    generator = torch.Generator().manual_seed(1)
    for name, rows in (STEPS | TREES).items():
        plain, paged = shapes.batches(rows, torch.device("cpu"), generator, 64)
        if name in TREES:
            plain, paged = (shapes.branched(batch, rows, len(rows))[0] for batch in (plain, paged))
        want, got = reference.forward(plain, theirs), kernels.forward(paged, ours)
        error = (got - want).norm(dim=1) / want.norm(dim=1)
        assert float(error.max()) < tolerance, f"{name}: {error}"
    for spec in ours.specs:
        same = [
            planes.read(spec.name, spec.layer, planes.paged(spec.name, spec.layer)[1:], torch.float32)
            for planes in (ours, theirs)
        ]
        assert float((same[0] - same[1]).norm() / same[1].norm()) < tolerance, spec


def pieces_of_few_tokens() -> None:
    """A piece of a graph for so few tokens that its padding looks like a row of a verification is replayed with a
    decode row and a prompt: what it captured attends to these.
    """
    kernels, reference = pair(select_top_k)
    ours, theirs = (Planes(model.planes(), 16) for model in (kernels, reference))
    generator, cpu, attends = torch.Generator().manual_seed(3), torch.device("cpu"), list[Any]()

    def captured(attend: Any, step: Any, *inputs: torch.Tensor) -> torch.Tensor:
        assert step.rest is None
        attends.append(attend)
        return no_graph_break(attend, step, *inputs)

    def replayed(attend: Any, step: Any, *inputs: torch.Tensor) -> torch.Tensor:
        return no_graph_break(attends.pop(0), step, *inputs)

    for rows in ([(1, 0, 40)], [(1, 40, 1), (2, 0, 3)]):
        plain, paged = shapes.batches(rows, cpu, generator, 64)
        if len(rows) > 1:
            padding = shapes.batches([(3, 0, 4)], cpu, generator, 64)[1]
            kernels.forward(replace(padding, graph_break=captured), ours)
            paged = replace(paged, graph_break=replayed)
        want, got = reference.forward(plain, theirs), kernels.forward(paged, ours)
        assert float((got - want).norm() / want.norm()) < 2e-3, rows
    assert not attends


def masked_prompts(tolerance: float, **kinds: Any) -> None:
    """Prompts whose contexts are expanded, of which a mask leaves what is chosen: a whole one beside a short one, and a
    chunk beside decode rows. Contexts that are too long, and steps with little of theirs, attend to their choice.
    """
    kernels, reference = pair(select_top_k, "FS", **kinds)
    kernels.metadata.masked, masks = ((128, 0.25),), list[tuple[int, ...]]()
    ours, theirs = (Planes(model.planes(), 24) for model in (kernels, reference))
    generator, plain_mask = torch.Generator().manual_seed(5), dsa.mask_of

    def mask_of(chosen_TK: torch.Tensor, width: int) -> torch.Tensor:
        mask_TS = plain_mask(chosen_TK, width)
        assert torch.equal(mask_TS.sum(1), (chosen_TK >= 0).sum(1)) and int(mask_TS.max()) == 1
        masks.append(tuple(mask_TS.shape))
        return mask_TS

    vars(dsa)["mask_of"] = mask_of
    steps = [[(3, 0, 84), (6, 0, 29)], [(6, 29, 1), (3, 84, 1), (8, 0, 70)], [(6, 30, 1), (8, 70, 40), (12, 0, 9)]]
    steps += [[(8, 110, 20), (12, 9, 2)], [(8, 130, 30)]]
    for rows in steps:
        plain, paged = shapes.batches(rows, torch.device("cpu"), generator, 64)
        want, got = reference.forward(plain, theirs), kernels.forward(paged, ours)
        error = (got - want).norm(dim=1) / want.norm(dim=1)
        assert float(error.max()) < tolerance, f"{rows}: {error}"
    assert masks == [shape for shape in ((113, 84), (70, 70), (49, 110)) for _ in "FS"], masks
    vars(dsa)["mask_of"] = plain_mask


def captured_prompts(**kinds: Any) -> None:
    """A step with prompts as one graph has it, with padding: while all of every context is chosen."""
    kernels, reference = pair(select_top_k, "FS", **kinds)
    ours, theirs = (Planes(model.planes(), 16) for model in (kernels, reference))
    generator, cpu = torch.Generator().manual_seed(4), torch.device("cpu")
    room = kernels.metadata.captured_cached_tokens(32, ours)
    assert room == (0 if "kv" in kinds else 32) and kernels.metadata.captured_context == TOPK
    graph = RaggedGraph(64, 3, room, kernels, StepBuffers(64, cpu), CapturedRows(3, TOPK, cpu))
    for rows in (
        [(1, 0, 20), (2, 0, 9)],
        [(1, 20, 1), (2, 9, 1), (3, 0, 33), (4, 0, 2)],
        [(3, 33, 1), (4, 2, 30), (5, 0, 7)],
    ):
        plain, paged = shapes.batches(rows, cpu, generator, 64)
        want = reference.forward(plain, theirs)
        if not graph.fits(paged):
            assert not room and rows[1][1] == 2, "with a cached context"
            continue
        graph.shared.fill(paged, graph.tokens)
        graph.rows.bind(paged, decode_rows(paged), graph.decode)
        got = kernels.forward(graph.batch(), ours)[: len(want)]
        error = (got - want).norm(dim=1) / want.norm(dim=1)
        assert float(error.max()) < (0.1 if kinds else 2e-3), f"{rows}: {error}"
    longer = shapes.batches([(1, 0, 9), (2, TOPK, 1)], cpu, generator, 64)[1]
    assert not graph.fits(longer), "of which a layer would choose"


class FlashMla(ModuleType):
    """What the library documents, in plain torch. Refuses what it would read wrongly."""

    def __init__(self) -> None:
        super().__init__("flash_mla")
        self.calls: list[tuple[str, int]] = []  # name of a function, tokens

    def flash_mla_sparse_fwd(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        d_v: int = 512,
        topk_length: torch.Tensor | None = None,
        use_legacy: bool = False,
    ) -> tuple[torch.Tensor, None, None]:
        assert use_legacy and topk_length is not None and kv.shape[1] == 1 == indices.shape[1]
        seen = torch.arange(indices.shape[2]) < topk_length.unsqueeze(1)
        assert torch.equal(seen, indices[:, 0] >= 0), "as many as the length says come first"
        self.calls.append(("flash_mla_sparse_fwd", len(q)))
        return self._attend(q, kv[:, 0], indices[:, 0], sm_scale, d_v), None, None

    def get_mla_metadata(self) -> tuple[SimpleNamespace, None]:
        return SimpleNamespace(shape=None), None

    def flash_mla_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: None,
        cache_seqlens: None,
        head_dim_v: int,
        schedule: SimpleNamespace,
        *,
        softmax_scale: float,
        is_fp8_kvcache: bool,
        indices: torch.Tensor,
        use_legacy: bool,
    ) -> tuple[torch.Tensor, None]:
        assert use_legacy and is_fp8_kvcache and q.shape[1] == 1 == k_cache.shape[2]
        assert schedule.shape in (None, (*q.shape, *indices.shape)), "a schedule is of one shape"
        schedule.shape = *q.shape, *indices.shape
        self.calls.append(("flash_mla_with_kvcache", len(q)))
        records = k_cache[:, :, 0]
        keys = decode_record(records.flatten(0, 1), head_dim_v, q.dtype)
        return self._attend(q[:, 0], keys, indices[:, 0], softmax_scale, head_dim_v).unsqueeze(1), None

    @staticmethod
    def _attend(q: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor, scale: float, rank: int) -> torch.Tensor:
        assert indices.dtype == torch.int32 and indices.is_contiguous() and int(indices.max()) < len(keys)
        parts = []
        for query, places in zip(q, indices, strict=True):
            seen = keys[places[places >= 0].long()]
            parts.append((scale * query @ seen.T).softmax(-1) @ seen[:, :rank])
        return torch.stack(parts)


def by_flashmla() -> None:
    """Each of its kernels beside itself and beside Triton's, in launches of few tokens."""
    library = sys.modules["flash_mla"] = FlashMla()
    vars(flashmla)["AT_ONCE"] = 16
    own, fp8 = "triton_sparse", "flash_mla_with_kvcache"
    for decode, prefill, kinds, selection, tolerance, call, decoded in (
        ("flashmla_sparse", "flashmla_sparse", {}, select_top_k, 2e-3, "flash_mla_sparse_fwd", 512),
        ("flashmla_kv", own, FP8, scattered, 0.1, fp8, 512),
        (own, "flashmla_kv", FP8, scattered, 0.1, fp8, 512),
        (own, "flashmla_kv", FP8, scattered, 0.1, "flash_mla_sparse_fwd", 1),
    ):
        library.calls.clear()
        vars(flashmla)["LEAST_DECODING"] = decoded
        beside_torch(selection, tolerance, pattern="F", decode=decode, prefill=prefill, **kinds)
        assert {name for name, _ in library.calls} == {call}
        tokens = [count for _, count in library.calls]
        assert (max(tokens) == 16) == (prefill != own), "prompts fill a launch"
        assert (min(tokens) < 8) == (decode != own), "decode rows are few"


def by_deep_gemm() -> None:
    """Index scores by what stands for DeepGEMM beside those of our kernel: the same choices and the same outputs, of
    decode rows, rows of two tokens and prompts, in launches of few tokens; trees of drafts stay with our kernel.
    """
    library = DeepGemm()
    library.install()
    vars(deep_gemm)["MIN_PROMPT_TOKENS"] = 30
    by_kernel, by_library = (
        pair(select_top_k, "FF", 32, index_scores=name, **FP8)[0] for name in ("triton", "deep_gemm")
    )
    by_kernel.metadata.masked = by_library.metadata.masked = ()
    planes = [Planes(model.planes(), 16) for model in (by_kernel, by_library)]
    generator, cpu = torch.Generator().manual_seed(1), torch.device("cpu")
    expected = {
        "prompts no longer than the choice": [],
        "prompts, one of them longer": [("fp8_mqa_logits", 24)] * 3 + [("fp8_mqa_logits", 12)],
        "a chunk beside decode rows": [("fp8_paged_mqa_logits", 2), ("fp8_mqa_logits", 28), ("fp8_mqa_logits", 2)],
        "decode rows": [("fp8_paged_mqa_logits", 3)],
        "rows of two tokens": [("fp8_paged_mqa_logits", 1)] * 2,
        "a tree": [],
        "short trees": [],
    }
    for name, rows in (STEPS | TREES).items():
        library.calls.clear()
        vars(paged_sparse)["SCORES_AT_ONCE"] = 4 * 84 * (3 if name == "rows of two tokens" else 24)
        batch = shapes.batches(rows, cpu, generator, 64)[1]
        if name in TREES:
            batch = shapes.branched(batch, rows, len(rows))[0]
        want, got = (model.forward(batch, of) for model, of in zip((by_kernel, by_library), planes, strict=True))
        error = (got - want).norm(dim=1) / want.norm(dim=1)
        assert float(error.max()) < 1e-4, f"{name}: {error}"
        scored = [(call, shape[0]) for call, shape in library.calls if call != "get_paged_mqa_logits_metadata"]
        plans = len(library.calls) - len(scored)
        assert scored == 2 * expected[name], f"{name}: {scored}, of two layers"
        assert plans == sum(call == "fp8_paged_mqa_logits" for call, _ in expected[name]), "one plan for all layers"


def drafts_beside_torch(tolerance: float, **kinds: Any) -> None:
    """Steps of a draft that share one selection, of a row shorter than it and a longer one: a chain, then a tree."""
    kernels, reference = pair(scattered, pattern="FSS", **kinds)
    ours, theirs = (Planes(model.planes(), 16) for model in (kernels, reference))
    generator, cpu = torch.Generator().manual_seed(2), torch.device("cpu")
    for rows in (
        [(1, 0, 29), (3, 0, 84)],
        [(1, 29, 1), (3, 84, 1)],
        [(1, 30, 1), (3, 85, 1)],
        [(1, 31, 6), (3, 86, 6)],
    ):
        plain, paged = shapes.batches(rows, cpu, generator, 64)
        nodes = rows[0][2]
        if nodes == 1 and rows[0][1] == 29:
            room = (torch.zeros(2, TOPK, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))
            shared = [DraftSelection(*(x.clone() for x in room), True) for _ in range(2)]
            plain, paged = (replace(x, draft_selection=one) for x, one in zip((plain, paged), shared, strict=True))
        elif nodes <= 6:
            later = [one.later(nodes) for one in shared]
            plain, paged = (replace(x, draft_selection=one) for x, one in zip((plain, paged), later, strict=True))
        if nodes == 6:
            plain, paged = (shapes.branched(batch, rows, 2)[0] for batch in (plain, paged))
        want, got = reference.forward(plain, theirs), kernels.forward(paged, ours)
        error = (got - want).norm(dim=1) / want.norm(dim=1)
        assert float(error.max()) < tolerance, f"{rows}: {error}"
    assert all(torch.equal(*pair) for pair in zip(*(one[:2] for one in shared), strict=True))
    fresh = replace(paged, draft_selection=None)
    assert float((kernels.forward(fresh, ours) - got).norm() / got.norm()) > 10 * tolerance, "another selection"


def exact_products() -> None:
    """Lets the interpreter sum products in float64: a library's sums depend on the place of a row in its tile, those of
    a GPU's instruction do not.
    """

    def dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        wide = (x.data.astype(np.float64) for x in (a, b))
        return interpreter.TensorHandle((np.matmul(*wide) + d.data).astype(d.data.dtype), d.dtype.scalar)

    vars(interpreter)["InterpreterBuilder"].create_dot = dot


def invariant() -> None:
    """The same bits of a token alone, in a batch, in chunks, and as a node of a tree."""
    exact_products()
    vars(dsa)["waves"] = None  # as many parts as the step lets a choice have: not in this mode
    model, device = pair(select_top_k, "FS", deterministic=True)[0], torch.device("cpu")

    def run(steps: list[list[shapes.Part]], planes: Planes) -> list[torch.Tensor]:
        found = []
        for rows in steps:
            batch = shapes.batches(rows, device, torch.Generator(), 64)[1]
            words = torch.cat([torch.arange(at, at + n) * (page + 5) % 61 for page, at, n in rows])
            batch = replace(batch, ids_T=words)
            found.append(model.forward(batch, planes))
        return found

    alone, together = (Planes(model.planes(), 16) for _ in range(2))
    first = run([[(3, 0, 70)]], alone)[0]
    branched = deepcopy(alone)
    parts = run([[(3, 0, 30)], [(1, 0, 9), (3, 30, 40)]], together)
    assert torch.equal(first, torch.cat([parts[0], parts[1][9:]])), "chunks, and another row"
    (root,) = run([[(3, 70, 1)]], alone)
    (both,) = run([[(1, 9, 1), (3, 70, 1)]], together)
    assert torch.equal(root[0], both[1]), "another row"
    # the last node's path is cut out of the tree: its tokens in a chain give its bits
    rows = [(3, 70, 6)]
    batch = shapes.batches(rows, device, torch.Generator().manual_seed(7), 64)[1]
    tree, seen = shapes.branched(batch, rows, 1)
    nodes = model.forward(tree, branched)
    path = [column - 70 for column in seen[-1] if column >= 70]
    assert 1 < len(path) < 6, "it branches"
    chain = shapes.batches([(3, 70, len(path))], device, torch.Generator(), 64)[1]
    chain = replace(chain, ids_T=batch.ids_T[path])
    assert torch.equal(model.forward(chain, alone)[-1], nodes[-1]), "a node of a tree"


def records_in_chunks() -> None:
    """Cached records of ragged rows, from any token of theirs on, and zeros after the last row."""
    planes, x = Planes((record_plane(0, 64, 16),), 8), torch.randn(8 * 64, 80)
    planes.write("latent", 0, torch.arange(8 * 64), x)
    table, chunk = (
        torch.tensor([[3, 5], [1, 2]], dtype=torch.int32),
        (torch.tensor([70, 10]), torch.tensor([0, 20, 45])),
    )
    got = gather_records(planes.tokens("latent", 0), table, ContextChunk(*chunk, 50, 25), 64, torch.float32)
    places = [*range(5 * 64 + 6, 5 * 64 + 26), *range(64 + 10, 64 + 35)]
    want = planes.read("latent", 0, planes.tokens("latent", 0)[places], torch.float32)
    assert torch.equal(got[:45], want) and not got[45:].any()


def main() -> int:
    prepare()
    exact_casts()
    records_in_chunks()
    beside_torch(select_top_k, 2e-3)
    beside_torch(scattered, 0.1, **FP8)
    pieces_of_few_tokens()
    captured_prompts()
    captured_prompts(**FP8)
    masked_prompts(2e-3)
    masked_prompts(0.1, **FP8)
    by_flashmla()
    by_deep_gemm()
    drafts_beside_torch(2e-3)
    drafts_beside_torch(2e-3, deterministic=True)
    invariant()
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
