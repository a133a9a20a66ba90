"""A model with sparse attention on our kernels, in Triton's interpreter, beside plain torch: prompts, chunks and decode
steps, shorter and longer than the choice, with layers that share one. A process of its own, since Triton looks once
whether it interprets.

    TRITON_INTERPRET=1 python -m tests.cpu.interpreted_sparse
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.cpu import zoo
from tests.cpu.interpreted_attention import interpret_scalars
from tests.gpu import shapes
from thalweg.attention.selection import select_top_k
from thalweg.core.kernels import KernelConfig
from thalweg.layers.kernel_layers import KernelLayers
from thalweg.layers.mla import Indexer
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.catalog import read_config_facts

TOPK = 64
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"], "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "num_hidden_layers": 3, "first_k_dense_replace": 3, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 1024, "tie_word_embeddings": False, "index_topk": TOPK, "index_head_dim": 32,
    "index_n_heads": 16, "index_topk_pattern": "FFS", "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
# of each step its rows: first page, tokens before, tokens of the step
STEPS = {
    "prompts no longer than the choice": [(1, 0, 40), (2, 0, 9)],
    "prompts, one of them longer": [(3, 0, 150), (2, 9, 30)],
    "a chunk beside decode rows": [(2, 39, 1), (3, 150, 1), (1, 40, 60)],
    "decode rows": [(2, 40, 1), (3, 151, 1), (1, 100, 1)],
    "rows of two tokens": [(2, 41, 2), (3, 152, 2)],
}


def scattered(scores_NS: torch.Tensor, topk: int) -> torch.Tensor:
    """A choice of any candidates, the same for the same context."""
    order = torch.arange(scores_NS.shape[1]) * 7919 % 4093
    return select_top_k(torch.where(scores_NS == -torch.inf, -torch.inf, order.float()), topk)


def main() -> int:
    interpret_scalars()
    facts, device = read_config_facts(CONFIG, "sparse"), torch.device("cpu")
    choice = KernelConfig(decode="triton_sparse", prefill="triton_sparse")
    kernels = catalog.assemble(facts, KernelLayers(torch.float32, device, choice))
    reference = catalog.assemble(facts, ReferenceLayers(torch.float32, device))
    for model in (kernels, reference):
        zoo.fill(model)
    ours, theirs = (Planes(model.planes(), 16, device) for model in (kernels, reference))
    generator = torch.Generator().manual_seed(1)
    for name, rows in STEPS.items():
        plain, paged = shapes.batches(rows, device, generator, 64)
        want, got = reference.forward(plain, theirs), kernels.forward(paged, ours)
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")
    for model in (kernels, reference):  # any other rule of choice, too
        for module in model.modules():
            if isinstance(module, Indexer):
                module.selection = scattered
    plain, paged = shapes.batches([(5, 0, 120)], device, generator, 64)
    torch.testing.assert_close(kernels.forward(paged, ours), reference.forward(plain, theirs), rtol=2e-3, atol=2e-3)
    for plane, other in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(plane[1:], other[1:], rtol=1e-3, atol=1e-3)
    return 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
