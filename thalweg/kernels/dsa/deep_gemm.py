"""Index scores of e4m3 keys by the library `deep_gemm` (sgl-deep-gemm 0.1.5.post1), on Hopper,
with 32 or 64 index heads of 32, 64 or 128 dims.

Two kernels, both of which multiply 64 keys by 128 query heads at once, so that with 64 heads two tokens share the keys
that a block reads; `triton.scores` reads them for each token. 4,096 tokens behind 32,768 are 134 million pairs: at
16,384 FLOPs each 2.2 TFLOP, and 132 bytes of keys for each token are 17.7 GB out of the L2 cache, for each two 8.9 GB.

- Decode rows: pages are read through the table. A schedule divides the contexts of a launch evenly over the
  multiprocessors. It depends on lengths on the device, so a step computes it again, once for all layers; its kernel is
  compiled for every 32 rows more. One or two tokens of a row go together; the library refuses more on Hopper.
- Prompts: keys are contiguous, so they are gathered, once for each row and layer: 4.9 MB of 36,864 tokens. A block
  takes two tokens and all that they see, so few tokens leave most multiprocessors idle.

Each writes whole blocks of columns: past a token's own position are scores of tokens that it does not see, or of none.

Letters: T query tokens, B groups of n query tokens of a row, H index heads, d their dims, S context tokens, P pages, L
columns of the page table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thalweg.core.kernels import CheckCase
from thalweg.core.plan import PAGE
from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.case import normal
from thalweg.kernels.check import check_results
from thalweg.kernels.gemm.deep_gemm import library

COLUMN_BLOCK = 256  # that a block computes: the library cuts a result of other widths out of a wider one
MAX_QUERY_TOKENS = 2  # tokens of a row that go together at most
# tokens of a prompt from which it is faster: H200, behind 28,672, 121 µs for 64 (Triton 101), 121 for 128 (Triton 195)
MIN_PROMPT_TOKENS = 128


class PagedSchedule(NamedTuple):
    """What all layers of a step share."""

    lengths_Bn: Tensor  # int32: what each token sees
    table_BL: Tensor  # int32: the pages of each group
    schedule: Tensor  # int32 [multiprocessors + 1, 2]: where each begins


class PromptBounds(NamedTuple):
    """What all layers of a step share: int32 [T], the first of the gathered keys that a token sees, and the end."""

    starts_T: Tensor
    ends_T: Tensor


class GatheredKeys(NamedTuple):
    """The index keys of a context, one behind the other."""

    codes_Sd: Tensor  # e4m3
    scales_S: Tensor  # float32


def schedule_decode(rows: QueryRows, query: int) -> PagedSchedule:
    """Of whole rows with `query` tokens each."""
    together = 1 if query % MAX_QUERY_TOKENS else MAX_QUERY_TOKENS
    lengths_Bn = (rows.positions_T + 1).to(torch.int32).view(-1, together)
    lengths_Bn[:, -1] = lengths_Bn.amax(1)  # the library reads the last; padding inside a row is at position 0
    table_BL = rows.table_RL.index_select(0, rows.rows_T[::together])
    schedule = library().get_paged_mqa_logits_metadata(lengths_Bn, PAGE, library().get_num_sms())
    return PagedSchedule(lengths_Bn, table_BL, schedule)


def decode_scores(
    query_TX: Tensor, weights_TH: Tensor, keys_PSd: Tensor, metadata: PagedSchedule, max_kv_len: int
) -> Tensor:
    """As `triton.scores`: float32 [T, S], S at least `max_kv_len`. keys_PSd: e4m3 with scales."""
    query_BnHd = query_TX.view(*metadata.lengths_Bn.shape, weights_TH.shape[1], -1)
    scores_TS: Tensor = library().fp8_paged_mqa_logits(
        query_BnHd, keys_PSd.unsqueeze(2), weights_TH, *metadata, _columns(max_kv_len), clean_logits=False
    )
    return scores_TS


def prompt_bounds(positions_T: Tensor) -> PromptBounds:
    """Of tokens of one row."""
    ends_T = (positions_T + 1).to(torch.int32)
    return PromptBounds(torch.zeros_like(ends_T), ends_T)


def gather_keys(keys_PSd: Tensor, pages_P: Tensor) -> GatheredKeys:
    """keys_PSd: e4m3 with scales. pages_P: of a row, in order."""
    page_PX = keys_PSd.flatten(1).view(torch.int64)  # 8 bytes at a time
    border = PAGE * (keys_PSd.shape[2] - 4) // 8
    codes_PX, scales_PX = (x.index_select(0, pages_P) for x in (page_PX[:, :border], page_PX[:, border:]))
    codes_Sd = codes_PX.view(torch.float8_e4m3fn).view(-1, keys_PSd.shape[2] - 4)
    return GatheredKeys(codes_Sd, scales_PX.view(torch.float32).flatten())


def prompt_scores(
    query_TX: Tensor, weights_TH: Tensor, keys: GatheredKeys, metadata: PromptBounds, max_kv_len: int
) -> Tensor:
    """As `decode_scores`, of tokens of one row."""
    query_THd, columns = query_TX.view(*weights_TH.shape, -1), _columns(max_kv_len)
    scores_TS: Tensor = library().fp8_mqa_logits(
        query_THd, tuple(keys), weights_TH, *metadata, clean_logits=False, max_seqlen_k=columns
    )
    return scores_TS


def _columns(max_kv_len: int) -> int:
    return -(-max_kv_len // COLUMN_BLOCK) * COLUMN_BLOCK


def check(device: torch.device, case: CheckCase) -> None:
    """Both kernels: rows of one token and of two, and the tokens of a prompt. Raises RuntimeError if the library cannot
    run here or is wrong.
    """
    generator, heads, dim = torch.Generator().manual_seed(1), case.heads, case.head_dim
    positions, table = torch.tensor((298, 299, 0, 1, 63, 64)), torch.tensor([[3, 1, 4, 2, 5], [7, 6, 0, 0, 0]]).int()
    rows_T = torch.tensor((0, 0, 1, 1, 1, 1)).int()
    codes = normal(generator, 8, PAGE, dim).to(torch.float8_e4m3fn)
    scales = torch.exp2(torch.randint(-2, 2, (8, PAGE), generator=generator).float())
    query = normal(generator, len(positions), heads * dim).to(torch.float8_e4m3fn)
    weights, keys = normal(generator, len(positions), heads), codes.double() * scales.double().unsqueeze(2)
    plane = torch.cat([x.reshape(8, -1).view(torch.uint8) for x in (codes, scales)], 1).view(8, PAGE, dim + 4)
    exact = []
    for token, position in enumerate(positions.tolist()):
        seen = keys[table[rows_T[token]].long()].flatten(0, 1)[: position + 1]
        products = query[token].double().view(heads, dim) @ seen.T
        exact.append(weights[token].double() @ products.relu())

    def run() -> list[Tensor]:
        rows, paged = QueryRows(rows_T.to(device), table.to(device), positions.to(device)), plane.to(device)
        q, w = query.to(device), weights.to(device)
        found = [decode_scores(q, w, paged, schedule_decode(rows, query), 300) for query in (1, MAX_QUERY_TOKENS)]
        for row, some in (0, slice(0, 2)), (1, slice(2, 6)):
            metadata, keys = prompt_bounds(rows.positions_T[some]), gather_keys(paged, rows.table_RL[row])
            found.append(prompt_scores(q[some], w[some], keys, metadata, 300))
        every = [*found[0], *found[1], *found[2], *found[3]]
        return [scores[: len(right)] for scores, right in zip(every, exact * 3, strict=True)]

    needs = "it needs Hopper, and a compiler of CUDA 12.9 or later; or use --dsa-paged-mqa-logits-backend triton"
    check_results("DeepGEMM's index scores", needs, run, exact * 3, 0.01)
