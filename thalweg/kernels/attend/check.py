"""Self-checks of attention libraries: a small case on this device against its definition.

A check raises RuntimeError if the library cannot run here or is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import RowLengths
from thalweg.kernels.attend.ref import attend_with_lse

CUDA_13 = "it needs Hopper, torch ≥ 2.10 and CUDA 13"
NVCC = "it needs nvcc and ninja"
INSTEAD = "use --attention-backend triton"
TOLERANCE = 0.02
ROWS = RowLengths((70, 3), (200, 3))
SCALE = 192**-0.5  # of `check_latents`


States = tuple[Tensor, Tensor]  # out, LSE


def check_latents(
    library: str,
    needs: str,
    run: Callable[[Tensor, Tensor, Tensor, Tensor], States],
    device: torch.device,
    heads: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """MLA decode, of 512 + 64 dims. run: (queries [2, H, 576], plane [6, 64, 576], table [2, 4], context lengths
    [2]).
    """
    generator = torch.Generator(device).manual_seed(1)
    plane = torch.randn(6, 64, 576, generator=generator, device=device).to(dtype)
    query = torch.randn(2, heads, 576, generator=generator, device=device).to(dtype)
    table = torch.tensor([[3, 0, 0, 0], [5, 1, 4, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor((1, 200), dtype=torch.int32, device=device)
    with _running(library, needs, device):
        out, lse = run(query, plane, table, lengths)
    for row, length in enumerate(lengths.tolist()):
        kv = plane[table[row].long()].flatten(0, 1)[:length].float().unsqueeze(0)
        exact = attend_with_lse(query[row : row + 1].float(), kv, kv[..., :512], torch.zeros(1, device=device), SCALE)
        # of e4m3 the weights of the keys are e4m3 too
        tolerance = 0.05 if dtype == torch.float8_e4m3fn else TOLERANCE
        _compare(library, (out[row : row + 1], lse[row : row + 1]), exact, tolerance)


def check_ragged(
    library: str,
    needs: str,
    run: Callable[[Tensor, Tensor, Tensor, RowLengths], States],
    device: torch.device,
    case: CheckCase,
    rows: RowLengths = ROWS,
) -> None:
    """Causal attention of ragged rows, scores scaled by d^-1/2. run: (queries, keys, values, rows)."""
    generator = torch.Generator(device).manual_seed(1)
    _, heads, kv_heads, dim, value_dim, *_ = case
    drawn = (
        (sum(rows.queries), heads, dim),
        (sum(rows.contexts), kv_heads, dim),
        (sum(rows.contexts), kv_heads, value_dim),
    )
    query, key, value = (torch.randn(*size, generator=generator, device=device).bfloat16() for size in drawn)
    with _running(library, needs, device):
        out, lse = run(query, key, value, rows)
    parts = (
        torch.split(x, list(counts)) for x, counts in zip((query, key, value), (rows[0], rows[1], rows[1]), strict=True)
    )
    results = (torch.split(x, list(rows.queries)) for x in (out, lse))
    for q, k, v, got, got_lse in zip(*parts, *results, strict=True):
        k, v = (x.float().repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v))
        bias = torch.full((len(q), k.shape[1]), -torch.inf, device=device).triu_(1 + k.shape[1] - len(q))
        exact, exact_lse = attend_with_lse(q.float().transpose(0, 1), k, v, bias, dim**-0.5)
        _compare(library, (got, got_lse), (exact.transpose(0, 1), exact_lse.t()), TOLERANCE)


@contextmanager
def _running(library: str, needs: str, device: torch.device) -> Iterator[None]:
    try:
        yield
        torch.cuda.synchronize(device)
    except (RuntimeError, AttributeError, TypeError, ValueError, OSError, ImportError, AssertionError) as error:
        raise RuntimeError(f"{library} does not run here ({error}): {needs}; or {INSTEAD}") from error


def _compare(library: str, got: States, exact: States, tolerance: float) -> None:
    wrong = float((got[0].float() - exact[0]).norm() / exact[0].norm())
    wrong = max(wrong, float((got[1] - exact[1]).abs().max()))
    if not wrong < tolerance:
        raise RuntimeError(f"{library} is wrong here by {wrong:.3f}: {INSTEAD}")
