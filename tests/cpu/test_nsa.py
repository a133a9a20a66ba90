"""Native sparse attention in plain torch: fla-core's own oracles, a model over pages, what is pooled, ties. The kernels
are checked the same way by interpreted_nsa.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cpu import nsa_model
from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.nsa import ref
from thalweg.kernels.nsa.ref import PAGE, NsaConfig

CPU = torch.device("cpu")


def test_a_model_over_pages_generates_what_one_forward_does() -> None:
    nsa_model.check_generation(ref, 8, 2, CPU)


def test_full_pages_are_pooled() -> None:
    nsa_model.check_pooling(ref, CPU)


def test_the_first_of_equal_blocks_is_chosen() -> None:
    nsa_model.check_ties(ref, CPU)


def mean_pooling(x: Tensor, block_size: int, cu_seqlens: None) -> Tensor:
    """fla-core's is a kernel. The last block may have fewer tokens."""
    return torch.cat([block.mean(1, keepdim=True) for block in x.split(block_size, 1)], 1)


def windowed(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """FlashAttention's function of this name, for causal windows."""
    near = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril().triu(-window_size[0])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, near, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize(("tokens", "topk", "window"), [(400, 4, 100), (320, 3, 64), (130, 16, 0)])
def test_the_reference_is_flas(tokens: int, topk: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    naive = pytest.importorskip("fla.ops.nsa.naive", reason="pip install fla-core==0.6.0 einops", exc_type=ImportError)
    monkeypatch.setattr(naive, "mean_pooling", mean_pooling)
    monkeypatch.setattr(naive, "flash_attn_func", windowed)
    generator, kv_heads = torch.Generator().manual_seed(1), 2
    query, key, value = (
        torch.randn(1, tokens, n, 16, generator=generator) for n in (16 * kv_heads, kv_heads, kv_heads)
    )
    key, gates = key * 2, torch.rand(1, tokens, 16 * kv_heads, 3, generator=generator)
    exact = naive.naive_nsa(query, key, value, *gates.unbind(3), block_counts=topk, window_size=window)
    table = torch.arange(-(-tokens // PAGE), 0, -1, dtype=torch.int32)[None]
    planes = nsa_model.filled(table.shape[1] + 1, kv_heads, (16, 16), 1e3, CPU)
    rows = QueryRows(torch.zeros(tokens, dtype=torch.int32), table, torch.arange(tokens))
    write_T = table[0, rows.positions_T // PAGE].long() * PAGE + rows.positions_T % PAGE
    ref.write(key[0], value[0], write_T, planes)
    got = ref.attend(query[0], gates[0], planes, rows, NsaConfig(topk, window, 16**-0.5), tokens)
    torch.testing.assert_close(got, exact[0], rtol=1e-4, atol=1e-5)
