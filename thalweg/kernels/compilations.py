"""Triton's cache folder: counts what is compiled or found there, and keeps its names the same from process to
process.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from triton import knobs
from triton.runtime import jit


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


def use_stable_keys() -> None:
    """Makes a kernel's name in the cache folder independent of the order in which kernels are launched first.

    Triton 3.6 puts the constants of a called function into the name only if it has hashed that function before. So
    another order of the same steps finds some kernels under other names, and compiles them again.
    """
    finder = getattr(jit, "DependenciesFinder", None)
    update = getattr(finder, "_update_hash", None)
    if update is None or hasattr(update, "is_stable"):  # another version of Triton, or done already
        return

    def update_hash(self: Any, function: Any) -> None:
        function.cache_key  # noqa: B018 computes its constants
        update(self, function)

    setattr(update_hash, "is_stable", True)  # noqa: B010
    setattr(finder, "_update_hash", update_hash)  # noqa: B010
