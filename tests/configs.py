"""Short forms of `EngineConfig` for tests."""

from __future__ import annotations

from typing import Any

import msgspec

from thalweg.config.engine import EngineConfig
from thalweg.core.kernels import KernelConfig
from thalweg.core.plan import PAGE
from thalweg.core.tree import CHAIN, TreeShape


def fields(
    *,
    num_pages: int | None = None,
    max_steps_in_flight: int | None = None,
    num_drafts: int | None = None,
    tree: TreeShape = CHAIN,
    kernels: KernelConfig | None = None,
    **others: Any,
) -> dict[str, Any]:
    """The fields of an `EngineConfig` by which its properties of these names have these values, and `others` as they
    are.
    """
    made = dict(others)
    if num_pages is not None:
        made["max_total_tokens"] = num_pages * PAGE * made.get("dcp_size", 1)
    if max_steps_in_flight is not None:
        made["overlap_schedule"] = max_steps_in_flight > 1
    if num_drafts is not None:
        assert not tree.is_tree or tree.num_drafts == num_drafts
        made["speculative_num_steps"] = tree.max_depth if tree.is_tree else num_drafts
        made["speculative_num_draft_tokens"] = num_drafts + 1
        made["speculative_eagle_topk"] = tree.branching
        made["speculative_tree"] = "dynamic" if tree.dynamic else "static"
    if kernels is not None:
        made |= {
            "decode_attention_backend": kernels.decode,
            "prefill_attention_backend": kernels.prefill,
            "moe_runner_backend": kernels.moe,
            "shared_experts_fusion": kernels.fusion,
            "fp8_gemm_backend": kernels.fp8_gemm,
            "kv_cache_dtype": kernels.kv,
            "dsa_topk_backend": kernels.topk,
            "dsa_paged_mqa_logits_backend": kernels.index_scores,
            "fp8_index_keys": kernels.fp8_index,
            "mla": kernels.latent,
            "hisparse_device_buffer_size": kernels.hot,
            "deterministic_inference": kernels.deterministic,
        }
    return made


def config(**values: Any) -> EngineConfig:
    return EngineConfig(**fields(**values))


def changed(base: EngineConfig, **values: Any) -> EngineConfig:
    return msgspec.structs.replace(base, **fields(**values))
