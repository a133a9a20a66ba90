"""The bundled model's dimensions, and its `config.json` in the published DeepSeek-V3.2 fields."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """Dimensions of a DeepSeek-V3.2 model; the names are those of `config.json`."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 8
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    routed_scaling_factor: float = 2.5
    index_n_heads: int = 16
    index_head_dim: int = 64
    index_topk: int = 64
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    yarn_factor: float = 8.0
    yarn_original_positions: int = 512
    rms_norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(width) times YaRN's magnitude squared."""
        magnitude = 0.1 * math.log(self.yarn_factor) + 1.0
        return magnitude**2 / math.sqrt(self.qk_head_dim)

    def published(self) -> dict[str, object]:
        """The contents of `config.json`."""
        own = ("yarn_factor", "yarn_original_positions")
        return {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            **{name: value for name, value in self.__dict__.items() if name not in own},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "ep_size": 1,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "num_key_value_heads": self.num_attention_heads,
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "scale_fmt": "ue8m0",
                "weight_block_size": [128, 128],
            },
            "rope_scaling": {
                "type": "yarn",
                "factor": self.yarn_factor,
                "original_max_position_embeddings": self.yarn_original_positions,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def read_shape(folder: Path) -> Shape:
    """The shape of a checkpoint, from its `config.json`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = {name: config[name] for name in Shape.__dataclass_fields__ if name in config}
    yarn = config["rope_scaling"]
    return Shape(**own, yarn_factor=yarn["factor"], yarn_original_positions=yarn["original_max_position_embeddings"])


def save_config(shape: Shape, folder: Path) -> None:
    """Write `config.json` and `generation_config.json`."""
    sampling = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
    for name, value in (("config.json", shape.published()), ("generation_config.json", sampling)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
