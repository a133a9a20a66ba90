"""Counting accepted NextN drafts: which draft is compared with which token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from thalweg.batch.batch import Batch
from thalweg.bench.nextn_acceptance import accepted_in, passes, whole_batch

VOCAB = 50


class Echo:
    """A main model whose hidden state is the token itself."""

    def planes(self) -> tuple[()]:
        return ()

    def forward(self, batch: Batch, planes: Any) -> Tensor:
        return batch.ids_T[:, None].float()


class Steps:
    """A drafter that has seen tokens a, b in a row and says b + (b - a)."""

    def planes(self) -> tuple[()]:
        return ()

    def forward(self, ids_T: Tensor, hidden_TH: Tensor, batch: Batch, planes: Any) -> Tensor:
        return 2 * ids_T[:, None].float() - hidden_TH

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden_NH[:, 0].long() % VOCAB, VOCAB).float()


def count(*written: tuple[list[int], list[int]]) -> tuple[int, int]:
    fakes: Any = (Echo(), Steps())
    share = accepted_in(*fakes, written, torch.device("cpu"))
    return share.hits, share.total


def test_drafts_meet_the_tokens_they_are_of() -> None:
    assert count(([3, 5], [7, 9, 11])) == (2, 2)  # 9 and 11 are drafted; 7 comes from the prompt's own step
    assert count(([3, 9], [7, 9, 11])) == (1, 2)  # from 9, 7 it says 5
    assert count(([1], [2, 3, 9, 10])) == (1, 3)
    assert count(([3, 9], [7, 9, 11]), ([3, 5], [7, 9, 11]), ([1], [2, 3, 9, 10])) == (4, 7)
    assert count(([1, 2, 3], [4])) == (0, 0)


def test_passes_keep_every_sequence() -> None:
    written = [(list(range(n)), [0]) for n in (10, 20, 500, 30, 1, 1)]
    parts = list(passes(written, room=100))
    assert [one for part in parts for one in part] == written
    assert [len(part) for part in parts] == [2, 1, 3]


def test_a_batch_of_whole_sequences() -> None:
    batch = whole_batch([3, 130, 64], torch.arange(197))
    assert batch.table_RP.tolist() == [[1, 0, 0], [2, 3, 4], [5, 0, 0]]
    assert batch.write_T[:4].tolist() == [64, 65, 66, 128] and int(batch.write_T[-1]) == 5 * 64 + 63
    assert batch.positions_T[3:6].tolist() == [0, 1, 2]
    assert len(set(batch.write_T.tolist())) == 197
    assert [(g.row_start, g.token_start, g.query, g.max_kv_len) for g in batch.groups] == [
        (0, 0, 3, 3),
        (1, 3, 130, 130),
        (2, 133, 64, 64),
    ]


@pytest.mark.parametrize("other", [[1, 1, 1], [40] * 100])
def test_other_sequences_in_a_pass_change_nothing(other: list[int]) -> None:
    hits, total = count(([3, 9], [7, 9, 11]), (other, [2, 4]))
    alone = count((other, [2, 4]))
    assert (hits - alone[0], total - alone[1]) == (1, 2)
