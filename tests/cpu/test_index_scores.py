"""Index scores by DeepGEMM: its self-check, by what stands for the library, and which tokens of a step it scores."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.cpu.deep_gemm_double import DeepGemm
from thalweg.batch.batch import Group
from thalweg.core.kernels import CheckCase
from thalweg.kernels.attend.args import QueryRows
from thalweg.kernels.dsa import deep_gemm
from thalweg.kernels.gemm import deep_gemm as imported
from thalweg.kernels.gemm import toolchain
from thalweg.memory.planes import Planes, index_plane

CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = DeepGemm()
    monkeypatch.setitem(sys.modules, "deep_gemm", made)
    monkeypatch.setattr(toolchain, "for_import", toolchain.for_import)
    made.install()
    yield made
    imported.library.cache_clear()


@pytest.mark.parametrize(("heads", "dim"), [(32, 32), (64, 128)])
def test_the_self_check_passes_and_sees_what_is_wrong(
    heads: int, dim: int, library: DeepGemm, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CheckCase("deep_gemm", heads=heads, head_dim=dim)
    deep_gemm.check(CPU, case)
    names = [name for name, _ in library.calls]
    assert names == ["get_paged_mqa_logits_metadata", "fp8_paged_mqa_logits"] * 2 + ["fp8_mqa_logits"] * 2
    scores, of_prompts = DeepGemm._scores, DeepGemm.fp8_mqa_logits
    with monkeypatch.context() as wrong:
        wrong.setattr(DeepGemm, "_scores", staticmethod(lambda q, w, keys: scores(q, w, keys).abs()))
        with pytest.raises(RuntimeError, match="index scores is wrong here by .*--dsa-paged-mqa-logits-backend triton"):
            deep_gemm.check(CPU, case)
    with monkeypatch.context() as wrong:
        wrong.setattr(DeepGemm, "fp8_mqa_logits", lambda *args, **options: of_prompts(*args, **options) * torch.nan)
        with pytest.raises(RuntimeError, match="wrong here by inf"):
            deep_gemm.check(CPU, case)
    monkeypatch.delattr(DeepGemm, "fp8_mqa_logits")
    with pytest.raises(RuntimeError, match="index scores does not run here"):
        deep_gemm.check(CPU, case)


@pytest.mark.parametrize("query", [1, 2, 3, 4])
def test_rows_of_every_length_are_scored_in_pairs_where_they_can(query: int, library: DeepGemm) -> None:
    generator, rows = torch.Generator().manual_seed(query), 3
    planes = Planes((index_plane(0, 32),), 1 + rows * 3)
    planes.write("index", 0, torch.arange(64, (1 + rows * 3) * 64), torch.randn(rows * 192, 32, generator=generator))
    table = (1 + torch.randperm(rows * 3, generator=generator)).view(rows, 3).int()
    ends = torch.tensor((query, 64, 190))
    positions = (ends.unsqueeze(1) - query + torch.arange(query)).flatten()
    of = QueryRows(torch.arange(rows).repeat_interleave(query).int(), table, positions)
    asked = torch.randn(rows * query, 32 * 32, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(rows * query, 32, generator=generator)
    keys = planes.paged("index", 0)
    got = deep_gemm.decode_scores(asked, weights, keys, deep_gemm.schedule_decode(of, query), 190)
    together = 2 if query % 2 == 0 else 1
    assert library.calls[-1] == ("fp8_paged_mqa_logits", (rows * query // together, together))
    assert got.shape == (rows * query, 256) and got.is_contiguous()
    numbers = planes.read("index", 0, keys, torch.float32)
    for token, position in enumerate(positions.tolist()):
        seen = numbers[table[token // query].long()].flatten(0, 1)[: position + 1]
        want = weights[token] @ (asked[token].float().view(32, 32) @ seen.T).relu()
        torch.testing.assert_close(got[token, : position + 1], want)


def test_padding_inside_a_row_shortens_no_other_tokens_context(library: DeepGemm) -> None:
    """The library reads the second length of a pair; padding is at position 0."""
    positions = torch.tensor((7, 8, 300, 0))
    of = QueryRows(torch.tensor((0, 0, 1, 1)).int(), torch.zeros(2, 8).int(), positions)
    assert deep_gemm.schedule_decode(of, 2).lengths_Bn.tolist() == [[8, 9], [301, 301]]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_schedules_kernels_are_compiled_for_every_number_of_rows() -> None:
    from thalweg.engine.dry_run import _kinds

    lengths = torch.zeros(70, 2, dtype=torch.int32)
    made = list(_kinds("get_paged_mqa_logits_metadata", (lengths, 64, 132)))
    assert [(tuple(one.shape), *rest) for one, *rest in made] == [((rows, 2), 64, 132) for rows in (32, 64, 96)]
    assert list(_kinds("fp8_gemm_nt", (1, 2))) == [(1, 2)]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_each_token_of_a_step_has_one_kernel(library: DeepGemm) -> None:
    from thalweg.layers.index_scores import DeepGemmScores

    keys = torch.zeros(4, 64, 36, dtype=torch.uint8)

    def kinds(groups: list[tuple[int, int, int]], decode: int, has_trees: bool = False) -> list[tuple[str, int, int]]:
        """groups: rows, tokens of each, longest context. → of each part its kernel, tokens, and how many go
        together.
        """
        made, row, token = list[Group](), 0, 0
        for rows, query, longest in groups:
            made.append(Group(row, rows, token, query, longest))
            row, token = row + rows, token + rows * query
        step = SimpleNamespace(batch=SimpleNamespace(groups=tuple(made)), decode=decode)
        none, tokens = torch.zeros(0), torch.zeros(token, dtype=torch.int32)
        paths: Tensor | None = none if has_trees else None
        rows = QueryRows(tokens, torch.zeros(row, 8, dtype=torch.int32), none, paths)
        parts = list(DeepGemmScores().parts(cast(Any, step), rows, keys))
        assert [part.tokens.start for part in parts] == [0, *(part.tokens.stop for part in parts[:-1])]
        assert parts[-1].tokens.stop == token
        return [
            (part.scores.func.__name__.strip("_"), part.tokens.stop - part.tokens.start, part.together)
            for part in cast(Any, parts)
        ]

    own, prompt, few = "by_triton", deep_gemm.MIN_PROMPT_TOKENS, deep_gemm.MIN_PROMPT_TOKENS - 1
    assert kinds([(5, 1, 300)], 5) == [("decode_rows", 5, 1)]
    assert kinds([(5, 4, 300)], 20) == [("decode_rows", 20, 4)]
    assert kinds([(5, 4, 300)], 20, has_trees=True) == [(own, 20, 1)]
    assert kinds([(1, prompt, 300), (1, prompt, 200)], 0) == [("prompt", prompt, 1)] * 2
    assert kinds([(2, prompt, 300)], 0) == [("prompt", prompt, 1)] * 2, "prompts of one length are one group"
    mixed = [(2, 1, 300), (1, few, 300), (1, 3, 100), (1, prompt, 400), (7, 1, 1)]
    assert kinds(mixed, 2) == [("decode_rows", 2, 1), (own, few + 3, 1), ("prompt", prompt, 1), (own, 7, 1)]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_chunks_part_no_row() -> None:
    from thalweg.layers.index_scores import ScoredTokens

    part = ScoredTokens(slice(4, 24), 300, cast(Any, None), together=4)
    assert [(some.start, some.stop) for some in part.chunks(11)] == [(4, 12), (12, 20), (20, 24)]
    assert [some.stop - some.start for some in part.chunks(1)] == [4] * 5
