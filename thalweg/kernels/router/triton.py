"""Router: logits in float32 without tf32, then the choice, in two launches (semantics: `ref.py`).

Logits: a float32 weight is the sum of three bf16 numbers (24 bits of mantissa), and activations are bf16. So three bf16
products with float32 accumulation are as exact as float32 FMAs, at a tenth of their time; a weight stored in bf16 needs
one. H is cut into splits, whose partial logits the choice adds up, so that a single token still fills the machine: V3's
256 × 7168 float32 are 7.3 MB, 2.4 µs at 3.1 TB/s. One more block of programs writes the activations as e4m3 for FP8
experts, without a launch of its own. Few tokens are multiplied by FMAs: a program loads all of its weights before it
waits for its predecessor, and a norm before the router costs a second look at the token. From MANY tokens on the
product is a library's where the weight is bf16: 8,192 tokens of V3 are 30 GFLOP and 117 MB.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.launch import launch_config
from thalweg.kernels.norm.triton import Rows, deferred_norm, rows_of
from thalweg.kernels.pdl import pdl_launch, pdl_wait
from thalweg.kernels.quantize.triton import GROUP, encode, quantize, scales_like
from thalweg.kernels.router.ref import RouterConfig

FEW, MANY = 4, 1024
PROGRAMS = 264  # two for each of an H100's multiprocessors: what the splits are to fill


class RouterOutput(NamedTuple):
    """The choice, and x in FP8 if asked for."""

    weights_TK: Tensor  # float32, K = topk + shared
    # int32: experts … experts + shared - 1 are the shared ones; experts + shared (weight 0) is none, for padding
    ids_TK: Tensor
    codes_TH: Tensor | None = None  # x, e4m3
    scales_TG: Tensor | None = None  # float32 [T, H / 128], MN-major
    shared: int = 0  # last columns on which a kernel may rely without waiting for the choice

    def part(self, tokens: slice) -> RouterOutput:
        """The choice of some tokens."""
        codes, scales = (None if each is None else each[tokens] for each in (self.codes_TH, self.scales_TG))
        return RouterOutput(self.weights_TK[tokens], self.ids_TK[tokens], codes, scales, self.shared)


class PartialLogits(NamedTuple):
    """Partial products of activations with a weight, to be added over the splits, and x in FP8 if asked for."""

    logits_STE: Tensor  # float32
    codes_TH: Tensor | None
    scales_TG: Tensor | None


def tiles(tokens: int, experts: int, hidden: int, deterministic: bool) -> tuple[int, int, int]:
    """→ tokens and experts of a program, splits of H (a power of two). Deterministic: nothing depends on the number
    of tokens.
    """
    block_T, block_E = 64, 64
    if deterministic or tokens <= 16:
        block_T, block_E = 16, 16
    elif tokens <= 256:
        block_T, block_E = 16 if tokens <= 32 else 32, 32
    programs = triton.cdiv(1 if deterministic else tokens, block_T) * triton.cdiv(experts, block_E)
    splits = 1
    while splits < 16 and 2 * splits * programs <= PROGRAMS and 4 * splits * GROUP <= hidden:
        splits *= 2
    return block_T, block_E, splits


def route(
    x: Rows,
    weight_EH: Tensor,
    bias_E: Tensor | None,
    config: RouterConfig,
    real_T: Tensor | None = None,
    with_codes: bool = False,
    deterministic: bool = False,
) -> RouterOutput:
    """Chooses experts for each token. x: bf16 [T, H], contiguous, or a norm of such. weight_EH: float32, or bf16 as
    stored. bias_E: float32, of noaux_tc. real_T: bool, False of padding. with_codes: also x in e4m3 (H a multiple of
    128). deterministic: a token's result does not depend on the others.
    """
    tokens, columns, device = len(x), config.topk + config.shared, weight_EH.device
    weights_TK = torch.empty(tokens, columns, dtype=torch.float32, device=device)
    ids_TK = torch.empty(tokens, columns, dtype=torch.int32, device=device)
    if tokens >= MANY and weight_EH.dtype == torch.bfloat16 and not deterministic:
        x_TH = rows_of(x)
        logits_STE = torch.mm(x_TH, weight_EH.t(), out_dtype=torch.float32).unsqueeze(0)
        codes, scales = quantize(x_TH) if with_codes else (None, None)
    else:
        logits_STE, codes, scales = partial_logits(x, weight_EH, with_codes, deterministic)
    if tokens:
        _choose[(tokens,)](
            weights_TK, ids_TK, logits_STE, bias_E if config.is_sigmoid else None, real_T, tokens, config.scale,
            len(logits_STE), config.experts, config.topk, config.shared, config.groups if config.limits_groups else 1,
            config.topk_groups, config.renormalize, not with_codes,
            **launch_config(weights_TK, 1 if config.experts <= 256 else 4),
        )  # fmt: skip
    return RouterOutput(weights_TK, ids_TK, codes, scales, config.shared)


def partial_logits(x: Rows, weight_EH: Tensor, with_codes: bool = False, deterministic: bool = False) -> PartialLogits:
    """The products of `route`, whose arguments these are. There is one split at least."""
    few = len(x) <= FEW and not deterministic
    x_TH, norm_H, eps = deferred_norm(x if few else rows_of(x))
    assert x_TH.is_contiguous(), "rows of x"
    (tokens, hidden), experts, device = x_TH.shape, len(weight_EH), x_TH.device
    if few:
        columns = 256 if hidden <= 4096 else 512  # of a program
        splits = triton.cdiv(hidden, columns)
    else:
        block_T, block_E, splits = tiles(tokens, experts, hidden, deterministic)
    logits_STE = torch.empty(splits, tokens, experts, dtype=torch.float32, device=device)
    codes = torch.empty_like(x_TH, dtype=torch.float8_e4m3fn) if with_codes else None
    scales = scales_like(tokens, hidden, device) if with_codes else None
    stride = 0 if scales is None else scales.stride(1)
    if not tokens:
        return PartialLogits(logits_STE, codes, scales)
    if few:
        _logits_few[(triton.cdiv(experts, 16) + int(with_codes), tokens, splits)](
            logits_STE, codes, scales, x_TH, norm_H, weight_EH, tokens, stride, eps,
            experts, hidden, 16, columns, **launch_config(x_TH, 4),
        )  # fmt: skip
    else:
        steps = triton.cdiv(triton.cdiv(hidden, GROUP), splits)
        _logits[(triton.cdiv(experts, block_E) + int(with_codes), triton.cdiv(tokens, block_T), splits)](
            logits_STE, codes, scales, x_TH, weight_EH, tokens, stride, steps,
            experts, hidden, block_T, block_E, **launch_config(x_TH, 4, 5 if block_T <= 16 else 3),
        )  # fmt: skip
    return PartialLogits(logits_STE, codes, scales)


@triton.jit(do_not_specialize=["tokens", "scales_stride", "steps"])
def _logits(
    logits_STE, codes_TH, scales_GT, x_TH, weight_EH, tokens, scales_stride, steps,
    E: constexpr, H: constexpr, BLOCK_T: constexpr, BLOCK_E: constexpr, PDL: constexpr,
):  # fmt: skip
    """Experts are the rows of the product: a weight is split in registers, where a product may take its left side from.
    The block of programs after the last experts encodes x.
    """
    block_E, split = tl.program_id(0), tl.program_id(2)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    k, some_T = tl.arange(0, 128), token < tokens
    begin, end = split * steps, min(split * steps + steps, tl.cdiv(H, 128))
    x_at = x_TH + token[:, None].to(tl.int64) * H + k[None, :]
    pdl_wait(PDL)
    pdl_launch(PDL)
    if codes_TH is not None:
        if block_E * BLOCK_E >= E:
            for step in tl.range(begin, end, num_stages=2):
                x = tl.load(x_at + step * 128, mask=some_T[:, None], other=0.0)
                codes, scale = encode(x.to(tl.float32))
                tl.store(
                    codes_TH + token[:, None].to(tl.int64) * H + step * 128 + k[None, :], codes, mask=some_T[:, None]
                )
                tl.store(scales_GT + step * scales_stride + token, scale, mask=some_T)
    if block_E * BLOCK_E < E:
        expert = block_E * BLOCK_E + tl.arange(0, BLOCK_E)
        w_at = weight_EH + expert[:, None] * H + k[None, :]
        acc = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
        for step in tl.range(begin, end):
            inside = (step * 128 + k < H)[None, :]
            w = tl.load(w_at + step * 128, mask=(expert < E)[:, None] & inside, other=0.0)
            x = tl.load(x_at + step * 128, mask=some_T[:, None] & inside, other=0.0)
            if w.dtype == x.dtype or x.dtype == tl.float32:
                acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
            else:
                high = w.to(x.dtype)
                rest = w - high.to(tl.float32)
                middle = rest.to(x.dtype)
                low = (rest - middle.to(tl.float32)).to(x.dtype)
                x_t = tl.trans(x)
                acc = tl.dot(high, x_t, tl.dot(middle, x_t, tl.dot(low, x_t, acc)))
        at = logits_STE + (split * tokens + token[None, :]).to(tl.int64) * E + expert[:, None]
        tl.store(at, acc, mask=(expert < E)[:, None] & some_T[None, :])


@triton.jit(do_not_specialize=["tokens", "scales_stride"])
def _logits_few(
    logits_STE, codes_TH, scales_GT, x_TH, norm_H, weight_EH, tokens, scales_stride, eps,
    E: constexpr, H: constexpr, BLOCK_E: constexpr, BLOCK_H: constexpr, PDL: constexpr,
):  # fmt: skip
    """BLOCK_E experts, one token, BLOCK_H columns a program; the last block of programs encodes x. With norm_H of the
    normed x, rounded as the norm's own kernel does.
    """
    block_E, token, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = x_TH + token.to(tl.int64) * H
    expert, h = block_E * BLOCK_E + tl.arange(0, BLOCK_E), split * BLOCK_H + tl.arange(0, BLOCK_H)
    live = (expert < E)[:, None] & (h < H)[None, :]
    w = tl.load(weight_EH + expert[:, None] * H + h[None, :], mask=live, other=0.0)
    if norm_H is not None:
        norm = tl.load(norm_H + h, mask=h < H, other=0.0)
    pdl_wait(PDL)
    pdl_launch(PDL)
    x = tl.load(row + h, mask=h < H, other=0.0).to(tl.float32)
    if norm_H is not None:
        whole = tl.arange(0, triton.next_power_of_2(H))
        every = tl.load(row + whole, mask=whole < H, other=0.0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(every * every) / H + eps) * norm).to(x_TH.dtype.element_ty).to(tl.float32)
    if block_E * BLOCK_E < E:
        logits = tl.sum(w.to(tl.float32) * x[None, :], 1)
        tl.store(logits_STE + (split * tokens + token) * E + expert, logits, mask=expert < E)
    elif codes_TH is not None:
        codes, scale = encode(tl.reshape(x, [BLOCK_H // 128, 128]))
        group, k = split * (BLOCK_H // 128) + tl.arange(0, BLOCK_H // 128), tl.arange(0, 128)
        at = codes_TH + token.to(tl.int64) * H + group[:, None] * 128 + k[None, :]
        tl.store(at, codes, mask=(group < H // 128)[:, None])
        tl.store(scales_GT + group * scales_stride + token, scale, mask=group < H // 128)


@triton.jit(do_not_specialize=["tokens"])
def _choose(
    weights_TK, ids_TK, logits_STE, bias_E, real_T, tokens, scale,
    SPLITS: constexpr, E: constexpr, TOPK: constexpr, SHARED: constexpr, GROUPS: constexpr, TOPK_GROUPS: constexpr,
    RENORMALIZE: constexpr, EARLY: constexpr, PDL: constexpr,
):  # fmt: skip
    """One token a program: the whole row lies in the registers of a warp, and each of the chosen is one reduction over
    it. Groups and their members are padded to powers of two, so that a place is group · BLOCK_M + member, in the order
    of the ids: ties go to the lower id. EARLY: the experts' kernel may start as soon as x is there; it may not where
    the kernel of the logits makes x's codes.
    """
    BLOCK_G: constexpr = triton.next_power_of_2(GROUPS)
    BLOCK_M: constexpr = triton.next_power_of_2(E // GROUPS)
    BLOCK_K: constexpr = triton.next_power_of_2(TOPK + SHARED)
    token = tl.program_id(0).to(tl.int64)
    place, column = tl.arange(0, BLOCK_G * BLOCK_M), tl.arange(0, BLOCK_K)
    expert = place // BLOCK_M * (E // GROUPS) + place % BLOCK_M
    some = (place % BLOCK_M < E // GROUPS) & (place // BLOCK_M < GROUPS)
    if EARLY:
        pdl_launch(PDL)
    pdl_wait(PDL)
    if not EARLY:
        pdl_launch(PDL)
    logits = tl.zeros([BLOCK_G * BLOCK_M], tl.float32)
    for split in tl.static_range(SPLITS):
        logits += tl.load(logits_STE + (split * tokens + token) * E + expert, mask=some, other=0.0)
    if bias_E is not None:
        scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = tl.where(some, scores + tl.load(bias_E + expert, mask=some, other=0.0), -float("inf"))
    else:
        logits = tl.where(some, logits, -float("inf"))
        powers = tl.exp(logits - tl.max(logits, 0))
        scores = powers / tl.sum(powers, 0)
        choice = tl.where(some, scores, -float("inf"))
    if GROUPS > 1:
        choice = _within_groups(tl.reshape(choice, [BLOCK_G, BLOCK_M]), GROUPS, TOPK_GROUPS, bias_E is not None)
        choice = tl.reshape(choice, [BLOCK_G * BLOCK_M])
    best_K = tl.zeros([BLOCK_K], tl.int32)
    for k in tl.static_range(TOPK):
        best = tl.argmax(choice, 0)
        best_K = tl.where(column == k, best, best_K)
        choice = tl.where(place == best, -float("inf"), choice)
    weights = tl.where(column < TOPK, tl.gather(scores, best_K, 0), 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    # logits that are no numbers must not lead out of the table
    ids = tl.minimum(best_K // BLOCK_M * (E // GROUPS) + best_K % BLOCK_M, E - 1)
    weights, ids = tl.where(column < TOPK, weights * scale, 1.0), tl.where(column < TOPK, ids, E + column - TOPK)
    if real_T is not None:
        real = tl.load(real_T + token)
        weights, ids = tl.where(real, weights, 0.0), tl.where(real, ids, E + SHARED)
    at = token * (TOPK + SHARED) + column
    tl.store(weights_TK + at, weights, mask=column < TOPK + SHARED)
    tl.store(ids_TK + at, ids, mask=column < TOPK + SHARED)


@triton.jit
def _within_groups(scores, GROUPS: constexpr, TOPK_GROUPS: constexpr, TWO: constexpr):
    """-inf outside the best groups, which are the rows: by their best member, or by the sum of their two best."""
    group, member = tl.arange(0, scores.shape[0]), tl.arange(0, scores.shape[1])
    worth = tl.max(scores, 1)
    if TWO:
        first = tl.argmax(scores, 1)
        worth += tl.max(tl.where(member[None, :] == first[:, None], -float("inf"), scores), 1)
    worth = tl.where(group < GROUPS, worth, -float("inf"))
    kept = tl.zeros_like(group)
    for _ in tl.static_range(TOPK_GROUPS):
        best = tl.argmax(worth, 0)
        kept = tl.where(group == best, 1, kept)
        worth = tl.where(group == best, -float("inf"), worth)
    return tl.where(kept[:, None] > 0, scores, -float("inf"))
