"""Small models of the published shapes, with random weights, for kernels and for the reference."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.cpu import zoo
from thalweg.batch.batch import Batch, Group, RowExtent, TreeMask
from thalweg.config.model import ModelFacts
from thalweg.core.kernels import KernelConfig
from thalweg.layers.kernel_layers import KernelLayers
from thalweg.layers.reference import ReferenceLayers
from thalweg.memory.planes import Planes
from thalweg.models import catalog
from thalweg.models.catalog import read_config_facts
from thalweg.quant.catalog import Declared
from thalweg.spec.tree import tree_masks_of

KERNELS = KernelConfig(decode="triton", prefill="triton")
SPARSE_KERNELS = KernelConfig(decode="triton_sparse", prefill="triton_sparse")
COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
}
LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": COMMON | {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4, "num_hidden_layers": 2, "rope_theta": 1e6,
    },
    "qwen3": COMMON | {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2, "rope_theta": 1e6,
    },
    "v2-lite": COMMON | LATENT | {
        "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "num_attention_heads": 16,
        "q_lora_rank": None,
        "num_hidden_layers": 3, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0, "rope_scaling": YARN | {"mscale": 0.707,
        "mscale_all_dim": 0.707},
    },
    "v3": COMMON | LATENT | {
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "num_hidden_layers": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2, "routed_scaling_factor": 2.5, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128],
        "activation_scheme": "dynamic"},
    },
}  # fmt: skip
# V3's attention without its experts and in bf16: nothing in it turns rounding into another expert, so that its tokens
# can be compared
DENSE = {
    "v3-dense": {k: v for k, v in SHAPES["v3"].items() if k != "quantization_config"} | {"first_k_dense_replace": 2}
}
SPARSE: dict[str, Any] = COMMON | LATENT | {
    "architectures": ["DeepseekV32ForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "moe_intermediate_size": 256, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "num_attention_heads": 8, "q_lora_rank": 256, "num_hidden_layers": 3, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
    "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 16,
}  # fmt: skip

# weights whose products round activations to 8 bits, on a CPU too
ROUNDED = {
    "v3-w4afp8": SHAPES["v3"] | {"quantization_config": {"quant_method": "w4afp8"}},
    "v3-int8": SHAPES["v3"] | {"quantization_config": {"quant_method": "w8a8_int8"}},
}


def published(shape: str) -> dict[str, Any]:
    """What config.json says of a shape."""
    return (SHAPES | DENSE | ROUNDED | {"v32": SPARSE})[shape]


def facts(shape: str) -> ModelFacts:
    return read_config_facts(published(shape), shape)


def folder(shape: str, path: Path) -> Path:
    """A checkpoint folder that has only its config.json: enough for random weights."""
    (path / "config.json").write_text(json.dumps(published(shape)))
    return path


def pair(shape: str, device: torch.device, choice: KernelConfig = KERNELS) -> tuple[Any, Any]:
    """(reference in float32, kernels in bf16) with the same random weights and kind of KV cache."""
    return twins(facts(shape), device, choice)


def twins(of: ModelFacts, device: torch.device, choice: KernelConfig) -> tuple[Any, Any]:
    """See `pair`."""
    kernels = catalog.assemble(of, kernel_layers(of, device, choice))
    kept = KernelConfig(kv=choice.kv, latent=choice.latent, fp8_index=choice.fp8_index)
    schemes = Declared(of.quantization_config)
    reference = catalog.assemble(of, ReferenceLayers(torch.float32, device, kernels=kept, schemes=schemes))
    for model in (kernels, reference):
        zoo.fill(model)  # random weights are a function of their published names
    return reference, kernels


def kernel_layers(of: ModelFacts, device: torch.device, choice: KernelConfig = KERNELS) -> KernelLayers:
    """Layers on the kernels, of weights in the schemes that the configuration declares."""
    return KernelLayers(torch.bfloat16, device, choice, schemes=Declared(of.quantization_config))


Part = tuple[int, int, int]  # first page of the row, tokens before this step, tokens of this step


def batches(
    rows: list[Part], device: torch.device, generator: torch.Generator, vocab: int, page_size: int = 64
) -> tuple[Batch, Batch]:
    """One step of these rows, for the reference and for the kernels (whose tables are int32)."""
    ids = torch.cat([torch.randint(0, vocab, (n,), generator=generator) for _, _, n in rows]).to(device)
    positions = torch.cat([torch.arange(at, at + n) for _, at, n in rows]).to(device)
    write = torch.cat([page * page_size + torch.arange(at, at + n) for page, at, n in rows]).to(device)
    wide = max(-(-(at + n) // page_size) for _, at, n in rows)
    table = torch.tensor(
        [[page + i if i * page_size < at + n else 0 for i in range(wide)] for page, at, n in rows], device=device
    )
    groups: list[Group] = []
    token = 0
    for i, (_, at, n) in enumerate(rows):
        last = groups[-1] if groups and groups[-1].query == n else None
        if last is None:
            groups.append(Group(i, 1, token, n, at + n))
        else:
            groups[-1] = Group(last.row_start, last.rows + 1, last.token_start, n, max(last.max_kv_len, at + n))
        token += n
    real, every = torch.ones(token, dtype=torch.bool, device=device), torch.arange(token, device=device)
    rest = (real, every, tuple(groups), tuple(RowExtent(n, at + n) for _, at, n in rows))
    return Batch(ids, positions, write, table, *rest), Batch(ids, positions, write, table.int(), *rest)


def branched(batch: Batch, rows: list[Part], trees: int) -> tuple[Batch, list[list[int]]]:
    """The step with the tokens of its first `trees` rows as trees, whose shapes follow from their sizes; and the
    columns that each token sees.
    """
    rng, device = random.Random(len(batch.ids_T)), batch.ids_T.device
    positions: list[int] = []
    masks: list[int] = []
    seen: list[list[int]] = []
    for i, (_, at, n) in enumerate(rows):
        parents = [rng.randrange(max(node - 5, 0), node) if i < trees else node - 1 for node in range(1, n)]
        paths = [[0]]
        for node, parent in enumerate(parents, 1):
            paths.append([*paths[parent], node])
        positions += [at + len(path) - 1 for path in paths]
        depths = torch.tensor([[len(path) - 1 for path in paths[1:]]])
        masks += (
            tree_masks_of(torch.tensor([parents], dtype=torch.int64), depths, n)[0].tolist() if i < trees else [-1] * n
        )
        seen += [[*range(at), *(at + node for node in path)] for path in paths]
    tree = TreeMask(batch.positions_T, torch.tensor(masks, device=device), trees)
    return replace(batch, positions_T=torch.tensor(positions, device=device), tree=tree), seen


def planes(model: Any, device: torch.device) -> Planes:
    return Planes(model.planes(), 64, device)
