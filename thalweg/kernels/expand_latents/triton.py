"""Keys and values made of latents, for an attention that reads each head's key in one piece: key[s, h] = (W_UK[h] ·
latent[s], rotated key[s]), value[s, h] = W_UV[h] · latent[s].

S context tokens, H heads, r latent rank, c rope dims, D = r + c, n nope dims, v value dims. Floor: 2 · S · H · (n + v)
· r FLOPs, for 1,024 tokens of V2-Lite 4.3 GFLOP, 5.4 µs at 800 TFLOP/s bf16, and 10 MB written, 3.4 µs at 3.1 TB/s. A
program makes 128 tokens of one head, of keys or of values: 256 of them for 1,024 tokens, two on each multiprocessor at
a time: 10.6 µs on an H100, where two products of cuBLAS and a copy take 15.4. Of many heads cuBLAS's products are
faster: 74 µs against 118 for 1,024 tokens and 128 heads, 507 against 927 for 8,192. They write between the places of
the rotated key, which one more kernel fills: 6 of the 74, where torch's copy takes 18. Of 16 heads neither is faster at
8,192 tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from thalweg.kernels.attend.triton import wait_for_previous
from thalweg.kernels.launch import launch_config

MANY = 64  # heads from which a library is faster
TOKENS, COLUMNS = 128, 64  # of a program's tile: tokens, and latent dims at a time
STAGES, WARPS = 3, 8


def expand_latents(latents_SD: Tensor, uk_HnR: Tensor, uv_HvR: Tensor) -> tuple[Tensor, Tensor]:
    """→ keys [S, H, n + c], values [S, H, v], bf16. latents_SD: [S, r + c], normed and rotated, rows of neighbours;
    uk_HnR, uv_HvR: contiguous but for their heads.
    """
    (tokens, width), (heads, nope, rank), v = latents_SD.shape, uk_HnR.shape, uv_HvR.shape[1]
    key = torch.empty(tokens, heads, nope + width - rank, dtype=latents_SD.dtype, device=latents_SD.device)
    if heads >= MANY or not _is_even(rank, nope, v, width - rank):
        return key, _by_products(key, latents_SD, uk_HnR, uv_HvR)
    value = torch.empty(tokens, heads, v, dtype=latents_SD.dtype, device=latents_SD.device)
    _expand_latents[(2 * heads, triton.cdiv(tokens, TOKENS))](
        key, value, latents_SD, uk_HnR, uv_HvR, tokens, heads, latents_SD.stride(0), uk_HnR.stride(0), uv_HvR.stride(0),
        nope, v, width - rank, rank, TOKENS, min(COLUMNS, rank), STAGES, **launch_config(latents_SD, WARPS),
    )  # fmt: skip
    return key, value


def _is_even(rank: int, *widths: int) -> bool:
    """Whether the kernel of products serves heads of these dims."""
    block = min(COLUMNS, rank)
    return rank % block == 0 and all(width == triton.next_power_of_2(width) for width in (*widths, block))


def _by_products(key_SHq: Tensor, latents_SD: Tensor, uk_HnR: Tensor, uv_HvR: Tensor) -> Tensor:
    """Fills the keys, and returns the values, by a library's products."""
    (heads, nope, rank), (tokens, width) = uk_HnR.shape, latents_SD.shape
    latent_Sr = latents_SD[:, :rank]
    torch.bmm(latent_Sr.expand(heads, -1, -1), uk_HnR.transpose(1, 2), out=key_SHq[..., :nope].transpose(0, 1))
    blocks = triton.next_power_of_2(heads), triton.next_power_of_2(width - rank)
    _share_rotated[(tokens,)](
        key_SHq, latents_SD, latents_SD.stride(0), heads, nope, width - rank, rank, *blocks,
        **launch_config(latents_SD, 4),
    )  # fmt: skip
    return torch.mm(latent_Sr, uv_HvR.reshape(-1, rank).t()).view(tokens, heads, -1)


@triton.jit
def _share_rotated(
    key_SHq, latents_SD, latent_row, H: constexpr, NOPE: constexpr, ROPE: constexpr, RANK: constexpr,
    BLOCK_H: constexpr, BLOCK_C: constexpr, PDL: constexpr,
):  # fmt: skip
    """A token's rotated key into those of all its heads."""
    s, h, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_C)[None, :]
    wait_for_previous(PDL)
    rotated = tl.load(latents_SD + s * latent_row + RANK + c, mask=c < ROPE)
    at = key_SHq + (s * H + h) * (NOPE + ROPE) + NOPE + c
    tl.store(at, tl.broadcast_to(rotated, (BLOCK_H, BLOCK_C)), mask=(h < H) & (c < ROPE))


@triton.jit(do_not_specialize=["tokens"])
def _expand_latents(
    key_SHq, value_SHv, latents_SD, uk_HnR, uv_HvR, tokens, heads, latent_row, uk_head, uv_head,
    NOPE: constexpr, V: constexpr, ROPE: constexpr, RANK: constexpr, BLOCK_S: constexpr,
    BLOCK_R: constexpr,
    STAGES: constexpr, PDL: constexpr,
):  # fmt: skip
    """Program (p, b): block b of tokens, keys of head p or values of head p - heads. The heads of a block of tokens run
    together.
    """
    head = tl.program_id(0) % heads
    s = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    row = latents_SD + s[:, None].to(tl.int64) * latent_row
    wait_for_previous(PDL)
    if tl.program_id(0) < heads:
        at = key_SHq + (s[:, None].to(tl.int64) * heads + head) * (NOPE + ROPE)
        _product(at, row, s < tokens, uk_HnR + head * uk_head, NOPE, RANK, BLOCK_S, BLOCK_R, STAGES)
        c = tl.arange(0, ROPE)[None, :]
        shared = tl.load(row + RANK + c, mask=(s < tokens)[:, None])
        tl.store(at + NOPE + c, shared, mask=(s < tokens)[:, None])
    else:
        at = value_SHv + (s[:, None].to(tl.int64) * heads + head) * V
        _product(at, row, s < tokens, uv_HvR + head * uv_head, V, RANK, BLOCK_S, BLOCK_R, STAGES)


@triton.jit
def _product(
    out, row, real, w_NR, N: constexpr, RANK: constexpr, BLOCK_S: constexpr, BLOCK_R: constexpr,
    STAGES: constexpr
):  # fmt: skip
    """Stores latents times the transpose of a head's weights [N, r], summed in float32."""
    r = tl.arange(0, BLOCK_R)
    w_at = w_NR + tl.arange(0, N)[None, :] * RANK + r[:, None]
    acc = tl.zeros([BLOCK_S, N], tl.float32)
    for start in tl.range(0, RANK, BLOCK_R, num_stages=STAGES):
        x = tl.load(row + start + r[None, :], mask=real[:, None], other=0.0)
        acc = tl.dot(x, tl.load(w_at + start), acc, input_precision="ieee")
    tl.store(out + tl.arange(0, N)[None, :], acc.to(out.dtype.element_ty), mask=real[:, None])
