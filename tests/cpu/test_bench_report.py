"""Tables and plots from results: equal numbers give equal bytes, and missing data or matplotlib gives a message."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from thalweg.bench import report
from thalweg.bench.ablation_tables import markdown

pytest.importorskip("matplotlib")
RESULTS = Path(__file__).parents[2] / "benchmarks/cpu"
SERVED = RESULTS / "bench_sweep.json"
FIGURES = {
    "bench_sweep": "sweep",
    "bench_trace": "latency",
    "bench_conversations": "turns",
    "bench_startup": "phases",
    "bench_compare": "changes",
}
TABLES = ("bench_offline", "one_batch", "eval_tiny", "kernels")


def test_every_committed_kind_of_result_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(RESULTS / f"{name}.json") for name in (*FIGURES, *TABLES)]
    assert report.main([*files, "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    for name, suffix in FIGURES.items():
        png, svg = (tmp_path / f"{name}_{suffix}.{ending}" for ending in ("png", "svg"))
        assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 5_000
        assert ElementTree.parse(svg).getroot().tag.endswith("svg") and f"]({svg.name})" in page
        assert str(png) in capsys.readouterr().out or page
    assert (
        page.count("thalweg bench") >= 6
        and "| rate | concurrency |" in page.replace("  ", " ")
        and "AMD EPYC, 2 cores" in page
    )


def test_an_ablation_is_shown_as_its_own_page_shows_it(tmp_path: Path) -> None:
    result = RESULTS / "ablation_tiny.json"
    assert report.main([str(result), "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    assert markdown(json.loads(result.read_text())).rstrip() in page and len(list(tmp_path.iterdir())) == 1


def test_the_same_numbers_give_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        assert report.main([str(SERVED), "--out", str(tmp_path / folder)]) == 0
    first, second = (sorted((tmp_path / folder).iterdir()) for folder in ("a", "b"))
    assert [path.name for path in first] == [path.name for path in second] and len(first) == 3
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(first, second, strict=True))


def test_without_matplotlib_tables_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(SERVED), "--out", str(tmp_path)]) == 1
    assert "pip install 'thalweg[bench]'" in capsys.readouterr().err
    assert report.main([str(SERVED), "--out", str(tmp_path), "--format", "md"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not JSON"), ("[]", "a JSON object"), ('{"command": "thalweg bench load"}', "no report of 'thalweg bench load'"),
     ('{"command": "thalweg bench one-batch", "results": [{"batch_size": 1}]}', "incomplete result of `bench one-batch`"),
     ('{"command": "thalweg bench offline", "points": [{"x": 1}]}', "incomplete result of `bench offline`"),
     ('{"command": "thalweg eval", "results": [], "device": ["a"]}', "incomplete result of `eval`"),
     ('{"command": "thalweg bench offline", "points": [5]}', "incomplete result of `bench offline`"),
     ('{"command": "thalweg bench serve", "points": []}', "without any measurement")],
)  # fmt: skip
def test_files_without_results_are_refused(
    tmp_path: Path, content: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    assert report.main([str(path), "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert words in said and "r.json" in said


def test_a_partial_result_says_so(tmp_path: Path) -> None:
    result = json.loads((RESULTS / "bench_offline.json").read_text()) | {"partial": True, "ended": "Ctrl-C"}
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result))
    assert report.main([str(path), "--out", str(tmp_path), "--format", "md"]) == 0
    assert "**Partial**: Ctrl-C" in (tmp_path / "report.md").read_text()
