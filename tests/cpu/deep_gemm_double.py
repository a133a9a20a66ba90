"""What the library DeepGEMM documents of index scores, in plain torch. Refuses what it would refuse or read wrongly, and
leaves numbers that no one may read wherever it leaves any: past a token's own position.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.gemm import deep_gemm, toolchain

PROCESSORS, COLUMNS, UNSEEN = 132, 256, 1e30


class DeepGemm(ModuleType):
    """Stands for the module `deep_gemm` of sgl-deep-gemm 0.1.5.post1."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.calls: list[tuple[str, tuple[int, ...]]] = []  # name of a function, shape of its first argument
        self.schedules: list[tuple[Tensor, Tensor]] = []  # with the lengths that each is of

    def install(self) -> None:
        """In the place of the library, for the rest of this process."""
        sys.modules["deep_gemm"] = self
        vars(toolchain)["for_import"] = contextlib.nullcontext
        deep_gemm.library.cache_clear()

    def get_num_sms(self) -> int:
        return PROCESSORS

    def get_paged_mqa_logits_metadata(self, context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
        assert context_lens.dtype == torch.int32 and context_lens.dim() == 2 and context_lens.is_contiguous()
        assert (block_kv, num_sms) == (64, PROCESSORS) and int(context_lens.min()) > 0
        self.calls.append(("get_paged_mqa_logits_metadata", tuple(context_lens.shape)))
        schedule = torch.full((num_sms + 1, 2), len(self.schedules), dtype=torch.int32)
        self.schedules.append((schedule, context_lens.clone()))
        return schedule

    def fp8_paged_mqa_logits(
        self,
        q: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        schedule_meta: Tensor,
        max_context_len: int,
        clean_logits: bool = False,
        indices: None = None,
    ) -> Tensor:
        (rows, together, heads, dim), (_, page, one, size) = q.shape, kv_cache.shape
        self._check(q, weights, heads, dim)
        assert together in (1, 2) and not clean_logits and weights.shape == (rows * together, heads)
        assert (page, one, size) == (64, 1, dim + 4) and kv_cache.dtype == torch.uint8
        assert kv_cache.stride() == (64 * size, size, size, 1)
        assert block_table.dtype == torch.int32 and block_table.stride(1) == 1 and len(block_table) == rows
        _, lengths = next(pair for pair in self.schedules if pair[0] is schedule_meta)
        assert torch.equal(lengths, context_lens) and context_lens.shape == (rows, together)
        assert int(context_lens.max()) <= max_context_len
        self.calls.append(("fp8_paged_mqa_logits", (rows, together)))
        out = self._result(rows * together, max_context_len)
        for row in range(rows):
            longest = int(context_lens[row, -1])  # the only one of a row that is read
            keys = self._keys(kv_cache, block_table[row, : -(-longest // 64)].long())
            for i in range(together):
                token = row * together + i
                out[token, : -(-longest // COLUMNS) * COLUMNS] = UNSEEN
                out[token, :longest] = self._scores(q[row, i], weights[token], keys[:longest])
        return out[:, :max_context_len]

    def fp8_mqa_logits(
        self, q: Tensor, kv: Any, weights: Tensor, ks: Tensor, ke: Tensor, clean_logits: bool, max_seqlen_k: int
    ) -> Tensor:
        assert type(kv) in (tuple, list), "the library looks at the type itself"
        (codes, scales), (tokens, heads, dim) = kv, q.shape
        self._check(q, weights, heads, dim)
        assert codes.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32 and not clean_logits
        assert codes.is_contiguous() and scales.is_contiguous() and codes.shape == (len(scales), dim)
        assert ks.dtype == ke.dtype == torch.int32 and ks.shape == ke.shape == (tokens,) == weights.shape[:1]
        assert int(ke.max()) <= len(scales) and int((ke - ks).max()) <= max_seqlen_k
        self.calls.append(("fp8_mqa_logits", (tokens, heads, dim)))
        out, keys = self._result(tokens, max_seqlen_k), codes.float() * scales.unsqueeze(1)
        for token in range(tokens):
            first, last = int(ks[token]), int(ke[token])
            out[token, : last - first] = self._scores(q[token], weights[token], keys[first:last])
        return out[:, :max_seqlen_k]

    @staticmethod
    def _check(q: Tensor, weights: Tensor, heads: int, dim: int) -> None:
        assert q.dtype == torch.float8_e4m3fn and q.is_contiguous() and heads in (32, 64) and dim in (32, 64, 128)
        assert weights.dtype == torch.float32 and weights.is_contiguous()

    @staticmethod
    def _result(tokens: int, columns: int) -> Tensor:
        """Rows of whole blocks, of memory that holds anything."""
        return torch.full((tokens, -(-columns // COLUMNS) * COLUMNS), torch.nan)

    @staticmethod
    def _keys(kv_cache: Tensor, pages: Tensor) -> Tensor:
        """Of these pages, one behind the other."""
        page_PX, dim = kv_cache[pages].flatten(1), kv_cache.shape[3] - 4
        codes = page_PX[:, : 64 * dim].contiguous().view(torch.float8_e4m3fn).view(-1, dim)
        return codes.float() * page_PX[:, 64 * dim :].contiguous().view(torch.float32).flatten().unsqueeze(1)

    @staticmethod
    def _scores(query_Hd: Tensor, weights_H: Tensor, keys_Sd: Tensor) -> Tensor:
        return weights_H @ (query_Hd.float() @ keys_Sd.T).relu()
