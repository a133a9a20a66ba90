"""Attention to parts of a context, merged by its log-sum-exp, is attention to the whole: references, and kernels under
Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from thalweg.kernels.attend.case import causal_bias
from thalweg.kernels.attend.ref import (
    attend,
    attend_grouped,
    attend_grouped_with_lse,
    attend_with_lse,
    merge_states,
)

CUTS = ((40,), (17, 23), (0, 40), (8, 0, 32))  # context tokens of each part


@pytest.mark.parametrize("counts", CUTS, ids=str)
def test_parts_of_latents_merge_to_the_whole(counts: tuple[int, ...]) -> None:
    """Absorbed: the first dims of a latent are the values."""
    generator = torch.Generator().manual_seed(1)
    q, kv = torch.randn(2, 5, 24, generator=generator), torch.randn(2, 40, 24, generator=generator)
    bias = causal_bias(5, 40)
    want = attend(q, kv, kv[..., :16], bias, 0.2)
    parts = zip(*(torch.split(x, list(counts), 1) for x in (kv, bias)), strict=True)
    states = [attend_with_lse(q, part, part[..., :16], own, 0.2) for part, own in parts]
    out, lse = merge_states(*zip(*states, strict=True))
    torch.testing.assert_close(out, want)
    exact = torch.baddbmm(bias, q, kv.transpose(1, 2), alpha=0.2).logsumexp(-1)
    torch.testing.assert_close(lse, exact)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("counts", CUTS, ids=str)
def test_parts_of_grouped_heads_merge_to_the_whole(counts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 5, 6, 8, generator=generator)
    key, value = (torch.randn(2, 40, 3, 8, generator=generator) for _ in range(2))
    bias = causal_bias(5, 40).repeat(2, 1, 1)
    want = attend_grouped(q, key, value, bias)
    parts = zip(*(torch.split(x, list(counts), dim) for x, dim in ((key, 1), (value, 1), (bias, 2))), strict=True)
    out, lse = merge_states(*zip(*(attend_grouped_with_lse(q, *part) for part in parts), strict=True))
    torch.testing.assert_close(out, want)
    assert lse.shape == (2, 5, 6)


def test_a_query_that_sees_nothing_has_no_weight() -> None:
    q, kv = torch.ones(1, 1, 4), torch.ones(1, 3, 4)
    nothing = attend_with_lse(q, kv, kv, torch.full((1, 3), -torch.inf), 1.0)
    assert not nothing[0].any() and nothing[1].tolist() == [[-torch.inf]]
    seen = attend_with_lse(q, kv, kv, torch.zeros(1, 3), 1.0)
    out, lse = merge_states((nothing[0], seen[0]), (nothing[1], seen[1]))
    assert torch.equal(out, seen[0]) and torch.equal(lse, seen[1])
    out, lse = merge_states((nothing[0], nothing[0]), (nothing[1], nothing[1]))
    assert not out.any() and lse.tolist() == [[-torch.inf]]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_are_interpreted_with_contexts_in_parts() -> None:
    command = [sys.executable, "-m", "tests.cpu.interpreted_attention"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
