"""The load generator's priority: raised beside a server that uses every core, unchanged if somebody lowered it."""

from __future__ import annotations

import os

import pytest

from thalweg.bench.http_client import NICE, high_priority


@pytest.mark.parametrize(("nice", "inside"), [(0, NICE), (-15, -15), (1, 1), (19, 19)])
def test_a_lowered_priority_is_kept(nice: int, inside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [nice]
    monkeypatch.setattr(os, "getpriority", lambda which, who: now[0])
    monkeypatch.setattr(os, "setpriority", lambda which, who, value: now.__setitem__(0, value))
    with high_priority():
        assert now == [inside]
    assert now == [nice]


def test_load_runs_without_permission_to_raise_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, value: int) -> None:
        if value < 0:
            raise PermissionError

    monkeypatch.setattr(os, "getpriority", lambda which, who: 0)
    monkeypatch.setattr(os, "setpriority", refuse)
    with high_priority():
        pass
