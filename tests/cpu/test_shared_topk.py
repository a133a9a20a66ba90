"""`--index-share-for-mtp-iteration`: the steps of a NextN draft attend to what its first step has selected and to the
drafts since, and the tokens are those of plain decoding.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.test_captured_drafts import choose_draft_lengths
from tests.cpu.test_speculation import engine, prompts, run, unrecorded
from thalweg.attention.context import AttentionGroup, AttentionMetadata
from thalweg.attention.draft_selection import shared_positions, store_contexts
from thalweg.attention.selection import SelectedContext
from thalweg.batch.draft_selection import DraftSelection
from thalweg.core.kernels import KernelConfig
from thalweg.core.sampling import SamplingParams
from thalweg.core.tree import CHAIN, TreeShape
from thalweg.engine.local import LocalEngine
from thalweg.layers.mla import Mla
from thalweg.spec.autoregressive import AutoregressiveDrafter

assert unrecorded  # a fixture of this module, too
TOPK = 64
TREE, STATIC = TreeShape(3, 3, 7), TreeShape(3, 3, 7, dynamic=False)


@pytest.mark.parametrize("topk", [3, 8])
def test_drafts_are_added_and_the_lowest_positions_make_room(topk: int) -> None:
    rng = random.Random(topk)
    for _ in range(200):
        root, drafted = rng.randrange(12), rng.randrange(6)
        first = sorted(rng.sample(range(root + 1), min(topk, root + 1)))
        selection = DraftSelection(torch.tensor([first + [-1] * (topk - len(first))]), torch.tensor([root]), False)
        want = [*first, *range(root + 1, root + drafted + 1)][-topk:]
        got = shared_positions(selection, torch.tensor([root + drafted]))[0].tolist()
        assert got == want + [-1] * (topk - len(want))


def test_padding_of_a_rank_selects_nothing() -> None:
    """A rank that shares the tokens of a draft step may have rows of padding, which see one token and select none."""
    first = SelectedContext((torch.tensor([[4, 1, 7]]),), (torch.tensor([[0.0, 0.0, -torch.inf]]),))
    groups = [SimpleNamespace(rows=1, query=1, join_tiles=torch.cat), SimpleNamespace(rows=2, query=1)]
    batch = SimpleNamespace(positions_T=torch.tensor([9, 0, 0]))
    selection = DraftSelection(torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), True)
    metadata: Any = SimpleNamespace(groups=groups, batch=batch)
    store_contexts(selection, metadata, (first, None))
    assert selection.positions_TK.tolist() == [[1, 4, -1, -1], [-1] * 4, [-1] * 4]
    assert selection.root_T.tolist() == [9, 0, 0]


class Attended:
    """What the draft layer attends to in each of its steps, and how often it computes index scores."""

    def __init__(self, made: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter = made.runner.drafting.drafter
        assert isinstance(drafter, AutoregressiveDrafter)
        self.layer: Any = drafter.head.layer.attention
        assert isinstance(self.layer, Mla) and self.layer.indexer is not None
        self.steps: list[tuple[AttentionMetadata, list[set[int]]]] = []
        self.scored = 0
        attend, choose = self.layer.attend, self.layer.indexer._choose

        def watch_attend(
            group: AttentionGroup, query: Tensor, selected: SelectedContext | None, metadata: AttentionMetadata
        ) -> Tensor:
            if selected is not None and metadata.batch.draft_selection is not None:
                (positions, *tiles), (bias, *_) = selected
                assert not tiles and len(metadata.groups) == 1
                rows = zip(positions, bias > -torch.inf, strict=True)
                self.steps.append((metadata, [set(p[seen].tolist()) for p, seen in rows]))
            out: Tensor = attend(group, query, selected, metadata)
            return out

        def watch_choose(*args: Tensor) -> Any:
            self.scored += 1
            return choose(*args)

        monkeypatch.setattr(self.layer, "attend", watch_attend)
        monkeypatch.setattr(self.layer.indexer, "_choose", watch_choose)

    def check(self) -> int:
        """Every step attends to the selection of the one before without a root, and to the drafts that it sees. → the
        number of later steps in which something had to make room.
        """
        first: list[set[int]] = []
        full = 0
        for metadata, selected in self.steps:
            shared, batch = metadata.batch.draft_selection, metadata.batch
            assert shared is not None
            if shared.is_first:
                first, root = selected, batch.positions_T.tolist()
                continue
            nodes = len(selected) // len(first)
            for token, got in enumerate(selected):
                row, column = token // nodes, int(batch.columns_T[token])
                if not batch.real_T[token]:
                    continue
                mask = -1 if batch.tree is None else int(batch.tree.tree_mask_T[token])
                drafts = {c for c in range(root[row] + 1, column + 1) if mask >> (column - c) & 1}
                assert drafts and len(drafts) == int(batch.positions_T[token]) - root[row]
                want = sorted(first[row]) + sorted(drafts)
                full += len(want) > TOPK
                assert got == set(want[-TOPK:])
        return full


SHAPES = {"a chain": (3, CHAIN), "dynamic trees": (TREE.num_drafts, TREE), "static trees": (7, STATIC)}


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_a_draft_share_one_selection(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, tree = SHAPES[shape]
    made = engine(drafts, tree=tree, index_share_for_mtp_iteration=True, speculative_adaptive=False)
    attended = Attended(made, monkeypatch)
    wanted = run(engine(0), prompts(4))
    assert run(made, prompts(4)) == wanted
    firsts = sum(m.batch.draft_selection is not None and m.batch.draft_selection.is_first for m, _ in attended.steps)
    assert attended.check() > 50 and 10 < firsts < len(attended.steps) // 2
    assert attended.scored == firsts, "later steps compute no scores"
    assert made.loop.stats().accepted_tokens > 20


@pytest.mark.parametrize(
    "fields",
    [
        {"max_steps_in_flight": 2},
        {"max_running_requests": 2},
        {"kernels": KernelConfig(kv="fp8_ds_mla", fp8_index=True)},
        {"kernels": KernelConfig(deterministic=True)},
    ],
    ids=["overlapped", "two at a time", "records", "deterministic"],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_plain_decoding(fields: dict[str, Any], temperature: float) -> None:
    """Of greedy and of seeded requests, shorter and longer than a selection, with any number of drafts in each step."""
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=30, ignore_eos=True)
    made = engine(3, index_share_for_mtp_iteration=True, **fields)
    lengths = random.Random(5)
    choose_draft_lengths(made, lambda: lengths.choice((0, 1, 2, 3, 3)))
    assert run(made, prompts(5), params) == run(engine(0, **fields), prompts(5), params)
    assert made.loop.stats().drafted_tokens > 20 and not made.loop.stats().drafter_failures
