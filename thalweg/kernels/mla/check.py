"""The self-check of a library's MLA decode kernel: a small case on this device against its definition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import DecodeRows, LatentPlane, RowLengths
from thalweg.kernels.attend.case import exact_rows, page_table, row_tokens
from thalweg.kernels.case import normal
from thalweg.kernels.check import check_results
from thalweg.kernels.mla.backends import MlaDecodeKernel, MlaShape

RANK, WIDTH, SCALE = 512, 576, 192**-0.5
QUERY_MAX = 3.5  # 2^-7 of e4m3's largest number, so that an FP8 backend's scale of queries changes no bit of them


def check_decode(
    library: str, needs: str, make: Callable[[MlaShape], MlaDecodeKernel], device: torch.device, case: CheckCase
) -> None:
    """Two rows of one token. make: of the library's kernel. Raises RuntimeError if it cannot run here or is wrong."""
    is_fp8, generator, lengths = case.is_fp8_cache, torch.Generator().manual_seed(1), RowLengths((1, 1), (1, 200))
    dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
    table, pages = page_table(generator, lengths.contexts)
    plane = normal(generator, pages, 64, WIDTH, dtype=dtype)
    query = normal(generator, 2, case.heads, WIDTH).clamp(-QUERY_MAX, QUERY_MAX).to(dtype).bfloat16()
    query[0, 0, 0] = QUERY_MAX
    keys = [kv.unsqueeze(1) for kv in row_tokens(plane.float(), table, lengths.contexts)]
    exact = exact_rows(query, keys, [key[..., :RANK] for key in keys], lengths, SCALE)

    def run() -> tuple[Tensor, Tensor]:
        kernel = make(MlaShape(case.heads, RANK, SCALE, is_fp8))
        latents = LatentPlane(plane.to(device), torch.ones(1, device=device) if is_fp8 else None)
        rows = DecodeRows(table.to(device), torch.tensor((0, 199), device=device), max_kv_len=200)
        return kernel.attend_with_lse(query.to(device), latents, rows, kernel.prepare(rows))

    # of e4m3 the weights of the keys are e4m3 too
    check_results(library, f"{needs}; or use --attention-backend triton", run, exact, 0.05 if is_fp8 else 0.02)
