"""Every operation that has kernels. To add one: a folder with ref.py and case.py, and a row here; a backend is a row of
its case.py.
"""

from __future__ import annotations

from thalweg.kernels.batch_invariant_gemm import case as batch_invariant_gemm
from thalweg.kernels.case import Operation
from thalweg.kernels.expand_latents import case as expand_latents
from thalweg.kernels.experts import case as experts
from thalweg.kernels.experts import case_fp8 as experts_fp8
from thalweg.kernels.fp8_block import case as fp8_block
from thalweg.kernels.gemm import case as gemm
from thalweg.kernels.gemm import case_fp8 as gemm_fp8
from thalweg.kernels.gqa import case as gqa
from thalweg.kernels.indexer import case as indexer
from thalweg.kernels.mla import case as mla
from thalweg.kernels.moe_align import case as moe_align
from thalweg.kernels.norm import case as norm
from thalweg.kernels.quantize import case as quantize
from thalweg.kernels.rope import case as rope
from thalweg.kernels.router import case as router
from thalweg.kernels.silu_mul import case as silu_mul
from thalweg.kernels.temperature import case as temperature
from thalweg.kernels.topk_topp import case as topk_topp
from thalweg.kernels.verify_chain import case as verify_chain
from thalweg.kernels.verify_tree import case as verify_tree

OPERATIONS = {
    "expand_latents": Operation(expand_latents.cases, dict(expand_latents.BACKENDS)),
    "experts": Operation(experts.cases, dict(experts.BACKENDS), experts.sizes),
    "experts_fp8": Operation(experts_fp8.cases, dict(experts_fp8.BACKENDS), experts_fp8.sizes),
    "fp8_block": Operation(fp8_block.cases, dict(fp8_block.BACKENDS)),
    "gemm": Operation(gemm.cases, dict(gemm.BACKENDS), gemm.sizes),
    "gemm_fp8": Operation(gemm_fp8.cases, dict(gemm_fp8.BACKENDS), gemm_fp8.sizes),
    "gqa": Operation(gqa.cases, dict(gqa.BACKENDS), gqa.sizes),
    "indexer": Operation(indexer.cases, dict(indexer.BACKENDS)),
    "batch_invariant_gemm": Operation(batch_invariant_gemm.cases, dict(batch_invariant_gemm.BACKENDS)),
    "mla": Operation(mla.cases, dict(mla.BACKENDS), mla.sizes),
    "norm": Operation(norm.cases, dict(norm.BACKENDS), norm.sizes),
    "moe_align": Operation(moe_align.cases, dict(moe_align.BACKENDS)),
    "quantize": Operation(quantize.cases, dict(quantize.BACKENDS), quantize.sizes),
    "rope": Operation(rope.cases, dict(rope.BACKENDS)),
    "router": Operation(router.cases, dict(router.BACKENDS), router.sizes),
    "silu_mul": Operation(silu_mul.cases, dict(silu_mul.BACKENDS), silu_mul.sizes),
    "temperature": Operation(temperature.cases, dict(temperature.BACKENDS)),
    "topk_topp": Operation(topk_topp.cases, dict(topk_topp.BACKENDS)),
    "verify_chain": Operation(verify_chain.cases, dict(verify_chain.BACKENDS)),
    "verify_tree": Operation(verify_tree.cases, dict(verify_tree.BACKENDS)),
}
