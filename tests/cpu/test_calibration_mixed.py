"""What follows from step times: prompt tokens beside decode rows, and piecewise graphs. The times are synthetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from thalweg.engine.calibration import FLAT, MANY_ROWS, MAX_SLOWDOWN, TOTALS, choose_mixed_step_limits, trim_piecewise
from thalweg.runner.piecewise import Piecewise


def test_the_most_tokens_within_the_time() -> None:
    # a step costs 10 ms and 10 us a token, so `MAX_SLOWDOWN` times as long is reached at 600 tokens beside none
    def time(rows: int, tokens: int) -> float:
        return 0.010 + 1e-5 * (rows + tokens)

    table = dict(choose_mixed_step_limits(time, (1, 32, 256), 8192))
    for rows, total in table.items():
        fits = [t for t in TOTALS if t >= 2 * rows and time(rows, t - rows) <= MAX_SLOWDOWN * time(rows, 0)]
        share = 2 if rows < MANY_ROWS else 4
        least = [t for t in TOTALS if share * (t - 1) / time(1, t - 1) >= (TOTALS[-1] - 1) / time(1, TOTALS[-1] - 1)][0]
        assert total == max(fits[-1], least)
    assert table[256] > table[1]


def test_where_nothing_fits_prompts_run_at_half_of_the_best_rate() -> None:
    # a lone row takes 1 ms; with any prompt all experts are read: 10 ms, and 5 us a token
    def time(rows: int, tokens: int) -> float:
        return 0.001 if not tokens else 0.010 + 5e-6 * tokens

    rates = {tokens: (tokens - 1) / time(1, tokens - 1) for tokens in TOTALS}
    half, quarter = (min(t for t, rate in rates.items() if share * rate >= max(rates.values())) for share in (2, 4))
    assert (
        choose_mixed_step_limits(time, (1, MANY_ROWS), 8192) == ((1, half), (MANY_ROWS, quarter))
        and quarter < half < TOTALS[-1]
    )


def test_tokens_that_hardly_cost_more_are_taken() -> None:
    # decoding takes 8 ms; with a prompt of any length the host needs 20, the device 15 us a token
    def time(rows: int, tokens: int) -> float:
        return max(0.020, 0.008 + 1.5e-5 * tokens) if tokens else 0.008

    ((_, total),) = choose_mixed_step_limits(time, (64,), 8192)
    cheap = [t for t in TOTALS if time(64, t - 64) <= FLAT * 0.020]
    assert total == cheap[-1] == 1024 and time(64, total - 64) > MAX_SLOWDOWN * time(64, 0)


def test_few_step_times_are_measured() -> None:
    asked: list[int] = []

    def time(rows: int, tokens: int) -> float:
        asked.append(rows)
        return 0.01 * (rows + tokens) ** 0.1

    choose_mixed_step_limits(time, (1, 32, 64), 8192)
    assert len(asked) <= len(TOTALS) + 3 * 6


def test_a_small_budget_bounds_a_step() -> None:
    def time(rows: int, tokens: int) -> float:
        return 0.01

    assert choose_mixed_step_limits(time, (4,), 300) == ((4, 256),)
    assert choose_mixed_step_limits(time, (4, 60), 64) == ((4, 64), (60, 64))


class FakePieces:
    attends = ()

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def forward(self, batch: Any, planes: Any, decoding: None) -> str:
        return f"pieces of {self.tokens}"


class FakeModel:
    def forward(self, batch: Any, planes: Any) -> str:
        return "eager"


def test_the_smallest_pieces_that_hold_a_step_run_it() -> None:
    steps = Piecewise(FakeModel(), [FakePieces(tokens) for tokens in (64, 256, 128)])  # type: ignore[arg-type, list-item]
    ran = [steps.forward(SimpleNamespace(ids_T=range(tokens), groups=[None]), None) for tokens in (1, 64, 65, 200, 257)]  # type: ignore[arg-type]
    assert ran == ["pieces of 64", "pieces of 64", "pieces of 128", "pieces of 256", "eager"]


@pytest.mark.parametrize(("python", "kept"), [(0.011, 512), (0.100, 1024), (0.0, 0)])
def test_the_largest_pieces_stay_only_where_they_are_faster(python: float, kept: int) -> None:
    # the device takes 20 us a token, of padding too; launching a step eagerly takes `python` seconds at least
    model = FakeModel()
    steps = Piecewise(model, [FakePieces(tokens) for tokens in (256, 512, 768, 1024)])  # type: ignore[arg-type, list-item]
    runner: Any = SimpleNamespace(forward_model=steps)

    def time(rows: int, tokens: int) -> float:
        tokens += rows
        padded = next(one.tokens for one in steps.recorded if one.tokens >= tokens)
        return max(python, 2e-5 * tokens) if runner.forward_model is model else 2e-5 * padded

    said = trim_piecewise(runner, steps, time)
    assert [one.tokens for one in steps.recorded] == [tokens for tokens in (256, 512, 768, 1024) if tokens <= kept]
    assert runner.forward_model is steps and (f"up to {kept:,} tokens" in said if kept else "no step" in said)
