"""FlashInfer's latent decode for Hopper (`flashinfer`, tested with flashinfer-python 0.6.14):
BatchMLAPagedAttentionWrapper of its fa3 kernels.

See `kernels.gqa.flashinfer` for what it needs and costs. Measured on an H100, 128 heads: 64 x 4,096 tokens 135 µs, 16
heads 113 µs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.gqa.flashinfer import PAGE, WORKSPACE, library, pages
from thalweg.kernels.mla.paged import MlaDecodeRows, project_values

ROPE = 64


@dataclass(frozen=True, slots=True)
class FlashInferMlaDecode:
    """See `paged.Decoder`. Planned on the host, once a step, from lengths that are copied there: not for CUDA graphs.
    bfloat16 latents only.
    """

    heads: int
    rank: int
    scale: float

    def prepare(self, rows: MlaDecodeRows) -> Any:
        lengths_R = (rows.positions_T[rows.query - 1 :: rows.query] + 1).to(torch.int32).cpu()
        held = pages(rows.table_RL, lengths_R)
        queries_R1 = torch.arange(0, (len(lengths_R) + 1) * rows.query, rows.query, dtype=torch.int32)
        shape = (self.heads, self.rank, ROPE, PAGE, True, self.scale, torch.bfloat16, torch.bfloat16)
        wrapper = _wrapper(rows.positions_T.device)
        wrapper.plan(queries_R1, held.starts_R1, held.indices_N, lengths_R, *shape)
        return wrapper

    def attend(
        self,
        query_THD: Tensor,
        plane_PSD: Tensor,
        plane_scale: Tensor | None,
        uv_HRv: Tensor,
        rows: MlaDecodeRows,
        prepared: Any,
    ) -> Tensor:
        query, plane = (torch.split(x, [self.rank, ROPE], -1) for x in (query_THD, plane_PSD))
        return project_values(prepared.run(*query, *plane), uv_HRv)


def decoder(heads: int, rank: int, scale: float, is_fp8: bool) -> FlashInferMlaDecode:
    """An entry of `config.backends.DECODE`."""
    return FlashInferMlaDecode(heads, rank, scale)


@cache
def _wrapper(device: torch.device) -> Any:
    """With 128 MiB for partial results."""
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
    return library().mla.BatchMLAPagedAttentionWrapper(workspace, backend="fa3")


def check(device: torch.device, case: CheckCase) -> None:
    """Compares a small case with its definition, compiling what is not yet compiled; RuntimeError if the library cannot
    run here or is wrong.
    """
    heads, generator = case.heads, torch.Generator(device).manual_seed(1)
    contexts, scale = (1, 200), 192**-0.5
    plane = torch.randn(6, PAGE, 576, generator=generator, device=device).bfloat16()
    query = torch.randn(2, heads, 576, generator=generator, device=device).bfloat16()
    table = torch.tensor([[3, 0, 0, 0], [5, 1, 4, 2]], dtype=torch.int32, device=device)
    positions = torch.tensor(contexts, device=device) - 1
    identity = torch.eye(512, dtype=torch.bfloat16, device=device).expand(heads, 512, 512)
    try:
        made, rows = FlashInferMlaDecode(heads, 512, scale), MlaDecodeRows(table, positions, 1, max(contexts))
        out = made.attend(query, plane, None, identity, rows, made.prepare(rows)).view(2, heads, 512)
        torch.cuda.synchronize(device)
    except (RuntimeError, AttributeError, TypeError, ValueError, OSError, ImportError) as error:
        raise RuntimeError(
            f"FlashInfer does not run here ({error}): it needs nvcc and ninja; or use --attention-backend triton"
        ) from error
    for row, context in enumerate(contexts):
        kv = plane[table[row].long()].flatten(0, 1)[:context].float()
        exact = (query[row].float() @ kv.T * scale).softmax(-1) @ kv[:, :512]
        wrong = float((out[row].float() - exact).norm() / exact.norm())
        if not wrong < 0.02:
            raise RuntimeError(f"FlashInfer is wrong here by {wrong:.3f}: use --attention-backend triton")
