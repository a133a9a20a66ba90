"""What a fuzzer runs."""

from __future__ import annotations

import random
from typing import Any


class Target:
    """A context manager around the code under test. Inputs are JSON values."""

    packages: tuple[str, ...]  # of thalweg, or files in it, whose covered lines decide which inputs are kept

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what `__enter__` has started. It is entered again after a failure."""

    def run(self, entry: Any) -> str:
        """Runs one input. Returns the kind of its outcome. Raises AssertionError, or what the code under test raised,
        if it failed.
        """
        raise NotImplementedError

    def mutate(self, entry: Any, draw: random.Random, donor: Any) -> Any:
        """A changed copy. donor: another input of the corpus."""
        raise NotImplementedError
