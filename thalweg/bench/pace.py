"""What is asked of an engine that runs alone, and how fast it was."""

from __future__ import annotations

import msgspec


class Task(msgspec.Struct, frozen=True):
    """prompts: token ids, all submitted at once. output_len: tokens of each. core: the one to run on. settings: of the
    engine.
    """

    prompts: list[list[int]]
    output_len: int
    core: int
    settings: dict[str, str | int]


class Pace(msgspec.Struct, frozen=True):
    """Of the steps in which every sequence decoded: how many a second of wall time, and CPU microseconds of a token.
    steps: their number.
    """

    steps_per_second: float
    cpu_us_per_token: float
    steps: int
