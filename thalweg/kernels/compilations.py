"""Counts what Triton compiles, or fetches from its cache folder, while a piece of code runs."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from triton import knobs


class Compilations:
    """A context manager. made: names of the kernels that were compiled; found: of those whose compiled form lay in the
    cache folder. A kernel that this process has run before is in neither.
    """

    def __init__(self) -> None:
        self.made: list[str] = []
        self.found: list[str] = []

    def __enter__(self) -> Compilations:
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._heard
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        knobs.compilation.listener = self._before

    def _heard(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        (self.found if cache_hit else self.made).append(src.name)
