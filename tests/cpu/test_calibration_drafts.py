"""Step times by draft length, measured at start on a machine with other load."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.cpu.test_speculation import engine, unrecorded
from thalweg.engine import calibration
from thalweg.engine.calibration import Calibrator
from thalweg.scheduler.draft_length import draft_length_choices
from thalweg.scheduler.step_times import ProfilePoint, StepTimeModel

assert unrecorded  # a fixture of this module, too


def test_outliers_do_not_change_the_order_of_draft_times() -> None:
    """Fewer rows, and fewer drafts, take no longer."""
    rough = [ProfilePoint(1, 512, (8.0, 3.0, 4.0)), ProfilePoint(2, 512, (2.0, 5.0, 9.0))]
    assert calibration.smoothed(rough) == (ProfilePoint(1, 512, (2.0, 3.0, 4.0)), rough[1])
    assert calibration.smoothed(rough[1:]) == (rough[1],) and calibration.smoothed([]) == ()


def test_widths_between_those_that_are_measured_are_on_a_line() -> None:
    wide = draft_length_choices(12)
    assert wide[0] == 0 and wide[-1] == 12 and len(wide) < 13
    times = calibration._interpolated({width: 1.0 + 0.5 * width for width in wide})
    assert times == pytest.approx([1.0 + 0.5 * width for width in range(13)])


def test_a_busy_period_affects_all_draft_lengths_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    made, rng, steps = engine(3), random.Random(1), 0

    def run(calibrator: Any, plan: Any) -> float:
        nonlocal steps
        steps += 1
        busy = 4.0 if 9 < steps < 22 else 1.0  # longer than the turns of a width
        return (1.0 + plan.num_drafts) * len(plan.rows) * busy * rng.uniform(1, 1.01)

    monkeypatch.setattr(Calibrator, "seconds", run)
    monkeypatch.setattr(Calibrator, "catch_up_seconds", lambda *_: 0.0)
    settings = calibration.calibrate(
        msgspec.structs.replace(
            made.config, speculative_adaptive=True, speculative_step_times=(), max_running_requests=2
        ),
        made.runner,
    )
    for (rows, context, times), want in zip(settings.speculative_step_times, (1, 2), strict=True):
        assert (rows, context) == (want, 400 - 12) and times == pytest.approx(
            [rows * (1 + width) for width in range(4)], rel=0.02
        )


def test_an_engine_starts_without_deferred_draft_kv() -> None:
    made = engine(2, speculative_adaptive=True, max_running_requests=2)
    assert (
        made.config.speculative_step_times
        and not made.runner.drafting.deferred.steps
        and not made.runner.drafting.drafter_failed
    )


def test_behind_a_long_context_steps_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as that is cheap beside the measuring of short ones; and what a drafter does later counts where nothing
    is drafted.
    """
    made, spent = engine(3, max_running_requests=8, context_length=4096), 0.0

    def run(calibrator: Any, plan: Any) -> float:
        nonlocal spent
        seconds = (1.0 + plan.num_drafts + plan.max_kv_len / 1000) * len(plan.rows)
        spent += seconds
        return seconds

    monkeypatch.setattr(Calibrator, "seconds", run)
    monkeypatch.setattr(Calibrator, "catch_up_seconds", lambda *_: 0.5)
    monkeypatch.setattr(calibration, "step_clock", lambda settings: lambda: spent)
    monkeypatch.setattr(calibration, "SECONDS", 1e6)
    settings = calibration.calibrate(
        msgspec.structs.replace(made.config, speculative_adaptive=True, speculative_step_times=()),
        made.runner,
    )
    assert [(rows, context) for rows, context, _ in settings.speculative_step_times] == [
        *((rows, 512) for rows in (1, 2, 4, 8)),
        (1, 4084),
    ]
    times = StepTimeModel(settings.speculative_step_times)
    for context in (100, 512, 2000, 4084):
        for rows in (1, 3, 8):
            want = [rows * (1 + width + (context + 12) / 1000) + 0.5 * (not width) for width in range(4)]
            assert times.seconds(rows, context) == pytest.approx(want)
    monkeypatch.setattr(calibration, "LONG_SHARE", 10)
    more = calibration.calibrate(
        msgspec.structs.replace(made.config, speculative_adaptive=True, speculative_step_times=()),
        made.runner,
    )
    assert [point[:2] for point in more.speculative_step_times[4:]] == [(1, 4084), (8, 4084)]


def test_deferred_draft_kv_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    made, settings = engine(2, max_running_requests=2), engine(2).config
    calibrator, plan = Calibrator(settings, made.runner), calibration._verify_plan(2, 100, 0, 120)
    made.runner.forward(calibrator.bound(plan, plan.rows, 120))
    drafter, tokens = made.runner.drafting.drafter, list[int]()
    monkeypatch.setattr(drafter, "extend", lambda seen, *rest: tokens.append(len(seen.batch.ids_T)))
    assert calibrator.catch_up_seconds(plan) > 0
    assert tokens == [2 * 100] and not made.runner.drafting.deferred.by_slot
    plain = engine(0, max_running_requests=2)
    calibrator = Calibrator(settings, plain.runner)
    plain.runner.forward(calibrator.bound(plan, plan.rows, 120))
    assert calibrator.catch_up_seconds(plan) == 0.0


def test_a_machine_that_has_become_slower_does_not_look_like_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a long context adds to one row is multiplied by the number of rows."""
    made, steps = engine(3, max_running_requests=2, context_length=4096), 0

    def run(calibrator: Any, plan: Any) -> float:
        nonlocal steps
        steps += 1
        slower = 1.0 if steps <= 2 * 2 * 4 * (1 + calibration.REPEATS) else 1.5  # behind the short context all was well
        return slower * (1.0 + plan.num_drafts + plan.max_kv_len / 40960) * len(plan.rows)

    monkeypatch.setattr(Calibrator, "seconds", run)
    monkeypatch.setattr(Calibrator, "catch_up_seconds", lambda *_: 0.0)
    settings = calibration.calibrate(
        msgspec.structs.replace(made.config, speculative_adaptive=True, speculative_step_times=()),
        made.runner,
    )
    assert settings.speculative_step_times[2][:2] == (1, 4084)
    times = StepTimeModel(settings.speculative_step_times)
    for rows in (1, 2, 30):
        assert times.seconds(rows, 60) == pytest.approx([rows * (1.0 + w) for w in range(4)], rel=0.03)
