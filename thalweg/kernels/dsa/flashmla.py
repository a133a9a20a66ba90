"""FlashMLA's sparse attention for Hopper (`flash_mla`, sgl-flash-mla 1.0.0), with up to 128 heads, 512 + 64 dims and a
choice of whole tiles of 128 tokens. Timed on an H200.

Two kernels: one of bfloat16 latents, whose blocks are a token's 64 heads, without splits; and one of FP8 records, which
cuts the choices of a launch into even parts by a schedule. The schedule follows from the number of tokens alone, so a
captured one is never stale. Both take places in the plane for positions. Records that prompts read are decoded first,
for the kernel of bfloat16 latents (H200, a layer's 32,768 tokens in steps of 8,192: this kernel takes 38.5 ms, that of
records 48.1).

On a device with fewer heads (tensor parallelism) they are filled up with zeros. A token then costs 285 MFLOP, some
0.6 µs at the 400 to 590 TFLOP/s that the library reaches on an H100. With 16 heads our kernel is bound by bytes: 2,048
records are 1.3 MB and take 0.3 µs at 4.3 TB/s, bfloat16 latents 0.5 µs. So these devices have Triton by default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from thalweg.core.kernels import FLASHMLA_HEADS, CheckCase
from thalweg.core.plan import PAGE
from thalweg.kernels.attend.args import LatentPlane, QueryRows
from thalweg.kernels.attend.case import exact_attention
from thalweg.kernels.case import normal
from thalweg.kernels.check import check_results
from thalweg.kernels.dsa.backends import SparseShape
from thalweg.kernels.dsa.places import places
from thalweg.kernels.dsa.triton import decode_pages
from thalweg.kernels.mla.triton import up

AT_ONCE = 512  # tokens of a launch: its partial sums in float32 are 151 MB with 128 heads
RECORDS = "flashmla_kv"  # the backend's name
# Decoding a record moves 2 KB (0.7 ns), and a query token gains 0.3 us
LEAST_DECODING = 512  # query tokens for which records are decoded
MOST_OF_EACH, MOST_DECODED = 128, 163840  # records for each query token, and for all


@dataclass(frozen=True, slots=True)
class _FlashMla(ABC):
    shape: SparseShape
    masked: ClassVar[tuple[tuple[int, float], ...]] = ((2560, 0.4), (3072, 0.67), (4096, 1.0))

    def attend(
        self,
        query_THD: Tensor,
        latents: LatentPlane,
        chosen_TK: Tensor | None,
        rows: QueryRows,
        uv_HRv: Tensor,
        schedules: dict[int, Any],
    ) -> Tensor:
        """See `SparseKernel`."""
        kernel, (paged_PSD, _), rows = self._read_by(query_THD, latents, rows)
        parts, heads = list[Tensor](), query_THD.shape[1]
        missing = min(of for of in FLASHMLA_HEADS if of >= heads) - heads
        query_THD = F.pad(query_THD, (0, 0, 0, missing)) if missing else query_THD
        for first in range(0, len(query_THD), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            chosen = None if chosen_TK is None else chosen_TK[some]
            placed = places(chosen, rows.some(some), self.shape.topk)
            sums_THr = kernel._sums(query_THD[some], paged_PSD, *placed, schedules)
            # the library's last kernel merges splits; where there are none it ends before the one that attends
            parts.append(up(sums_THr[:, :heads], uv_HRv, overlap=False))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_by(
        self, query_THD: Tensor, latents: LatentPlane, rows: QueryRows
    ) -> tuple[_FlashMla, LatentPlane, QueryRows]:
        """The kernel that attends, and the latents and pages that it reads."""
        return self, latents, rows

    @abstractmethod
    def _sums(
        self, query_THD: Tensor, plane_PSD: Tensor, places_TK: Tensor, lengths_T: Tensor, schedules: dict[int, Any]
    ) -> Tensor:
        """Weighted sums of latents: → [T, H, r]."""


class FlashMlaSparse(_FlashMla):
    """Of bfloat16 latents."""

    __slots__ = ()

    def _sums(
        self, query_THD: Tensor, plane_PSD: Tensor, places_TK: Tensor, lengths_T: Tensor, schedules: dict[int, Any]
    ) -> Tensor:
        import flash_mla

        plane_S1D, places_T1K = plane_PSD.flatten(0, 1).unsqueeze(1), places_TK.unsqueeze(1)
        rank, _, scale = self.shape
        out: Tensor = flash_mla.flash_mla_sparse_fwd(
            query_THD, plane_S1D, places_T1K, scale, rank, topk_length=lengths_T, use_legacy=True
        )[0]
        return out


class FlashMlaRecords(_FlashMla):
    """Of FP8 records. The library takes no lengths for them."""

    __slots__ = ()

    def _read_by(
        self, query_THD: Tensor, latents: LatentPlane, rows: QueryRows
    ) -> tuple[_FlashMla, LatentPlane, QueryRows]:
        tokens, pages_RL, rank = len(query_THD), rows.table_RL, self.shape.rank
        if tokens < LEAST_DECODING or pages_RL.numel() * PAGE > min(tokens * MOST_OF_EACH, MOST_DECODED):
            return self, latents, rows
        decoded = decode_pages(latents.paged_PSD, pages_RL.flatten(), rank, query_THD.shape[2] - rank, query_THD.dtype)
        table_RL = torch.arange(pages_RL.numel(), dtype=torch.int32, device=pages_RL.device).view_as(pages_RL)
        return FlashMlaSparse(self.shape), LatentPlane(decoded), rows._replace(table_RL=table_RL)

    def _sums(
        self, query_THD: Tensor, plane_PSD: Tensor, places_TK: Tensor, lengths_T: Tensor, schedules: dict[int, Any]
    ) -> Tensor:
        import flash_mla

        rank, _, scale = self.shape
        tokens = len(query_THD)
        if tokens not in schedules:
            schedules[tokens] = flash_mla.get_mla_metadata()[0]
        out: Tensor = flash_mla.flash_mla_with_kvcache(
            query_THD.unsqueeze(1),
            plane_PSD.unsqueeze(2),
            None,
            None,
            rank,
            schedules[tokens],
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=places_TK.unsqueeze(1),
            use_legacy=True,
        )[0]
        return out.squeeze(1)


def check(device: torch.device, case: CheckCase) -> None:
    """Two rows, one shorter than the choice. Raises RuntimeError if the library cannot run here or is wrong."""
    generator, shape, is_record = torch.Generator().manual_seed(1), SparseShape(512, 128, 0.07), case.backend == RECORDS
    heads, positions = min(case.heads, max(FLASHMLA_HEADS)), torch.tensor((299, 40, 298))
    table, rows_T = torch.tensor([[3, 1, 4, 2, 5], [7, 6, 0, 0, 0]]).int(), torch.tensor((0, 1, 0)).int()
    codes, rope = normal(generator, 8 * 64, 512).to(torch.float8_e4m3fn), normal(generator, 8 * 64, 64).bfloat16()
    scales = torch.exp2(torch.randint(-2, 2, (8 * 64, 4), generator=generator).float())
    latents = (codes.float().view(-1, 4, 128) * scales.unsqueeze(2)).flatten(1)
    numbers = torch.cat((latents.bfloat16(), rope), 1)
    plane = torch.cat([x.view(torch.uint8) for x in (codes, scales, rope)], 1) if is_record else numbers
    query, uv = normal(generator, 3, heads, 576).bfloat16(), (normal(generator, heads, 512, 128) * 0.05).bfloat16()
    chosen, exact = torch.full((3, shape.topk), -1, dtype=torch.int32), []
    for token, position in enumerate(positions.tolist()):
        columns = torch.randperm(position + 1, generator=generator)[: shape.topk].sort().values
        chosen[token, : len(columns)] = columns
        seen = numbers[table[rows_T[token]].long()[columns // 64] * 64 + columns % 64].unsqueeze(1)
        nothing = torch.zeros(1, len(columns))
        sums, _ = exact_attention(query[token : token + 1], seen, seen[..., :512], nothing, shape.scale)
        exact.append(torch.einsum("nhr,hrv->nhv", sums, uv.double()).flatten())

    def run() -> tuple[Tensor, ...]:
        rows, parts = QueryRows(rows_T.to(device), table.to(device), positions.to(device)), list[Tensor]()
        for kernel, of in (FlashMlaSparse, numbers), (FlashMlaRecords, plane):
            if is_record or kernel is FlashMlaSparse:  # prompts of records are decoded
                paged = LatentPlane(of.view(8, 64, -1).to(device))
                parts += kernel(shape).attend(query.to(device), paged, chosen.to(device), rows, uv.to(device), {})
        return tuple(parts)

    needs = "it needs Hopper, torch ≥ 2.10 and CUDA 13; or use triton in its place"
    check_results("FlashMLA's sparse attention", needs, run, exact * (1 + is_record), 0.02)
