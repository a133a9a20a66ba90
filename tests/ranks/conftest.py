"""Fixtures of the tests that run groups of processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.group import ProcessGroup


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, ProcessGroup]]:
    """By their numbers of processes, started once for all cases of a module."""
    made = {size: ProcessGroup(size) for size in (2, 4)}
    yield made
    for group in made.values():
        group.close()
