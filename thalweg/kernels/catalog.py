"""Every operation that has kernels. To add one: a folder with ref.py and case.py, and its name here. To add a backend:
an entry in its case.py.
"""

from __future__ import annotations

from importlib import import_module

from thalweg.kernels.case import Operation, no_sizes
from thalweg.kernels.experts.case import FP8 as EXPERTS_FP8
from thalweg.kernels.gemm.case import FP8 as GEMM_FP8
from thalweg.kernels.quantize.case import ROWS
from thalweg.kernels.weight_only.case import EIGHT_BIT, EIGHT_BIT_EXPERTS
from thalweg.kernels.weight_only.case import EXPERTS as WEIGHT_ONLY_EXPERTS

FOLDERS = (
    "all_reduce", "batch_invariant_gemm", "exchange", "expand_latents", "expert_slots", "experts", "fp8_block", "gemm",
    "gqa", "indexer", "mla", "moe_align", "norm", "nsa", "pack_rows", "quantize", "rope", "router", "silu_mul",
    "temperature", "topk_topp", "verify", "weight_only",
)  # fmt: skip


def _operation(folder: str) -> Operation:
    case = import_module(f"thalweg.kernels.{folder}.case")
    return Operation(case.cases, dict(case.BACKENDS), vars(case).get("sizes", no_sizes))


OPERATIONS = {folder: _operation(folder) for folder in FOLDERS} | {
    "experts_fp8": EXPERTS_FP8,
    "gemm_fp8": GEMM_FP8,
    "quantize_rows": ROWS,
    "weight_only_experts": WEIGHT_ONLY_EXPERTS,
    "eight_bit": EIGHT_BIT,
    "eight_bit_experts": EIGHT_BIT_EXPERTS,
}
