"""The roles of kernels of a GPU profile, and of torch's operators of a CPU profile, by their names.

The tables are read from the top down; no kernel is imported. Some names have different roles at different places (`_up`
of attention and of the experts, `_choose` of the router and of a truncated draw): `forward_roles` tells them apart by
the kernels before and after them in a step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PRODUCT, ATTENTION, LATENT, ROUTER, EXPERTS = "product", "attention", "latent", "router", "experts"
NORM, CACHE, ACTIVATION, QUANTIZE, SAMPLING = "norm", "rotary and cache", "activation", "quantize", "sampling"
PREPARE, COPIES, SMALL, CHOICES, DRAFTING = "prepare", "copies", "small operations", "choices", "drafting"
# the roles of a product; "products" is undecided
PROJECTIONS, MLP, HEAD, PRODUCTS = "projections", "mlp", "head", "products"

# (pattern of the whole short name, role)
KERNELS: tuple[tuple[str, str], ...] = (
    (r"_mla_absorb|_merge_up|_merge_up_many|_expand_latents", LATENT),
    (r"_prefill|_merge|_merge_state|.*flash.*|.*fmha.*|.*attention.*|.*mla_metadata.*", ATTENTION),
    (r"Batch(Decode|Prefill).*|.*splitkv.*", ATTENTION),
    (r"_mla_write|_mha_write|_gqa_write|_move", CACHE),
    (r"_logits|_logits_few", ROUTER),
    (r"_up_pairs|_down_tokens|_down|_combine|_count|_sum|_place", EXPERTS),
    (r"_rms_norm|.*rms_?norm.*|.*layer_norm.*", NORM),
    (r"_silu_mul|_silu_mul_quantize", ACTIVATION),
    (r"_quantize", QUANTIZE),
    (r"_carry|_conclude|_advance|_best", DRAFTING),
    (r"_follow|_spread|_climb|_best_of_parts|_border|_keep", SAMPLING),
    (r"_raced|_settle|_adjust|_penalise|_forbid|_report|_show", SAMPLING),
    (r"_race|_pick|_finish|_walk|_verify|_verify_drafts|_kth", SAMPLING),
    (r"Mem(cpy|set).*", COPIES),
    (r"_gemv|_linear|_linear_fp8|_matmul_fp8|_small_batch_gemm|_split_k_gemm|_add_partials|_product", PRODUCT),
    (r"nvjet.*|.*gemm.*|.*gemv.*|.*cutlass.*|.*splitK.*|.*cublas.*", PRODUCT),
)  # fmt: skip
# whose role depends on the place: (before the router of a layer or where there is none, after it)
EITHER = {
    "_up": (LATENT, EXPERTS),
    "_gather": (ATTENTION, EXPERTS),
    "_choose": (ROUTER, ROUTER),
    "_decode": (ATTENTION, ATTENTION),
}
# the end of the product before them
REDUCTIONS = re.compile(r"_add_partials|.*splitK.*reduce.*|.*reduce_splitk.*", re.IGNORECASE)

OPERATORS: tuple[tuple[str, str], ...] = (
    (r"aten::(mm|addmm_?|linear|_scaled_mm)", PRODUCT),
    (r"aten::(bmm|baddbmm|_?softmax|_scaled_dot_product.*|scaled_dot_product.*|_flash_attention.*)", ATTENTION),
    (r"aten::(native_layer_norm|layer_norm|linalg_vector_norm|hypot|rms_norm|_fused_rms_norm)", NORM),
    (r"aten::(index_copy_?|index_put_?|addcmul_?|view_as_complex|view_as_real|_conj)", CACHE),
    (r"aten::(topk|sort|argsort|bincount|sigmoid|scatter_?|masked_fill_?|gather)", CHOICES),
    (r"aten::(silu_?)", ACTIVATION),
    (r"aten::(exponential_?|argmax|log_softmax|_log_softmax|multinomial)", SAMPLING),
)  # fmt: skip
_KERNELS = [(re.compile(pattern, re.IGNORECASE), role) for pattern, role in KERNELS]
_OPERATORS = [(re.compile(pattern), role) for pattern, role in OPERATORS]


def short_name(name: str) -> str:
    """A kernel's name without templates, arguments and namespaces, but with what tells FlashAttention's from other
    kernels of CUTLASS.
    """
    if "flash" in name.lower() and "<" in name:
        return "flash::" + re.sub(r"<.*", "", name).split("::")[-1]
    return re.sub(r"^void |<.*|\(.*", "", name.replace("(anonymous namespace)::", "")).split("::")[-1].strip()


def role_of_kernel(name: str) -> str:
    """The role of a kernel of this short name: one of the words above, or a name in EITHER."""
    if name in EITHER:
        return name
    return next((role for pattern, role in _KERNELS if pattern.fullmatch(name)), SMALL)


def role_of_operator(name: str) -> str:
    """The role of an operator of torch on a CPU."""
    return next((role for pattern, role in _OPERATORS if pattern.fullmatch(name)), SMALL)


def forward_roles(names: Sequence[str]) -> list[str]:
    """The role of each kernel of one step's forward, in the order in which the device ran them. Products are told
    apart.

    A layer is projections, attention, one product (output), then either a router with its experts or two products
    (MLP), which end at the next layer's projections. So attentions with fewer than four products between them, and no
    router, are of one layer.
    """
    roles = _roles(names)
    groups = _attention_groups(roles, names)
    if not groups:
        return [PRODUCTS if role == PRODUCT else role for role in roles]
    _name_products(roles, 0, groups[0][0])
    for (begin, end), after in zip(groups, [*(group[0] for group in groups[1:]), len(roles)], strict=True):
        _name_products(roles, begin, end)
        _name_rest(roles, names, end, after, last=after == len(roles))
    return [PROJECTIONS if role == LATENT else role for role in roles]


def sampling_roles(roles: Sequence[str]) -> list[str]:
    """The roles of what follows a forward: sampling, or drafting from the first product to the last. roles: by the
    names alone.
    """
    drafting = [i for i, role in enumerate(roles) if role in (PRODUCT, LATENT)]
    begin, end = (drafting[0], drafting[-1]) if drafting else (0, -1)
    return [COPIES if role == COPIES else DRAFTING if begin <= i <= end else SAMPLING for i, role in enumerate(roles)]


def _roles(names: Sequence[str]) -> list[str]:
    """By the table, with EITHER decided. Products are not told apart yet."""
    roles: list[str] = []
    routed = computed = False
    for name in names:
        role = role_of_kernel(name)
        if role == "_decode" and not computed:
            role = PREPARE  # the step's inputs, before anything is computed
        role = EITHER[role][routed] if role in EITHER else role
        if name == "_choose" and roles and roles[-1] == PRODUCT:
            roles[-1] = EXPERTS  # the router's logits, by a library
        computed = computed or role in (PRODUCT, NORM, ATTENTION)
        if name in ("_combine", "_down_tokens") or role in (ATTENTION, CACHE):
            routed = False
        elif role in (ROUTER, EXPERTS):
            routed = True
        # a library's grouped product is of the experts
        roles.append(EXPERTS if role == PRODUCT and routed else role)
    return roles


def _attention_groups(roles: Sequence[str], names: Sequence[str]) -> list[tuple[int, int]]:
    """[begin, end) of each layer's attention, its latent products included."""
    groups: list[tuple[int, int]] = []
    for i, role in enumerate(roles):
        if role not in (ATTENTION, LATENT):
            continue
        if groups:
            between = range(groups[-1][1], i)
            products = sum(roles[j] == PRODUCT and not REDUCTIONS.fullmatch(names[j]) for j in between)
            if products < 4 and not any(roles[j] in (ROUTER, EXPERTS) for j in between):
                groups[-1] = groups[-1][0], i + 1
                continue
        groups.append((i, i + 1))
    return groups


def _name_products(roles: list[str], begin: int, end: int) -> None:
    roles[begin:end] = [PROJECTIONS if role == PRODUCT else role for role in roles[begin:end]]


def _name_rest(roles: list[str], names: Sequence[str], begin: int, end: int, last: bool) -> None:
    """Names the products between one layer's attention and the next's, or the end."""
    experts = any(role in (ROUTER, EXPERTS) for role in roles[begin:end])
    kinds = [PROJECTIONS] if experts else [PROJECTIONS, MLP, MLP]
    products = [i for i in range(begin, end) if roles[i] == PRODUCT and not REDUCTIONS.fullmatch(names[i])]
    named = dict(zip(products, [*kinds, *[PROJECTIONS] * len(products)], strict=False))
    if last and len(products) > len(kinds):
        named[products[-1]] = HEAD
    product = PROJECTIONS
    for i in range(begin, end):
        product = named.get(i, product)
        if roles[i] == PRODUCT:
            roles[i] = product  # a reduction goes with its product
        elif roles[i] in (ROUTER, QUANTIZE, ACTIVATION) and experts:
            roles[i] = EXPERTS
        elif roles[i] == ACTIVATION:
            roles[i] = MLP
