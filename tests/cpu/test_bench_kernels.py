"""`thalweg bench kernels`: times every operation of the catalog, reports failures, and compares sizes with the
reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from thalweg.bench import kernels, stopwatch
from thalweg.bench.kernels import KernelBenchmark, KernelWork, matches, works
from thalweg.kernels.case import Inputs, Run, TimedCase
from thalweg.kernels.catalog import OPERATIONS
from thalweg.kernels.quantize import case as quantized

CPU = torch.device("cpu")
TOP = {"read": 1e10, "float32": 1e11, "bf16": 1e11}


def case(backends: dict[str, Run], tolerance: float = 1e-6) -> KernelWork:
    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        return {"x": torch.randn(64, generator=generator)}

    return KernelWork(
        "doubling", TimedCase("64 numbers", draw, backends, lambda given: (64, 512), "float32", tolerance), False
    )


def test_every_operation_of_the_catalog_is_there() -> None:
    assert {work.operation for work in works(CPU)} == set(OPERATIONS)


@pytest.mark.parametrize(
    "work", [work for work in works(CPU) if not work.small], ids=lambda work: f"{work.operation}-{work.case.name}"
)
def test_backends_of_a_size_agree_with_their_reference(work: KernelWork) -> None:
    generator = torch.Generator().manual_seed(3)
    given = work.case.draw(generator, None)
    again = work.case.draw(generator, given)
    changed = [
        name
        for name in given
        if isinstance(given[name], torch.Tensor) and given[name].data_ptr() != again[name].data_ptr()
    ]
    assert changed  # calls in a row do not read the same
    first, *others = work.case.backends
    with torch.inference_mode():
        expected = work.case.compared(work.case.backends[first](**kernels.cloned(given)))
        for backend in others:
            assert (
                kernels.difference(work.case.compared(work.case.backends[backend](**kernels.cloned(given))), expected)
                <= work.case.tolerance
            )
    flops, moved = work.case.cost(given)
    assert flops > 0 and moved > 0


def test_a_wrong_or_crashing_backend_is_reported_and_the_others_run() -> None:
    def crash(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("in a kernel\nout of shared memory")

    work = case({"ref": lambda x: (x * 2,), "wrong": lambda x: (x * 2.1,), "crash": crash, "good": lambda x: (x + x,)})
    bench = KernelBenchmark(CPU, TOP, 0.001)
    rows = {row.backend: row for row in bench.rows(work, list(work.case.backends))}
    assert rows["wrong"].failed.startswith("wrong by 0.05") and rows["wrong"].us == 0
    assert rows["crash"].failed == "RuntimeError: out of shared memory"
    assert rows["good"].failed == "" and rows["good"].us > 0 and rows["good"].how == "clock"
    assert rows["good"].floor_us == pytest.approx(512 / 1e10 * 1e6)
    assert rows["good"].share == pytest.approx(rows["good"].floor_us / rows["good"].us)
    assert rows["good"].gbs == pytest.approx(512 / rows["good"].us / 1e3)


def test_a_backend_that_writes_into_its_inputs_spoils_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.mul_(2),)

    work = case({"ref": lambda x: (x * 2,), "in place": double, "again": double})
    bench = KernelBenchmark(CPU, TOP, 0.001)
    assert [row.failed for row in bench.rows(work, list(work.case.backends))] == ["", "", ""]


@pytest.mark.parametrize("operation", ["experts", "experts_fp8"])
def test_experts_without_effect_would_fail_the_check(operation: str) -> None:
    """What is added to a residual is compared with it in: it must be large enough for the tolerance."""
    for case in OPERATIONS[operation].sizes(CPU):
        given = case.draw(torch.Generator().manual_seed(3), None)
        with torch.inference_mode():
            expected = case.compared(next(iter(case.backends.values()))(**kernels.cloned(given)))
        assert kernels.difference((given["out_TH"],), expected) > 5 * case.tolerance, case.name


def test_codes_are_compared_by_steps() -> None:
    """Neighbours are as far from each other near 0 as near 448; two steps are too many, and the sign counts."""
    codes = torch.tensor([448.0, 416.0, 0.0625, 2**-9, 0.0, -0.0, -448.0, -416.0]).to(torch.float8_e4m3fn)
    numbers, _ = quantized.code_numbers((codes, torch.ones(1)))
    assert numbers.tolist() == [126, 125, 24, 1, 0, 0, -126, -125]
    one, two = (
        quantized.code_numbers((torch.tensor([448.0, near]).to(torch.float8_e4m3fn), torch.ones(1)))
        for near in (2**-8, 3 * 2**-9)
    )
    exact = quantized.code_numbers((torch.tensor([448.0, 2**-9]).to(torch.float8_e4m3fn), torch.ones(1)))
    assert kernels.difference(one, exact) <= quantized.STEP < kernels.difference(two, exact)


@pytest.mark.parametrize("each", [2e-6, 3e-4, 8e-3])
def test_a_gpus_time_is_cut_into_rounds(each: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """About as long as asked, in many rounds where a call is short and in a few where it is long."""
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return 1e3 * (other.at - self.at)

    def run() -> None:
        now[0] += each

    monkeypatch.setattr(stopwatch.torch.cuda, "Event", Event)
    found = stopwatch._events(run, 0.05)
    assert found == [pytest.approx(each)] * len(found)
    assert stopwatch.ROUNDS <= len(found) <= stopwatch.MOST_ROUNDS and (len(found) >= 30 or each > 1e-3)
    assert now[0] < 3 * 0.05


def test_inputs_are_as_many_as_exceed_the_caches() -> None:
    bench = KernelBenchmark(CPU, TOP, 0.001)
    small = case({"ref": lambda x: (x,)})
    assert len(bench.inputs(small)) == kernels.MOST_COPIES
    large = KernelWork("copy", replace(small.case, cost=lambda given: (1, kernels.RESIDENT["cpu"] / 5)), False)
    assert len(bench.inputs(large)) == 5


def test_names_are_matched_by_words() -> None:
    text = "gemm_fp8 v3 down, 1 x 2112 x 7168 deep_gemm"
    assert (
        matches(text, [])
        and matches(text, ["gemm"])
        and matches(text, ["v3 deep"])
        and matches(text, ["moe", "1 7168"])
    )
    assert not matches(text, ["fp8"]) and not matches(text, ["v3 cublas"]) and not matches(text, ["112"])


def test_the_command_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.ceilings, "rates", lambda device: TOP)
    path = tmp_path / "k.json"
    argv = ["silu_mul", "experts tiny 1", "--device", "cpu", "--seconds", "0.001", "--result-filename", str(path)]
    assert kernels.main(argv) == 0
    told = json.loads(path.read_text())
    assert [(row["operation"], row["backend"]) for row in told["rows"]][:2] == [
        ("experts", "ref"),
        ("experts", "script"),
    ]
    assert all(row["us"] > 0 and not row["failed"] for row in told["rows"])
    assert told["ceilings"] == TOP and {"device", "versions", "commit", "command"} <= set(told)
    assert "read 10.0 GB/s" in capsys.readouterr().out
    assert told["partial"] is False and told["ended"] == ""
    assert kernels.main(["nonesuch", "--device", "cpu"]) == 2
    assert "--list shows all" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.ceilings, "rates", lambda device: TOP)
    calls = iter(range(100))
    real = stopwatch.time_calls

    def interrupted(*given: object) -> stopwatch.CallTime:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels.stopwatch, "time_calls", interrupted)
    path = tmp_path / "k.json"
    assert kernels.main(["rope", "--device", "cpu", "--seconds", "0.001", "--result-filename", str(path)]) == 130
    told = json.loads(path.read_text())
    assert len(told["rows"]) == 2 and told["partial"] is True and told["ended"] == "Ctrl-C"


def test_a_result_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels.ceilings, "rates", lambda device: TOP)
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "k.json")
    assert kernels.main(["silu_mul", "--device", "cpu", "--seconds", "0.001", "--result-filename", path]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_cpus_limits_are_measured() -> None:
    top = kernels.ceilings.rates(CPU)
    assert set(top) == {"read", "float32", "bf16"} and top["read"] > 1e8 and top["float32"] > 1e9


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
