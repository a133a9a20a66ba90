"""Models on several GPUs: each token of eager and captured steps is one GPU's best, or nearly as good, after the same
tokens. Each engine has a process of its own.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.shapes import SHAPES
from tests.gpu.test_compose import SMALL

ROOT, V3 = Path(__file__).parents[2], SMALL["v3"]
TOKENS = 96
MODELS = {
    "v3": V3,
    "v32": V3
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_topk": 128,
        "index_head_dim": 128,
        "index_n_heads": 16,
    },
    "v32 by libraries": V3
    | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "num_attention_heads": 128,
        "index_topk": 128,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    "w4afp8": V3 | {"quantization_config": {"quant_method": "w4afp8", "group_size": 128}},
    "qwen3": SHAPES["qwen3"],
}
# the second of two stages begins with a layer that shares the first one's selection
MODELS["v32 shared"] = MODELS["v32"] | {"num_hidden_layers": 4, "index_topk_pattern": "FSSS"}
SIZES = ("tp_size", "pp_size")  # which multiply the GPUs
EAGER, GRAPHS = 'cuda_graph_mode="none"', 'cuda_graph_mode="full_and_piecewise"'
NEXTN = 'speculative_algorithm="NEXTN"'
DP2 = ("tp_size=2", "dp_size=2", "enable_dp_attention=true", "ep_size=2")
CP2, DCP2 = ("tp_size=2", "attn_cp_size=2"), ("tp_size=2", "dcp_size=2")
SPARSE, RECORDS = 'dsa_decode_backend="triton"', 'kv_cache_dtype="fp8_ds_mla"'
LAYOUTS = {
    "tp2 eager": ("v3", "tp_size=2", EAGER),
    "tp2 graphs": ("v3", "tp_size=2", GRAPHS),
    "tp2 ep2 graphs": ("v3", "tp_size=2", "ep_size=2", GRAPHS),
    "dp2 ep2 graphs": ("v3", *DP2, GRAPHS),
    "dp2 alltoall graphs": ("v3", *DP2, 'moe_a2a_backend="alltoall"', GRAPHS),
    "tp2 nextn graphs": ("v3", "tp_size=2", NEXTN, GRAPHS),
    "pp2 eager": ("v3", "pp_size=2", EAGER),
    "pp2 graphs": ("v3", "pp_size=2", "chunked_prefill_size=64", GRAPHS),
    "pp2 nextn graphs": ("v3", "pp_size=2", NEXTN, GRAPHS),
    "cp2 eager": ("v3", *CP2, EAGER),
    "cp2 graphs": ("v3", *CP2, GRAPHS),
    "cp2 zigzag nextn graphs": ("v3", *CP2, 'cp_strategy="zigzag"', NEXTN, GRAPHS),
    "dcp2 eager": ("v3", *DCP2, EAGER),
    "dcp2 graphs": ("v3", *DCP2, "chunked_prefill_size=64", GRAPHS),
    "dcp2 nextn graphs": ("v3", *DCP2, NEXTN, GRAPHS),
    "v32 tp2 graphs": ("v32", "tp_size=2", SPARSE, GRAPHS),
    "v32 tp2 shared indexer": ("v32", "tp_size=2", "shard_indexer=true", SPARSE, 'cuda_graph_mode="piecewise"'),
    "v32 tp2 nextn graphs": ("v32", "tp_size=2", NEXTN, "index_share_for_mtp_iteration=true", SPARSE, GRAPHS),
    "v32 pp2 graphs": ("v32", "pp_size=2", SPARSE, GRAPHS),
    "v32 shared pp2 graphs": ("v32 shared", "pp_size=2", "piecewise_cuda_graph_tokens=[16, 64, 256]", SPARSE, GRAPHS),
    "v32 cp2 graphs": ("v32", *CP2, SPARSE, GRAPHS),
    "v32 dcp2 graphs": ("v32", *DCP2, SPARSE, GRAPHS),
    "v32 by libraries tp2 graphs": ("v32 by libraries", "tp_size=2", RECORDS, GRAPHS),
    "v32 by libraries cp2 graphs": ("v32 by libraries", *CP2, RECORDS, GRAPHS),
    "v32 by libraries pp2 nextn eager": ("v32 by libraries", "pp_size=2", RECORDS, NEXTN, EAGER),
    "v32 tp2 hot sets": ("v32", "tp_size=2", "enable_hisparse=true", "hisparse_host_memory_gb=2", SPARSE, GRAPHS),
    "w4afp8 tp2 graphs": ("w4afp8", "tp_size=2", GRAPHS),
    "w4afp8 dp2 ep2 graphs": ("w4afp8", *DP2, GRAPHS),
    "w4afp8 pp2 nextn graphs": ("w4afp8", "pp_size=2", NEXTN, GRAPHS),
    "qwen3 pp2 graphs": ("qwen3", "pp_size=2", GRAPHS),
    "qwen3 cp2 graphs": ("qwen3", *CP2, GRAPHS),
    "tp4 graphs": ("v3", "tp_size=4", GRAPHS),
    "pp2 tp2 graphs": ("v3", "pp_size=2", "tp_size=2", GRAPHS),
    "cp2 tp2 graphs": ("v3", "tp_size=4", "attn_cp_size=2", GRAPHS),
    "dcp2 dp2 graphs": ("v3", "tp_size=4", "dp_size=2", "enable_dp_attention=true", "dcp_size=2", GRAPHS),
}


def small_model(folder: Path, model: str) -> Path:
    """Its configuration and a tokenizer: the weights are random."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODELS[model] | {"vocab_size": 2048}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models/tiny" / name, folder)
    return folder


def engine(folder: Path, what: str, *wishes: str) -> list[Any]:
    """What tests.gpu.generate prints."""
    command = [sys.executable, "-m", "tests.gpu.generate", str(folder), what, 'load_format="dummy"', *wishes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def is_near(gaps: list[float], model: str) -> bool:
    """gaps: how much likelier one GPU's best token is than each token, in nats. Tokens of one GPU's captured steps,
    judged by its own prefill, are within 0.1 in 91 to 95 of 96 cases with V3; with V3.2, whose choice of context has
    near ties as well, in 81 to 89.
    """
    most, least = (3, 0.7) if "v32" in model else (2, 0.9)
    return len(gaps) == TOKENS and max(gaps) < most and sum(gap < 0.1 for gap in gaps) > least * TOKENS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_gpus_give_one_gpus_tokens(layout: str, tmp_path: Path, cuda: torch.device) -> None:
    model, *wishes = LAYOUTS[layout]
    asked = {name: json.loads(value) for name, _, value in (wish.partition("=") for wish in wishes)}
    if torch.cuda.device_count() < math.prod(asked.get(name, 1) for name in SIZES):
        pytest.skip("takes more GPUs")
    folder, file = small_model(tmp_path / "small", model), tmp_path / "generated.json"
    file.write_text(json.dumps(engine(folder, str(TOKENS), *wishes)))
    for gaps in engine(folder, str(file), EAGER, *(wish for wish in wishes if wish in (SPARSE, RECORDS))):
        assert is_near(gaps, model), gaps
