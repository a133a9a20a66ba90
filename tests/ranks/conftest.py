"""Fixtures of the tests that run groups of processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.group import ProcessGroup


class ProcessGroups(dict[int, ProcessGroup]):
    """By their numbers of processes, started when a case asks for one."""

    def __missing__(self, size: int) -> ProcessGroup:
        self[size] = group = ProcessGroup(size)
        return group


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, ProcessGroup]]:
    """Each is started once for all cases of a module."""
    started = ProcessGroups()
    yield started
    for group in started.values():
        group.close()
