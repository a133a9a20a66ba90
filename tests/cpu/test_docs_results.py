"""Tables in the docs equal their results, and the release check reports results that are older than their code."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from thalweg.bench.statistics import Share
from tools.release import ages, check, docs, tables

ROOT = Path(__file__).parents[2]


def test_every_table_has_a_result_behind_it_and_does_not_differ_from_it() -> None:
    assert docs.wrong() == []


def test_a_table_that_differs_from_its_result_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in docs.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    monkeypatch.setattr(docs, "BY_HAND", ())
    monkeypatch.setattr(docs, "unsupported", list)
    assert docs.wrong() == []
    page = tmp_path / "docs/benchmarks.md"
    whole = page.read_text()
    row = next(line for line in whole.splitlines() if line.startswith("|    32 | 128 | 128 |"))
    page.write_text(whole.replace(row, row.replace("|    32 |", "|    33 |")))
    assert docs.wrong() == ["docs/benchmarks.md: a table differs from its result; run `make docs`"]
    page.write_text(whole + "\n| batch | tok/s |\n| --- | --- |\n| 1 | 99 tok/s |\n")
    assert docs.wrong() == ["docs/benchmarks.md: the table '| batch | tok/s |' has no result behind it"]
    twice = whole.index("<!-- table: report cpu/serve_64.json -->")
    page.write_text(whole + "\n" + whole[twice : whole.index("<!-- end -->", twice)] + "<!-- end -->\n")
    assert docs.wrong() == ["docs/benchmarks.md: the table of report cpu/serve_64.json stands there 2 times"]
    page.write_text(whole.replace("<!-- table: report cpu/serve_64.json -->", "<!-- table: report cpu/none.json -->"))
    assert "benchmarks/cpu/none.json" in docs.wrong()[0]
    for kind, file in (("eval", "serve_64"), ("report", "grammars")):
        order = f"<!-- table: {kind} cpu/{file}.json -->"
        page.write_text(whole.replace("<!-- table: report cpu/serve_64.json -->", order))
        assert f"is no result of the kind {kind}" in docs.wrong()[0]
    page.write_text(whole.replace("<!-- end -->", "", 1))
    assert any("without its <!-- end -->" in one or "differs" in one for one in docs.wrong())
    page.write_text(whole.replace(row, ""))
    assert docs.main([]) == 0 and page.read_text() == whole, "make docs must bring the row back"


@pytest.mark.parametrize(
    ("cell", "measured"),
    [
        ("12.5", True), ("1,024 tok/s", True), ("**3.1**", True), ("0.72 / 0.86", True), ("99.6 – 100.0 %", True), ("± 1.4 ms", True),
        ("at least 512 tokens", False), ("`--threads 2`", False), ("FP8", False), ("", False), ("–", False), ("V3.2", False),
    ],
)  # fmt: skip
def test_what_counts_as_a_measured_number(cell: str, measured: bool) -> None:
    page = f"text\n\n| a | b |\n| --- | --- |\n| x | {cell} |\n"
    assert bool(docs.unbacked(page)) == measured


def test_a_plot_that_differs_from_its_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "digest", lambda result: "another")
    assert "docs/ablations.md: ablation_tiny.svg differs from its result; run `make docs`" in docs.wrong()


def test_a_table_by_hand_names_a_result_that_is_there_in_its_section() -> None:
    table = "| a | b |\n| --- | --- |\n| x | 12.5 |\n"
    named = "*`benchmarks/cpu/one_batch.json`: so and so*\n"
    assert docs.unnamed(f"# A\n{table}{named}") == docs.unnamed(f"# A\n{table}`benchmarks/cpu/`\n") == []
    assert docs.unnamed(f"# A\n{table}") == docs.unnamed(f"# A\n{named}## B\n{table}") == ["| a | b |"]
    assert docs.unnamed(f"# A\n{table}`benchmarks/cpu/gone_*.json`\n") == ["| a | b |"]


def test_every_result_of_the_index_is_there_and_measures_code_that_is_there() -> None:
    for row in docs.index().results:
        assert row["again"]
        missing = [name for name in row["files"] if not (docs.BENCHMARKS / name).is_file()]
        missing += [path for path in row["code"] if not (ROOT / path).exists()]
        assert not missing, f"benchmarks/index.yaml names what is not there: {missing}"


def test_each_line_of_support_says_a_number_of_its_result() -> None:
    for one in docs.index().support:
        assert any(char.isdigit() for char in tables.say(docs.read(one["result"]))), one["result"]


# ---- how old a result is ----


class Repository:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        self.git("config", "user.email", "a@b")
        self.git("config", "user.name", "A")

    def git(self, *words: str) -> str:
        done = subprocess.run(["git", *words], cwd=self.root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(self, title: str, **files: str) -> str:
        for name, text in files.items():
            (self.root / name).mkdir(exist_ok=True)
            (self.root / name / "x.py").write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", title)
        return self.git("rev-parse", "HEAD")


def test_a_result_is_old_when_its_code_has_changed_since(tmp_path: Path) -> None:
    tree = Repository(tmp_path)
    first = tree.commit("First", kernels="1", docs="1")
    result = {"commit": first}
    tree.commit("Only words", docs="2")
    fresh = ages.age(tmp_path, "r.json", result, ["kernels"])
    assert not fresh.old and "as new as the code" in ages.words("r.json", fresh, "again")
    tree.commit("Faster tiles", kernels="2")
    old = ages.age(tmp_path, "r.json", result, ["kernels"])
    said = ages.words("r.json", old, "thalweg bench kernels")
    assert old.old and "1 commit changed that code since: " in said and '"Faster tiles"' in said
    assert said.endswith("Measure again: thalweg bench kernels")
    brought = {"commit": tree.git("rev-parse", "HEAD")}
    tree.commit("Say why", kernels="# why\n2")
    assert not ages.age(tmp_path, "r.json", brought, ["kernels"]).old, "a comment is no code"
    tree.commit("Move it\n\nResults: unchanged (the same code in another place)", kernels="4")
    assert not ages.age(tmp_path, "r.json", brought, ["kernels"]).old, "the commit says that no result can change"
    (tmp_path / "kernels" / "x.py").write_text("3")
    now = ages.age(tmp_path, "r.json", {"commit": tree.git("rev-parse", "HEAD")}, ["kernels"])
    assert now.files == ("kernels/x.py",) and "changes that are not committed" in ages.words("r.json", now, "x")


def test_a_result_that_does_not_name_its_commit_counts_from_the_one_that_brought_it(tmp_path: Path) -> None:
    tree = Repository(tmp_path)
    tree.commit("First", kernels="1", results="1")
    tree.commit("Faster", kernels="2")
    unnamed = ages.age(tmp_path, "results/x.py", {}, ["kernels"])
    assert unnamed.old and "does not name its commit" in unnamed.unsure
    dirty = ages.age(tmp_path, "results/x.py", {"commit": tree.git("rev-parse", "HEAD") + ages.CHANGED}, ["kernels"])
    assert not dirty.old and "had changes" in ages.words("x", dirty, "y")
    (tmp_path / "results" / "x.py").write_text("2")
    assert not ages.age(tmp_path, "results/x.py", {}, ["kernels"]).old, "measured again, and not committed yet"
    with pytest.raises(ages.NoHistory):
        ages.age(tmp_path, "results/x.py", {"commit": "0" * 40}, ["kernels"])


# ---- the gate ----


def _shares(share: float, total: int) -> dict[str, Any]:
    row = {"task": "sums", "hits": round(share * total), "total": total, "share": share}
    return {"results": [row | Share(round(share * total), total).as_json()]}


def test_answers_are_worse_only_beyond_both_intervals() -> None:
    committed = _shares(0.997, 1000)
    assert check.same_answers(committed, _shares(0.99, 100)).ok
    worse = check.same_answers(committed, _shares(0.9, 100))
    assert not worse.ok and worse.words == ("sums: 90.0% of 100, committed 99.7% of 1000: worse",)


def test_every_part_runs_and_one_failure_fails_the_release_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def part(name: str, ok: bool) -> Any:
        def run(args: object) -> check.Verdict:
            ran.append(name)
            return check.Verdict(ok, (f"{name} says so",))

        return run

    monkeypatch.setattr(check, "PARTS", {"a": part("a", True), "b": part("b", False), "c": part("c", True)})
    assert check.main([]) == 1 and ran == ["a", "b", "c"]
    shown = capsys.readouterr().out
    assert "b: FAILED" in shown and "  c says so" in shown and shown.endswith("not ready for a release: b\n")
    assert check.main(["--only", "a", "c"]) == 0
    assert capsys.readouterr().out.endswith("passed: a, c\n")


@pytest.mark.parametrize(("rates", "ok"), [([1.7], True), ([1.5, 1.7], True), ([1.5, 1.5, 1.5], False)])
def test_speed_is_held_against_the_committed_ratio(
    monkeypatch: pytest.MonkeyPatch, rates: list[float], ok: bool
) -> None:
    """The committed ratio is 4.05."""
    left = list(rates)
    result = lambda: {"results": [{"batch_size": 1, "ratio": left.pop(0)}]}  # noqa: E731
    monkeypatch.setattr(check, "thalweg", lambda *words: (result(), ""))
    found = check.speed(argparse.Namespace())
    assert found.ok == ok and len(found.words) == len(rates) and not left
    monkeypatch.setattr(check, "thalweg", lambda *words: (None, "it died"))
    assert check.speed(argparse.Namespace()).words == ("it died",)


def test_only_old_results_behind_the_support_page_fail_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    aged = [("gpu/a.json", True, "a is new"), ("gpu/b.json", False, "b is old")]
    monkeypatch.setattr(check, "_ages", lambda under: iter(aged))
    for backing, ok in (("gpu/a.json", True), ("gpu/b.json", False)):
        monkeypatch.setattr(docs, "index", lambda backing=backing: docs.Index([], [{"result": backing}]))
        verdict = check.gpu(argparse.Namespace())
        assert verdict.ok == ok and set(verdict.words) == {"a is new", "b is old"}, "all of them are listed"


def test_a_setting_or_test_of_the_support_page_that_is_not_there_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("def test_a() -> None: ...\n")
    page = "`--tp-size 8`, `--no-flag 3`, `tests/test_x.py`, `tests/test_x.py::test_a`, `tests/test_x.py::test_b`, `tests/y.py`"
    (tmp_path / "docs" / "support.md").write_text(page)
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert docs.unsupported() == [
        "docs/support.md: no flag --no-flag",
        "docs/support.md: no test tests/test_x.py::test_b",
        "docs/support.md: no test tests/y.py",
    ]


def test_the_release_check_has_every_documented_part() -> None:
    assert set(check.PARTS) == {"compose", "parity", "evals", "soak", "gpu", "docs", "long", "speed"}
    assert all(f"| {name} |" in (check.__doc__ or "") for name in check.PARTS)
    committed = {row["task"] for row in json.loads(check.EVALS.read_text())["results"]}
    assert set(check.TASKS) <= committed


def decoded(width: int, rate: float, batch: int = 1, **fields: Any) -> dict[str, Any]:
    made = {
        "shape": "chain",
        "width": width,
        "batch_size": batch,
        "input_len": 60,
        "decode_throughput": rate,
        "step_latency": 0.01,
    }
    return made | {"accept_length": 2.0, "drafted_tokens": 1, "steps_by_num_drafts": [0, 1], **fields}


def test_what_the_engine_chose_says_how_often_it_drafted() -> None:
    chosen = decoded(-1, 160.0, steps_by_num_drafts=[30, 10, 0, 0])
    rows = [
        decoded(0, 100.0, accept_length=1.0),
        decoded(1, 150.0),
        chosen,
        decoded(-1, 99.0, batch=2, drafted_tokens=0),
    ]
    first, second = tables.speculation({"speculation": rows})[2:4]
    assert first == "| 60 | 1 | 100 (1.00) | 150 (2.00) | 160 (2.00 in 25% of steps) |"
    assert second.endswith("| 99 (no drafts) |")
    steps = tables.speculation_steps({"speculation": rows[:3], "accept_length": 2.5})[2]
    assert steps.endswith("| 10.00 (1.00) | 10.00 (1.00, brings 1.60; drafts in 25%) |"), "all its steps count"


def test_the_best_fixed_number_of_several_models() -> None:
    slow = {"model": "a", "speculation": [decoded(0, 100.0), decoded(1, 90.0), decoded(-1, 200.0)]}
    fast = {
        "model": "b",
        "speculation": [decoded(0, 100.0), decoded(1, 150.0), decoded(2, 145.0), decoded(0, 50.0, batch=8)],
    }
    assert tables.speculation_best(slow, fast)[2:] == [
        "| a | 60 | 100 (plain) | – |",
        "| b | 60 | 100 → 150 (+50%, 1 draft) | 50 (plain) |",
    ]
