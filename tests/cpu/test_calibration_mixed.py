"""Step times that start-up measures, and what follows from them for piecewise graphs. The times are synthetic."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.configs import config
from thalweg.core.plan import Row
from thalweg.engine.calibration import Calibrator, trim_piecewise
from thalweg.parallel.layout import SINGLE_RANK
from thalweg.runner.piecewise import Piecewise
from thalweg.scheduler.plan_builder import DecodeLoad
from thalweg.scheduler.prompt_share import StepCost


def calibrator(**fields: Any) -> Calibrator:
    """Its steps take 1 ms and 10 us a token; decode rows with a context 1 ns for each token of it, pairs 2 ns."""
    wishes = {"max_running_requests": 64, "chunked_prefill_size": 4096, "context_length": 20000, "num_pages": 1000}
    settings = config(model_path="m", measures_step_times=True, **wishes | fields)
    bare = Calibrator.__new__(Calibrator)
    bare.config, bare.asked = settings, []  # type: ignore[attr-defined]

    def seconds(rows: Sequence[Row]) -> float:
        assert len(rows) <= settings.max_running_requests and len({row.slot for row in rows}) == len(rows)
        assert sum(row.n for row in rows) <= settings.chunked_prefill_size
        assert all(0 < row.n and row.start + row.n <= settings.context_length for row in rows)
        bare.asked.append(rows)  # type: ignore[attr-defined]
        of_context = sum(1e-9 * row.start if row.n == 1 else 2e-9 * row.n * row.start for row in rows)
        return 1e-3 + 1e-5 * sum(row.n for row in rows) + of_context

    bare.forward_seconds = seconds  # type: ignore[method-assign]
    return bare


def test_one_slot_holds_a_prompt_without_a_decode_row() -> None:
    """Piecewise graphs are timed so, also with --max-running-requests 1."""
    of = calibrator(max_running_requests=1)
    assert of.mixed_seconds(1, 50) == pytest.approx(1e-3 + 50e-5) and of.mixed_seconds(1, 0) > 0
    assert [[row.n for row in rows] for rows in of.asked] == [[50], [1]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_running_requests": 2},
        {"max_running_requests": 3, "chunked_prefill_size": 8},
        {"chunked_prefill_size": 64, "context_length": 40},
        {"num_pages": 5, "context_length": 300},
        {"context_length": 6},
        {"max_running_requests": 33, "context_length": 1500},
        {"max_running_requests": 2, "chunked_prefill_size": 640_000, "context_length": 1500},
    ],
)
def test_step_times_are_measured_within_the_limits(fields: dict[str, Any]) -> None:
    of = calibrator(**fields)
    times = of.step_times()
    assert times is not None
    cost = StepCost(times)
    assert 0 < len(of.asked) <= 45, "a start must not take long"  # type: ignore[attr-defined]
    assert times.pair_seconds == pytest.approx(2e-9) or times.pair_seconds == 0.0
    for rows, tokens in ((1, 5), (2, 3)):
        expected = 1e-3 + 1e-5 * (rows + tokens) + 1e-9 * rows * (times.context - 1)
        load = DecodeLoad(rows, rows, rows * times.context)
        assert cost.seconds(load, tokens, 0) == pytest.approx(expected, rel=0.7)


@pytest.mark.parametrize("fields", [{"max_running_requests": 1}, {"chunked_prefill_size": 1}, {"context_length": 2}])
def test_nothing_is_measured_where_no_prompt_fits_beside_a_decode_row(fields: dict[str, Any]) -> None:
    assert calibrator(**fields).step_times() is None


def test_sizes_that_were_measured_are_those_that_ran() -> None:
    of = calibrator(max_running_requests=33, context_length=1500)
    times = of.step_times()
    assert times is not None
    asked: Any = of.asked  # type: ignore[attr-defined]
    ran = {(sum(row.n == 1 for row in rows), sum(row.n for row in rows if row.n > 1)) for rows in asked}
    assert {(rows, tokens) for rows, line in times.mixed for tokens, _ in line} <= ran


def test_times_of_steps_that_were_not_measured_are_interpolated() -> None:
    times = calibrator().step_times()
    assert times is not None
    cost = StepCost(times)
    for rows, context, tokens, start in ((1, 1024, 0, 0), (17, 1024, 0, 0), (20, 6000, 700, 0), (45, 100, 3000, 9000)):
        pairs = tokens * start
        expected = 1e-3 + 1e-5 * (rows + tokens) + 1e-9 * rows * context + 2e-9 * pairs
        got = cost.seconds(DecodeLoad(rows, rows, rows * context), tokens, pairs)
        assert got == pytest.approx(expected, rel=0.02), (rows, context, tokens, start)


@pytest.mark.parametrize("change", [1.0, 1.05, 1.3, 0.7])
def test_times_of_an_earlier_start_are_kept_while_they_hold(change: float) -> None:
    measured = calibrator().step_times()
    assert measured is not None
    rows, line = measured.mixed[-1]
    other = tuple((tokens, change * seconds) for tokens, seconds in line)
    known = msgspec.structs.replace(measured, mixed=(*measured.mixed[:-1], (rows, other)))
    of = calibrator(step_times=known)
    runner: Any = SimpleNamespace(forward_model=None, slots=SimpleNamespace(reset=lambda: None))
    of.runner = runner
    of.measure_mixed_steps()
    is_kept = abs(change - 1) < 0.1
    assert of.config.step_times == (known if is_kept else measured)
    assert (len(of.asked) == 3) == is_kept  # type: ignore[attr-defined]


class FakePieces:
    attends = ()

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def forward(self, batch: Any, planes: Any, decoding: None) -> str:
        return f"pieces of {self.tokens}"


class FakeModel:
    factory = SimpleNamespace(layout=SINGLE_RANK)

    def forward(self, batch: Any, planes: Any) -> str:
        return "eager"


def test_the_smallest_pieces_that_hold_a_step_run_it() -> None:
    pieces: Any = [FakePieces(tokens) for tokens in (64, 256, 128)]
    steps = Piecewise(FakeModel(), pieces)  # type: ignore[arg-type]
    batches: Any = [SimpleNamespace(ids_T=range(tokens), groups=[None]) for tokens in (1, 64, 65, 200, 257)]
    ran = [steps.forward(batch, None) for batch in batches]  # type: ignore[arg-type]
    assert ran == ["pieces of 64", "pieces of 64", "pieces of 128", "pieces of 256", "eager"]


@pytest.mark.parametrize(("python", "kept"), [(0.011, 512), (0.100, 1024), (0.0, 0)])
def test_the_largest_pieces_stay_only_where_they_are_faster(python: float, kept: int) -> None:
    # the device takes 20 us a token, of padding too; launching a step eagerly takes `python` seconds at least
    model = FakeModel()
    pieces: Any = [FakePieces(tokens) for tokens in (256, 512, 768, 1024)]
    steps = Piecewise(model, pieces)  # type: ignore[arg-type]
    runner: Any = SimpleNamespace(forward_model=steps)

    def time(rows: int, tokens: int) -> float:
        tokens += rows
        padded = next(one.tokens for one in steps.recorded if one.tokens >= tokens)
        return max(python, 2e-5 * tokens) if runner.forward_model is model else 2e-5 * padded

    said = trim_piecewise(runner, steps, time)
    assert [one.tokens for one in steps.recorded] == [tokens for tokens in (256, 512, 768, 1024) if tokens <= kept]
    assert runner.forward_model is steps and (f"up to {kept:,} tokens" in said if kept else "no step" in said)
