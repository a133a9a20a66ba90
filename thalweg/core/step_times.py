"""Times of steps with and without prompt tokens, as start-up measures them."""

from __future__ import annotations

import msgspec

Line = tuple[tuple[int, float], ...]  # (tokens, seconds), tokens rising


class StepTimes(msgspec.Struct, frozen=True):
    """Measured times, from which the time of any step is interpolated."""

    decode: Line
    """(tokens of decode rows, seconds) of steps without prompt tokens."""
    mixed: tuple[tuple[int, Line], ...]
    """(tokens of decode rows, times by prompt tokens) of steps with both, rising; equal prompt tokens in each line."""
    context: int
    """Tokens before each decode row that was measured."""
    context_seconds: float
    """For each token more of a decode row's context."""
    pair_seconds: float
    """For each pair of a prompt token and a token before its chunk; pairs within a chunk are part of `mixed`."""
