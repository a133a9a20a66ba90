"""Times of steps by drafts, as an engine measures them at its start on a machine that others use, too."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.cpu.test_speculation import engine, unrecorded
from thalweg.engine import widths
from thalweg.scheduler.widths import choices

assert unrecorded  # a fixture of this module, too


def test_what_disturbs_a_measurement_does_not_turn_the_order_round() -> None:
    """Fewer rows, and fewer drafts, take no longer."""
    assert widths.smoothed([(1, (8.0, 3.0, 4.0)), (2, (2.0, 5.0, 9.0))]) == ((1, (2.0, 3.0, 4.0)), (2, (2.0, 5.0, 9.0)))
    assert widths.smoothed([(1, (1.0, 2.0))]) == ((1, (1.0, 2.0)),)


def test_widths_between_those_that_are_measured_are_on_a_line() -> None:
    wide = choices(12)
    assert wide[0] == 0 and wide[-1] == 12 and len(wide) < 13
    times = widths._on_lines({width: 1.0 + 0.5 * width for width in wide})
    assert times == pytest.approx([1.0 + 0.5 * width for width in range(13)])


def test_a_busy_while_is_the_same_for_all_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rng, steps = engine(3), random.Random(1), 0

    def run(runner: Any, plan: Any, settings: Any) -> float:
        nonlocal steps
        steps += 1
        busy = 4.0 if 9 < steps < 22 else 1.0  # longer than the turns of a width
        return (1.0 + plan.draft) * len(plan.rows) * busy * rng.uniform(1, 1.01)

    monkeypatch.setattr(widths, "_run", run)
    settings = widths.measured(msgspec.structs.replace(made.settings, times=None, slots=2), made.runner)
    assert settings.times is not None
    for (rows, times), want in zip(settings.times, (1, 2), strict=True):
        assert rows == want and times == pytest.approx([rows * (1 + width) for width in range(4)], rel=0.02)


def test_an_engine_begins_with_nothing_late() -> None:
    made = engine(2, times=None, slots=2)
    assert made.settings.times and not made.runner.drafting.late.steps and not made.runner.drafting.lost
