"""Counts what Triton compiles, or loads from its cache folder, while a piece of code runs."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from triton import knobs


class Compilations:
    """A context manager. A kernel that this process has run before is in neither list."""

    def __init__(self) -> None:
        self.compiled: list[str] = []  # names of kernels
        self.loaded: list[str] = []  # of kernels whose compiled form was in the cache folder

    def __enter__(self) -> Compilations:
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._listen
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        knobs.compilation.listener = self._before

    def _listen(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        (self.loaded if cache_hit else self.compiled).append(src.name)
