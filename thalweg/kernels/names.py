"""What the names in a profile stand for: kernels on a GPU, operators of torch on a CPU. The one table of it; no kernel
is imported.

A name is read from the top of the table down. Some names stand for different things in different places (`_up` of
attention and of the experts, `_choose` of the router and of a truncated draw): `places` tells them apart by what stands
before and behind them in a step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PRODUCT, ATTENTION, LATENT, ROUTER, EXPERTS = "product", "attention", "latent", "router", "experts"
NORM, CACHE, ACTIVATION, QUANTIZE, SAMPLING = "norm", "rotary and cache", "activation", "quantize", "sampling"
PREPARE, COPIES, SMALL, CHOICES, DRAFTING = "prepare", "copies", "small operations", "choices", "drafting"
PROJECTIONS, MLP, HEAD, PRODUCTS = (
    "projections",
    "mlp",
    "head",
    "products",
)  # what a product turns out to be; "products" is undecided

# (pattern of the whole short name, what it is)
KERNELS: tuple[tuple[str, str], ...] = (
    (r"_mla_absorb|_merge_up|_merge_up_many|_expand_latents", LATENT),
    (r"_prefill|_merge|_merge_state|.*flash.*|.*fmha.*|.*attention.*|.*mla_metadata.*|Batch(Decode|Prefill).*|.*splitkv.*", ATTENTION),
    (r"_mla_write|_mha_write|_gqa_write|_move", CACHE),
    (r"_logits|_logits_few", ROUTER),
    (r"_up_pairs|_down_tokens|_down|_combine|_count|_sum|_place", EXPERTS),
    (r"_rms_norm|.*rms_?norm.*|.*layer_norm.*", NORM),
    (r"_silu_mul|_silu_mul_quantize", ACTIVATION),
    (r"_quantize", QUANTIZE),
    (r"_carry|_conclude|_advance|_best", DRAFTING),
    (r"_follow|_spread|_climb|_best_of_parts|_border|_keep|_raced|_settle|_adjust|_penalise|_forbid|_report|_show", SAMPLING),
    (r"_race|_pick|_finish|_walk|_verify|_kth", SAMPLING),
    (r"Mem(cpy|set).*", COPIES),
    (r"_gemv|_linear|_linear_fp8|_matmul_fp8|_small_batch_gemm|_split_k_gemm|_add_partials|_product", PRODUCT),
    (r"nvjet.*|.*gemm.*|.*gemv.*|.*cutlass.*|.*splitK.*|.*cublas.*", PRODUCT),
)  # fmt: skip
# whose meaning depends on the place: (before the router of a layer or where there is none, behind it)
EITHER = {
    "_up": (LATENT, EXPERTS),
    "_gather": (ATTENTION, EXPERTS),
    "_choose": (ROUTER, ROUTER),
    "_decode": (ATTENTION, ATTENTION),
}
REDUCTIONS = re.compile(
    r"_add_partials|.*splitK.*reduce.*|.*reduce_splitk.*", re.IGNORECASE
)  # the end of the product before them

OPERATORS: tuple[tuple[str, str], ...] = (
    (r"aten::(mm|addmm_?|linear|_scaled_mm)", PRODUCT),
    (r"aten::(bmm|baddbmm|_?softmax|_scaled_dot_product.*|scaled_dot_product.*|_flash_attention.*)", ATTENTION),
    (r"aten::(native_layer_norm|layer_norm|linalg_vector_norm|hypot|rms_norm|_fused_rms_norm)", NORM),
    (r"aten::(index_copy_?|index_put_?|addcmul_?|view_as_complex|view_as_real|_conj)", CACHE),
    (r"aten::(topk|sort|argsort|bincount|sigmoid|scatter_?|masked_fill_?|gather)", CHOICES),
    (r"aten::(silu_?)", ACTIVATION),
    (r"aten::(exponential_?|argmax|log_softmax|_log_softmax|multinomial)", SAMPLING),
)  # fmt: skip
_KERNELS = [(re.compile(pattern, re.IGNORECASE), what) for pattern, what in KERNELS]
_OPERATORS = [(re.compile(pattern), what) for pattern, what in OPERATORS]


def short(name: str) -> str:
    """A kernel's name without templates, arguments and namespaces, but with what tells FlashAttention's from other
    kernels of CUTLASS.
    """
    if "flash" in name.lower() and "<" in name:
        return "flash::" + re.sub(r"<.*", "", name).split("::")[-1]
    return re.sub(r"^void |<.*|\(.*", "", name.replace("(anonymous namespace)::", "")).split("::")[-1].strip()


def kernel(name: str) -> str:
    """What a kernel of this short name is: one of the words above, or a name in EITHER."""
    if name in EITHER:
        return name
    return next((what for pattern, what in _KERNELS if pattern.fullmatch(name)), SMALL)


def operator(name: str) -> str:
    """What an operator of torch is on a CPU."""
    return next((what for pattern, what in _OPERATORS if pattern.fullmatch(name)), SMALL)


def places(names: Sequence[str]) -> list[str]:
    """What each kernel of A of one step does, in the order in which the device ran them: the words above, products told
    apart.

    A layer is projections, attention, one product (output), then either a router with its experts or two products
    (MLP), which what follows of the next layer's projections end. So attentions with fewer than four products between
    them, and no router, are of one layer.
    """
    found = _decided(names)
    groups = _groups(found, names)
    if not groups:
        return [PRODUCTS if what == PRODUCT else what for what in found]
    for i in range(groups[0][0]):
        found[i] = PROJECTIONS if found[i] == PRODUCT else found[i]
    for (begin, end), after in zip(groups, [*(group[0] for group in groups[1:]), len(found)], strict=True):
        for i in range(begin, end):
            found[i] = PROJECTIONS if found[i] == PRODUCT else found[i]
        _behind(found, names, end, after, last=after == len(found))
    return [PROJECTIONS if what == LATENT else what for what in found]


def after(found: Sequence[str]) -> list[str]:
    """What each kernel or operator of B of one step does, from what its name stands for: sampling, or drafting from the
    first product to the last. What a name stands for elsewhere does not count here.
    """
    drafting = [i for i, what in enumerate(found) if what in (PRODUCT, LATENT)]
    begin, end = (drafting[0], drafting[-1]) if drafting else (0, -1)
    return [COPIES if what == COPIES else DRAFTING if begin <= i <= end else SAMPLING for i, what in enumerate(found)]


def _decided(names: Sequence[str]) -> list[str]:
    """Names by the table, with EITHER decided; products are not told apart yet."""
    found: list[str] = []
    routed = worked = False
    for name in names:
        what = kernel(name)
        if what == "_decode" and not worked:
            what = PREPARE  # the step's inputs, before anything is computed
        what = EITHER[what][routed] if what in EITHER else what
        if name == "_choose" and found and found[-1] == PRODUCT:
            found[-1] = EXPERTS  # the router's logits, by a library
        worked = worked or what in (PRODUCT, NORM, ATTENTION)
        if name in ("_combine", "_down_tokens") or what in (ATTENTION, CACHE):
            routed = False
        elif what in (ROUTER, EXPERTS):
            routed = True
        if what == PRODUCT and routed:
            what = EXPERTS  # a library's grouped product
        found.append(what)
    return found


def _groups(found: Sequence[str], names: Sequence[str]) -> list[tuple[int, int]]:
    """[begin, end) of each layer's attention, its latent products included."""
    groups: list[tuple[int, int]] = []
    for i, what in enumerate(found):
        if what not in (ATTENTION, LATENT):
            continue
        if groups:
            between = range(groups[-1][1], i)
            products = sum(found[j] == PRODUCT and not REDUCTIONS.fullmatch(names[j]) for j in between)
            if products < 4 and not any(found[j] in (ROUTER, EXPERTS) for j in between):
                groups[-1] = groups[-1][0], i + 1
                continue
        groups.append((i, i + 1))
    return groups


def _behind(found: list[str], names: Sequence[str], begin: int, end: int, last: bool) -> None:
    """Names the products between one layer's attention and the next's, or the end."""
    experts = any(found[i] in (ROUTER, EXPERTS) for i in range(begin, end))
    kinds = [PROJECTIONS] if experts else [PROJECTIONS, MLP, MLP]
    products = [i for i in range(begin, end) if found[i] == PRODUCT and not REDUCTIONS.fullmatch(names[i])]
    named = dict(zip(products, [*kinds, *[PROJECTIONS] * len(products)], strict=False))
    if last and len(products) > len(kinds):
        named[products[-1]] = HEAD
    what = PROJECTIONS
    for i in range(begin, end):
        what = named.get(i, what)
        if found[i] == PRODUCT:
            found[i] = what  # a reduction goes with its product
        elif found[i] in (ROUTER, QUANTIZE, ACTIVATION) and experts:
            found[i] = EXPERTS
        elif found[i] == ACTIVATION:
            found[i] = MLP
