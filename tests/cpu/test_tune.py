"""`thalweg tune`: the search, refusals, files written and read again; a tuned start stays correct."""

from __future__ import annotations

import json
import logging
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from thalweg.bench import stopwatch, tune
from thalweg.bench.tune import TunedFiles, Tuner, TuningOutcome
from thalweg.config.machine import Machine
from thalweg.config.options import Options
from thalweg.config.tree import options_of
from thalweg.core.kernels import TunedKernel
from thalweg.kernels.case import Inputs
from thalweg.kernels.gemm import prefetch
from thalweg.kernels.search import TuningSearch
from thalweg.kernels.tuned import SOURCES, TUNED, TuningTable, digest, flat, rebuilt
from thalweg.launch import tuned
from thalweg.launch.decisions import Decisions
from thalweg.llm import LLM

TINY = "models/tiny"
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ExpertTile:
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Pair:
    up: ExpertTile
    down: ExpertTile
    ahead: int = 0


DEFAULT = Pair(ExpertTile(1, 2), ExpertTile(3, 4), 5)


def search(candidates: tuple[Any, ...], run: Any = None, default: Any = 1, label: str = "a case") -> TuningSearch:
    def draw(generator: torch.Generator, before: Inputs | None) -> Inputs:
        return {"x": torch.randn(8, generator=generator)}

    def same(candidate: Any, given: Inputs) -> tuple[Tensor, ...]:
        return (given["x"] * 2,)

    key = (64, 4)
    return TuningSearch(
        "read_ahead", key, label, default, candidates, draw, run or same, lambda given: same(0, given), 1e-6, 1e6
    )


@pytest.fixture(autouse=True)
def nothing_tuned() -> Any:
    yield
    TUNED.use(())


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> dict[Any, float]:
    """Seconds of each candidate, in place of a clock."""
    seconds: dict[Any, float] = {}

    def time(self: Tuner, search: TuningSearch, candidate: Any, *rest: object) -> float:
        return seconds[candidate]

    monkeypatch.setattr(Tuner, "_time", time)
    return seconds


def test_a_choice_goes_through_numbers_and_back() -> None:
    assert flat(DEFAULT) == (1, 2, 3, 4, 5) and flat(7) == (7,)
    assert rebuilt(DEFAULT, (6, 7, 8, 9, 0)) == Pair(ExpertTile(6, 7), ExpertTile(8, 9), 0) and rebuilt(1, (0,)) == 0
    for wrong in ((1, 2, 3), (1, 2, 3, 4, 5, 6)):
        with pytest.raises(ValueError, match="numbers"):
            rebuilt(DEFAULT, wrong)


def test_a_table_is_replaced_for_its_shape_and_default_only() -> None:
    table = TuningTable()
    assert table.lookup("experts", ("pairs", 64), DEFAULT) is DEFAULT
    table.use([TunedKernel("experts", ("pairs", 64), flat(DEFAULT), (9, 9, 9, 9, 9))])
    assert table.lookup("experts", ("pairs", 64), DEFAULT) == Pair(ExpertTile(9, 9), ExpertTile(9, 9), 9)
    assert table.lookup("experts", ("pairs", 65), DEFAULT) is DEFAULT
    assert table.lookup("gemv", ("pairs", 64), DEFAULT) is DEFAULT
    other = replace(DEFAULT, ahead=4)
    assert table.lookup("experts", ("pairs", 64), other) is other
    table.use(())
    assert table.lookup("experts", ("pairs", 64), DEFAULT) is DEFAULT


def test_the_faster_one_is_chosen_and_a_tie_is_the_tables(pace: dict[Any, float]) -> None:
    pace |= {1: 1.0, 2: 0.7, 3: 0.99}
    tuner = Tuner(CPU, 96, 1 << 20)
    outcome = tuner.run(search((1, 2, 3)))
    assert (outcome.found.choice, outcome.found.candidates, outcome.wrong) == ((2,), 3, 0)
    assert outcome.found.us == 0.7e6
    assert tuner.run(search((1, 3))).found.choice == (1,)  # by less than timing errs


def test_a_fast_candidate_that_is_wrong_or_fails_is_never_chosen(pace: dict[Any, float]) -> None:
    pace |= {1: 1.0, 2: 0.1, 3: 0.2, 4: 0.3, 5: 0.9}

    def run(candidate: int, given: Inputs) -> tuple[Tensor, ...]:
        if candidate == 3:
            raise RuntimeError("out of resource: shared memory")
        if candidate == 4:
            return (torch.full_like(given["x"], torch.nan),)
        return (given["x"] * (2.1 if candidate == 2 else 2),)

    outcome = Tuner(CPU, 96, 1 << 20).run(search((1, 2, 3, 4, 5), run))
    assert (outcome.found.choice, outcome.found.candidates, outcome.wrong) == (
        (5,),
        2,
        3,
    ) and outcome.reason == "2: wrong by 0.05"

    def none(candidate: int, given: Inputs) -> tuple[Tensor, ...]:
        return (given["x"] * 3,)

    with pytest.raises(RuntimeError, match="the table's own choice 1 fails"):
        Tuner(CPU, 96, 1 << 20).run(search((1, 2), none))


def test_a_candidate_must_be_right_in_its_other_uses_too(pace: dict[Any, float]) -> None:
    pace |= {1: 1.0, 2: 0.1, 3: 0.2}

    def uses(candidate: int, given: Inputs) -> list[Any]:
        return [(lambda: given["x"] + (candidate == 2), lambda: given["x"])]

    outcome = Tuner(CPU, 96, 1 << 20).run(replace(search((1, 2, 3)), uses=uses))
    assert outcome.found.choice == (3,)


def test_what_the_first_candidates_suggest_is_tried_too(pace: dict[Any, float]) -> None:
    pace |= {1: 1.0, 2: 0.5, 20: 0.1}
    outcome = Tuner(CPU, 96, 1 << 20).run(replace(search((1, 2)), further=lambda timed: [10 * timed[0]]))
    assert outcome.found.choice == (20,) and outcome.found.candidates == 3


def test_most_candidates_is_a_limit_that_keeps_the_default(pace: dict[Any, float]) -> None:
    pace |= dict.fromkeys(range(20), 1.0)
    assert Tuner(CPU, 4, 1 << 20).run(search(tuple(range(20)), default=19)).found.candidates == 4


def machine() -> Machine:
    return Machine("A CPU", 1, 1 << 30, 1 << 30)


def put(folder: Path, choice: int = 0, label: str = "a case") -> Path:
    outcome = TuningOutcome(search((1, 0), label=label), tuned.TunedCase(label, (1,), (choice,), 5.0, 10.0, 2), 0, "")
    return TunedFiles(folder, "A CPU", tuned.versions("cpu"), {"date": "today"}).put(outcome)


def decided(cache: Path, **wishes: Any) -> tuple[tuple[TunedKernel, ...], str]:
    decisions = Decisions()
    rows = tuned.resolve_tuned(options_of(cache_dir=str(cache), **wishes), machine(), "cpu", decisions)
    (decision,) = decisions.entries
    assert decision.name == "tuned_kernels"
    return rows, str(decision.value)


def folder_of(cache: Path) -> Path:
    return tuned.folder_of(machine(), "cpu", str(cache))


def test_a_start_reads_what_was_written_for_this_device(tmp_path: Path) -> None:
    assert decided(tmp_path) == ((), "default table")
    put(folder_of(tmp_path))
    rows, said = decided(tmp_path)
    assert rows == (TunedKernel("read_ahead", (64, 4), (1,), (0,)),) and said == str(folder_of(tmp_path))
    assert decided(tmp_path, tuned_kernels=False) == ((), "default table")
    put(folder_of(tmp_path), choice=1)  # what is as the table has it changes nothing
    assert decided(tmp_path)[0] == ()


def test_a_corrupt_or_foreign_file_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(tmp_path)
    good = put(folder)
    file = json.loads(good.read_text())
    versions = file["versions"]
    foreign = {
        "device": {"device": "Another"}, "versions": {"versions": versions | {"torch": "0.1"}}, "source": {"source": "0"},
        "operation": {"operation": "nonesuch"}, "form": {"found": [file["found"][0] | {"choice": [1, 2]}]},
        "type": {"found": 3}, "field": {"key": None},
    }  # fmt: skip
    for name, changed in foreign.items():
        (folder / f"{name}.json").write_text(json.dumps(file | changed))
    (folder / "half.json").write_bytes(good.read_bytes()[:100])
    (folder / "binary.json").write_bytes(b"\xff\x00")
    with caplog.at_level(logging.WARNING, "thalweg.launch"):
        rows, _ = decided(tmp_path)
    assert len(rows) == 1
    (warning,) = caplog.records
    assert "not used" in warning.getMessage() and "and 8 more" in warning.getMessage()
    for path in folder.glob("*.json"):
        path.write_text("{")
    assert decided(tmp_path) == ((), "default table")


def test_an_edited_tuned_file_is_not_used(tmp_path: Path) -> None:
    file = tuned.load(put(tmp_path))
    assert tuned.unfit(file, "A CPU", tuned.versions("cpu")) == ""
    (case,) = file.found
    edited = msgspec.structs.replace(file, found=(msgspec.structs.replace(case, choice=(7,)),))
    for other in (edited, msgspec.structs.replace(file, key=(64, 5)), msgspec.structs.replace(file, checksum="")):
        assert tuned.unfit(other, "A CPU", tuned.versions("cpu")) == "was damaged or edited"


def test_the_operations_sources_are_files_of_the_package() -> None:
    assert {len(digest(operation)) for operation in SOURCES} == {16}


def test_a_search_goes_on_where_it_was_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []
    real = Tuner.run

    def run(self: Tuner, one: TuningSearch) -> TuningOutcome:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(one.label)
        return real(self, one)

    monkeypatch.setattr(Tuner, "run", run)
    monkeypatch.setattr(stopwatch, "time_calls", lambda *given: stopwatch.CallTime(1.0, "clock"))
    argv = [TINY, "--device", "cpu", "--threads", "1", "--cache-dir", str(tmp_path)]
    result = tmp_path / "r.json"
    assert tune.main([*argv, "--result-filename", str(result)]) == 130 and len(made) == 2
    assert "PARTIAL: Ctrl-C; what was found is kept" in capsys.readouterr().err
    told = json.loads(result.read_text())
    assert told["partial"] is True and told["ended"] == "Ctrl-C" and len(told["rows"]) == 2
    monkeypatch.setattr(Tuner, "run", real)
    outcomes = tune.run(argv).outcomes
    assert {one.search.label for one in outcomes}.isdisjoint(made) and len(outcomes) >= 3
    assert tune.run(argv).outcomes == [] and "0 of them" not in capsys.readouterr().out.splitlines()[-1]
    assert tune.run([*argv, "--only", made[0].split()[-2], "--again"]).outcomes[0].search.label == made[0]
    assert tune.main([*argv, "--list"]) == 0 and "done  read_ahead" in capsys.readouterr().out


def test_no_time_left_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tune.run([TINY, "--device", "cpu", "--threads", "1", "--cache-dir", str(tmp_path), "--seconds", "-1"])
    assert not found.outcomes and found.ended == "--seconds"
    assert "are left after" in capsys.readouterr().err


def test_what_cannot_be_searched_is_told_by_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [TINY, "--device", "cpu", "--threads", "1", "--cache-dir", str(tmp_path)]
    assert tune.main([*argv, "--only", "nosuch"]) == 2
    assert "no case has 'nosuch' in its name; --list" in capsys.readouterr().err

    def fails(self: Tuner, one: TuningSearch) -> TuningOutcome:
        raise RuntimeError("the table's own choice fails")

    monkeypatch.setattr(Tuner, "run", fails)
    result = tmp_path / "r.json"
    assert tune.main([*argv, "--result-filename", str(result)]) == 1
    assert json.loads(result.read_text())["failed"] and "FAILED read_ahead" in capsys.readouterr().err


def test_the_examples_of_the_help_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tune.main(["--help"])
    shown = capsys.readouterr().out
    lines = [line.split("  ")[1] for line in shown.splitlines() if line.startswith("  thalweg tune ")]
    assert len(lines) >= 3
    for line in lines:
        tune.parse(shlex.split(line)[2:])  # ends the process where it is none


def test_a_tuned_model_says_the_same_words_and_reads_otherwise(tmp_path: Path) -> None:
    """Everything on this CPU turned round: no weight is read ahead."""
    plain = {"model": TINY, "device": "cpu", "threads": 1, "cache_dir": str(tmp_path), "max_running_requests": 2}
    prompts = ["The river", "A boat"]

    def said(llm: LLM) -> list[list[int]]:
        from thalweg.core.sampling import SamplingParams

        results = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
        return [list(result.outputs[0].token_ids) for result in results]

    before = said(LLM(**plain))
    weight = torch.empty(2048, 256)
    assert prefetch.prefetch_for(weight) is not prefetch.no_prefetch
    config = Options()
    here = Machine.here()
    folder = tuned.folder_of(here, "cpu", str(tmp_path))
    shelf = TunedFiles(folder, tuned.device_name(here, "cpu"), tuned.versions("cpu"), {})
    from thalweg.config.tree import replace as changed
    from thalweg.launch.resolve import resolve

    found = tune.searches(resolve(changed(config, model=TINY, device="cpu", threads=1), weights=False))
    assert found
    for one in found:
        case = tuned.TunedCase(one.label, flat(one.default), (1 - one.default,), 1.0, 2.0, 2)
        shelf.put(TuningOutcome(one, case, 0, ""))
    llm = LLM(**plain)
    assert said(llm) == before
    assert prefetch.prefetch_for(weight) is prefetch.no_prefetch
    (decision,) = (one for one in llm.texts.resolved.decisions if one.name == "tuned_kernels")
    assert decision.value == str(folder) and f"{len(found)} choices" in decision.reason


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(tune.ResultError, match="give another --cache-dir"):
        put(tmp_path / "file" / "folder")


def test_files_are_strict_json(tmp_path: Path) -> None:
    assert msgspec.json.decode(put(tmp_path).read_bytes(), type=tuned.TunedFile).made == {"date": "today"}
