"""The catalogs of kernel backends, in order of measured preference: what each supports, and where its code is. No
torch.

To add an attention backend: a file with its code, and a row in `DECODE` or `PREFILL`. A capability is a field that
every row must answer.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from thalweg.core.capabilities import Capabilities

YES, NO, BOTH = (True,), (False,), (True, False)
CHIPS = {  # by compute capability, or by the name of AMD's compiler
    "8.0": "ampere", "8.6": "ampere", "8.7": "ampere", "8.9": "ada", "9.0": "hopper", "gfx950": "cdna4",
}  # fmt: skip
NEWER = "blackwell"
GPUS = (*dict.fromkeys(CHIPS.values()), NEWER)  # generations that Triton's kernels compile for
FP8_CHIPS = ("ada", "hopper", "cdna4", NEWER)  # of these, the ones with e4m3


def chip_of(capability: str) -> str:
    """The GPU generation of a compute capability such as "9.0", or of "gfx950"."""
    if capability in CHIPS:
        return CHIPS[capability]
    return NEWER if capability and float(capability) >= 10 else "older"


@dataclass(frozen=True, slots=True)
class Library:
    """An optional Python package that computes on a GPU."""

    name: str
    module: str
    file: str = ""  # a file beside the module, without which it is another package of that name

    def is_installed(self) -> bool:
        """Nothing is imported."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            return False
        return not self.file or any(Path(spec.origin).parent.glob(self.file))


TRITON = Library("triton", "triton")
FLASHMLA = Library("flashmla", "flash_mla", "_C_legacy.*.so")
FA3 = Library("fa3", "fa3_fwd_interface")
FLASHINFER = Library("flashinfer", "flashinfer")
DEEP_GEMM = Library("deep_gemm", "deep_gemm")


@dataclass(frozen=True)
class AttentionCapabilities(Capabilities):
    device: tuple[str, ...]  # "cpu", "cuda"
    chip: tuple[str, ...]  # GPU generation, "" on a CPU
    heads: tuple[str, ...]  # "mla" (latents), "mha" (keys and values of an MLA model), "gqa"
    sparse: tuple[bool, ...]  # attends to a selected context (DSA)
    kv: tuple[str, ...]  # type of the KV cache
    dtype: tuple[str, ...]  # type of activations
    installed: tuple[bool, ...]
    deterministic: tuple[bool, ...]  # whether bits can be independent of the batch
    trees: tuple[bool, ...]  # whether draft tokens can form a tree
    unaligned_latents: tuple[bool, ...]  # deterministic mode, and latents of no whole tiles
    other_shapes: tuple[bool, ...]  # sparse attention of more heads, other latents or choices than FlashMLA's
    padded_heads: tuple[bool, ...]  # sparse attention of fewer heads than FlashMLA's; required of unnamed backends
    divided: tuple[bool, ...]  # ranks divide a context (DCP)
    host_latents: tuple[bool, ...]  # the pages of latents are in host memory, with hot sets on the device
    graphs: tuple[bool, ...]  # whether CUDA graphs can capture it; never required


@dataclass(frozen=True)
class GemmCapabilities(Capabilities):
    attention: tuple[str, ...]  # "reference" or "kernels": what computes attention computes the rest
    chip: tuple[str, ...]  # GPU generation, "" on a CPU
    weights: tuple[str, ...]  # operation of the scheme in which memory holds them, "plain" for none
    unaligned_experts: tuple[bool, ...]  # experts of no whole tiles
    installed: tuple[bool, ...]
    deterministic: tuple[bool, ...]  # whether bits can be independent of the batch


@dataclass(frozen=True)
class IndexCapabilities(Capabilities):
    """Of the scores of an indexer (DSA)."""

    attention: tuple[str, ...]  # "torch", which computes its own scores, or "kernels"
    chip: tuple[str, ...]  # GPU generation, "" on a CPU
    index_keys: tuple[str, ...]  # type of index keys: "e4m3", or "plain" for that of activations
    installed: tuple[bool, ...]
    deterministic: tuple[bool, ...]  # whether bits can be independent of the batch
    other_index_heads: tuple[bool, ...]  # or dims of them, than DeepGEMM's
    divided: tuple[bool, ...]  # ranks divide a context (DCP) or the index heads


C = TypeVar("C", bound=Capabilities)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBackend(Generic[C]):
    """A row of a catalog. Code is named by entry points (`config.entry_point`). A check takes (device,
    `core.kernels.CheckCase`) and raises RuntimeError where the library does not run or is wrong.
    """

    supports: C
    libraries: tuple[Library, ...] = (TRITON,)
    mla: str = ""  # makes what attends to latents: a decode kernel of an `MlaShape`, or a prefill function
    mla_layer: str = ""  # a decode row: in place of kernels the layer, of (factory, facts, layer, name, is_indexed)
    sparse: str = ""  # makes what attends to a choice, of a `SparseShape`; rows that have it share their planes
    index_scores: str = ""  # the class of an indexer's scores, see `layers.index_scores`
    gqa: str = ""  # makes a `GqaKernel` of a `GqaShape`; with `gathers_keys`, a prefill function
    check_mla: str = ""
    check_gqa: str = ""
    check: str = ""  # of experts, products and index scores
    gathers_keys: bool = False  # GQA prefill reads the cached keys of a row in one piece
    preferred_heads: int = 0  # comes first for models with at least this many heads
    # comes first for models with sparse attention of such dims: latents, rotated keys, index keys
    preferred_dims: tuple[tuple[int, int, int], ...] = ()

    def on(self, libraries: frozenset[str]) -> C:
        """The capabilities on a machine that has these libraries."""
        is_installed = all(library.name in libraries for library in self.libraries)
        return replace(self.supports, installed=(is_installed,))  # type: ignore[type-var]


_REFERENCE = AttentionCapabilities(
    device=("cpu", "cuda"),
    chip=("", "older", *GPUS),
    heads=("mla", "mha", "gqa"),
    sparse=BOTH,
    kv=("float32", "bfloat16", "fp8_e4m3", "fp8_ds_mla"),
    dtype=("float32", "bfloat16"),
    installed=YES,
    deterministic=BOTH,
    trees=BOTH,
    unaligned_latents=BOTH,
    other_shapes=BOTH,
    padded_heads=BOTH,
    divided=BOTH,
    host_latents=BOTH,
    graphs=NO,
)
_TORCH = replace(  # sparse attention
    _REFERENCE,
    device=("cuda",),
    heads=("mla",),
    sparse=YES,
    kv=("bfloat16", "fp8_e4m3", "fp8_ds_mla"),
    dtype=("bfloat16",),
    host_latents=NO,
)
_TRITON = replace(
    _REFERENCE,
    device=("cuda",),
    chip=GPUS,
    sparse=NO,
    kv=("bfloat16", "fp8_e4m3"),
    dtype=("bfloat16",),
    unaligned_latents=NO,
    host_latents=NO,
    graphs=BOTH,
)
_SPARSE = replace(_TRITON, heads=("mla",), sparse=YES, kv=("bfloat16", "fp8_ds_mla"), host_latents=BOTH)
_HOPPER = replace(_TRITON, chip=("hopper",), deterministic=NO)
_FLASHMLA = replace(_HOPPER, heads=("mla",), trees=NO)
_SPARSE_FLASHMLA = replace(
    _SPARSE, chip=("hopper",), deterministic=NO, other_shapes=NO, padded_heads=NO, divided=NO, host_latents=NO
)
_FLASHINFER = replace(  # compiles when first used and plans on the host, so it is never chosen automatically
    _HOPPER,
    heads=("mla", "gqa"),
    kv=("bfloat16",),
    trees=NO,
    graphs=NO,
)
_CHECK_FLASHINFER = "kernels.gqa.flashinfer:check"
_TRITON_GQA, _FLASHINFER_GQA = "kernels.gqa.backends:TritonGqa", "kernels.gqa.flashinfer:FlashInferGqa"
_TRITON_MLA, _TRITON_PREFILL = "kernels.mla.backends:TritonMlaDecode", "kernels.mla.backends:triton_prefill"
_TRITON_SPARSE = "kernels.dsa.backends:TritonSparse"
V32_DIMS = (512, 64, 128)  # of DeepSeek-V3.2 and GLM-5
SPARSE_DIMS = (V32_DIMS, (128, 16, 64))  # with which sparse kernels were checked on a GPU; the latter: models/tiny


def _sparse_flashmla(
    mla: str, dims: tuple[tuple[int, int, int], ...] = ()
) -> dict[str, KernelBackend[AttentionCapabilities]]:
    """mla: computes contexts that are chosen whole. dims: for which it is preferred; (): none, and so listed after the
    reference, which fits everything.
    """
    return {
        name: KernelBackend(
            supports=replace(_SPARSE_FLASHMLA, kv=(kv,)),
            libraries=(TRITON, FLASHMLA),
            mla=mla,
            sparse=f"kernels.dsa.flashmla:{kernel}",
            check_mla="kernels.dsa.flashmla:check",
            preferred_dims=dims,
        )
        for name, kv, kernel in (
            ("flashmla_sparse", "bfloat16", "FlashMlaSparse"),
            ("flashmla_kv", "fp8_ds_mla", "FlashMlaRecords"),
        )
    }


DECODE: dict[str, KernelBackend[AttentionCapabilities]] = {
    "triton": KernelBackend(supports=_TRITON, mla=_TRITON_MLA, gqa=_TRITON_GQA),
    # FlashMLA for many rows, Triton for few rows and for trees. Faster than Triton where many heads make attention
    # bound by the tensor cores (H100, µs a layer, FlashMLA / Triton: 128 heads, 8 x 1,024 tokens 29 / 38, 128 x 1,024
    # 95 / 156, 64 x 4,096 135 / 270; 64 heads 23 / 29, 72 / 86, 133 / 173; in FP8 from 32 rows on), and no faster with
    # 16.
    "triton+flashmla": KernelBackend(
        supports=replace(_FLASHMLA, trees=BOTH),
        libraries=(TRITON, FLASHMLA),
        mla="kernels.mla.flashmla:by_size",
        check_mla="kernels.mla.flashmla:check",
        preferred_heads=64,
    ),
    "flashmla": KernelBackend(
        supports=_FLASHMLA,
        libraries=(TRITON, FLASHMLA),
        mla="kernels.mla.flashmla:FlashMlaDecode",
        check_mla="kernels.mla.flashmla:check",
    ),
    "torch": KernelBackend(supports=_TORCH, mla_layer="layers.mla:Mla"),
    "triton_sparse": KernelBackend(
        supports=_SPARSE, mla=_TRITON_MLA, sparse=_TRITON_SPARSE, preferred_dims=SPARSE_DIMS
    ),
    "reference": KernelBackend(supports=_REFERENCE, libraries=()),
    **_sparse_flashmla(_TRITON_MLA),
    "flashinfer": KernelBackend(
        supports=_FLASHINFER,
        libraries=(TRITON, FLASHINFER),
        mla="kernels.mla.flashinfer:FlashInferMlaDecode",
        gqa=_FLASHINFER_GQA,
        check_mla="kernels.mla.flashinfer:check",
        check_gqa=_CHECK_FLASHINFER,
    ),
}
PREFILL: dict[str, KernelBackend[AttentionCapabilities]] = {
    "fa3": KernelBackend(  # H100, 8,192 tokens of 16 heads: 751 TFLOP/s, Triton 459
        supports=replace(_HOPPER, heads=("mla", "gqa")),
        libraries=(TRITON, FA3),
        mla="kernels.mla.fa3:prefill",
        gqa="kernels.gqa.fa3:prefill",
        check_mla="kernels.mla.fa3:check",
        check_gqa="kernels.gqa.fa3:check",
        gathers_keys=True,
    ),
    "triton": KernelBackend(supports=_TRITON, mla=_TRITON_PREFILL, gqa=_TRITON_GQA),
    "torch": KernelBackend(supports=_TORCH),
    # Five layers of DeepSeek-V3.2 on an H200: a prompt of 32,768 tokens in 0.54 s and one of 131,072 in 3.76 s; with
    # Triton's kernel 0.86 and 5.12 s.
    **_sparse_flashmla(_TRITON_PREFILL, (V32_DIMS,)),
    "triton_sparse": KernelBackend(
        supports=_SPARSE, mla=_TRITON_PREFILL, sparse=_TRITON_SPARSE, preferred_dims=SPARSE_DIMS
    ),
    "reference": KernelBackend(supports=_REFERENCE, libraries=()),
    "flashinfer": KernelBackend(
        supports=replace(_FLASHINFER, heads=("gqa",)),
        libraries=(TRITON, FLASHINFER),
        gqa=_FLASHINFER_GQA,
        check_gqa=_CHECK_FLASHINFER,
    ),
}

_GEMM_REFERENCE = GemmCapabilities(
    attention=("reference",),
    chip=("", "older", *GPUS),
    weights=("plain", "fp8_gemm", "weight_only"),
    unaligned_experts=BOTH,
    installed=YES,
    deterministic=BOTH,
)
_GEMM_TRITON = replace(_GEMM_REFERENCE, attention=("kernels",), chip=GPUS)
_GEMM_HOPPER = replace(  # tested there only
    _GEMM_TRITON, chip=("hopper",), deterministic=NO, weights=("plain", "fp8_gemm")
)
_EXPERTS_HOPPER = replace(_GEMM_HOPPER, unaligned_experts=NO)
_FP8_HOPPER = replace(_GEMM_HOPPER, weights=("fp8_gemm",))
_CHECK_EXPERTS, _CHECK_FP8 = "kernels.experts.ext:check", "kernels.gemm.fp8:check"

EXPERTS: dict[str, KernelBackend[GemmCapabilities]] = {
    "triton+deep_gemm": KernelBackend(supports=_EXPERTS_HOPPER, libraries=(DEEP_GEMM,), check=_CHECK_EXPERTS),
    "triton": KernelBackend(supports=_GEMM_TRITON, libraries=()),
    "deep_gemm": KernelBackend(supports=_EXPERTS_HOPPER, libraries=(DEEP_GEMM,), check=_CHECK_EXPERTS),
    "reference": KernelBackend(supports=_GEMM_REFERENCE, libraries=()),
}
FP8: dict[str, KernelBackend[GemmCapabilities]] = {
    "triton+deep_gemm": KernelBackend(supports=_FP8_HOPPER, libraries=(DEEP_GEMM,), check=_CHECK_FP8),
    "triton": KernelBackend(supports=replace(_GEMM_TRITON, weights=("fp8_gemm",)), libraries=()),
    "deep_gemm": KernelBackend(supports=_FP8_HOPPER, libraries=(DEEP_GEMM,), check=_CHECK_FP8),
    "cublas": KernelBackend(supports=_FP8_HOPPER, libraries=(), check=_CHECK_FP8),
    "reference": KernelBackend(supports=replace(_GEMM_REFERENCE, weights=("fp8_gemm",)), libraries=()),
}


_INDEX_TRITON = IndexCapabilities(
    attention=("kernels",),
    chip=GPUS,
    index_keys=("e4m3", "plain"),
    installed=YES,
    deterministic=BOTH,
    other_index_heads=BOTH,
    divided=BOTH,
)
INDEX_SCORES: dict[str, KernelBackend[IndexCapabilities]] = {
    "triton": KernelBackend(supports=_INDEX_TRITON, index_scores="layers.index_scores:TritonScores"),
    # H200, 64 heads of 128 dims, µs, DeepGEMM / Triton: decode 1 x 131,072 tokens 9 / 17, 128 x 4,096 23 / 37,
    # 128 x 131,072 554 / 899; 4,096 tokens of a prompt behind 28,672 others 2,215 / 6,447.
    "deep_gemm": KernelBackend(
        supports=replace(
            _INDEX_TRITON, chip=("hopper",), index_keys=("e4m3",), deterministic=NO, other_index_heads=NO, divided=NO
        ),
        libraries=(TRITON, DEEP_GEMM),
        index_scores="layers.index_scores:DeepGemmScores",
        check="kernels.dsa.deep_gemm:check",
        preferred_dims=(V32_DIMS,),
    ),
    "torch": KernelBackend(
        supports=replace(_INDEX_TRITON, attention=("torch",), chip=("", "older", *GPUS)), libraries=()
    ),
}

_CATALOGS: tuple[dict[str, KernelBackend[Any]], ...] = (DECODE, PREFILL, EXPERTS, FP8, INDEX_SCORES)
ALL: tuple[KernelBackend[Any], ...] = tuple(row for catalog in _CATALOGS for row in catalog.values())
LIBRARIES = {library.name: library for backend in ALL for library in backend.libraries}


def libraries_for(chip: str) -> frozenset[str]:
    """Names of the libraries that compute on this GPU generation."""
    return frozenset(library.name for row in ALL if chip in row.supports.chip for library in row.libraries)


def installed_libraries() -> frozenset[str]:
    return frozenset(name for name, library in LIBRARIES.items() if library.is_installed())
